"""Less temp memory for JAX programs: XLA's instruction schedule, planned anew.

>>> step = hlo_memopt.jit(train_step, donate_argnums=0)

Planning needs scipy, mip and protobuf; they are imported when the first module is planned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hlo_memopt.comparison import compare
from hlo_memopt.errors import MemoryLimitError, PlanError
from hlo_memopt.hook.planning import plan, plans
from hlo_memopt.hook.scope import disable, enable, optimizing
from hlo_memopt.hook.tagged import jit
from hlo_memopt.options import Options

if TYPE_CHECKING:
    from hlo_memopt.planner.plan import Plan

__version__ = "0.1.0"

__all__ = [
    "MemoryLimitError",
    "Options",
    "Plan",
    "PlanError",
    "__version__",
    "compare",
    "disable",
    "enable",
    "jit",
    "optimizing",
    "plan",
    "plans",
]


def __getattr__(name: str) -> Any:
    if name == "Plan":
        from hlo_memopt.planner.plan import Plan

        return Plan
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
