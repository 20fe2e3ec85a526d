"""The independent gate: proves a rewritten module or a packing before anything runs.

Nothing here shares code with the planner; the alias analysis is the checker's own. The parts load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hlo_memopt.check.errors import PlanCheckError
    from hlo_memopt.check.offsets import check_offsets
    from hlo_memopt.check.rewrite import check_rewrite, ordering_edges

__all__ = ["PlanCheckError", "check_offsets", "check_rewrite", "ordering_edges"]

_HOME = {
    "PlanCheckError": "errors",
    "check_offsets": "offsets",
    "check_rewrite": "rewrite",
    "ordering_edges": "rewrite",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
