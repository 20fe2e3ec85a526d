"""Less temp memory for JAX programs: XLA's instruction schedule, planned anew.

>>> step = hlo_memopt.jit(train_step, donate_argnums=0)

Names are imported when they are first used: the command line needs no JAX for ``--help``, and planning (scipy, mip,
protobuf) is loaded when the first module is planned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hlo_memopt.comparison import compare
    from hlo_memopt.errors import MemoryLimitError, PlanError
    from hlo_memopt.hook.planning import plan, plans
    from hlo_memopt.hook.scope import disable, enable, optimizing
    from hlo_memopt.hook.tagged import jit
    from hlo_memopt.options import Options
    from hlo_memopt.planner.plan import Plan

__version__ = "0.1.0"

_HOMES = {
    "MemoryLimitError": "errors",
    "Options": "options",
    "Plan": "planner.plan",
    "PlanError": "errors",
    "compare": "comparison",
    "disable": "hook.scope",
    "enable": "hook.scope",
    "jit": "hook.tagged",
    "optimizing": "hook.scope",
    "plan": "hook.planning",
    "plans": "hook.planning",
}

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
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
