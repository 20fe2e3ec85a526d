"""Exact solution of short stretches of an order around its peak.

A window keeps what stands before and behind it and orders its own nodes anew with least peak: by the dynamic program
over down-closed sets (`exact`), and where that grows too large by the MODeL integer program (`model_ilp`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hlo_memopt.schedule.divide import passed
from hlo_memopt.schedule.exact import solve_exact
from hlo_memopt.schedule.flat import Flat
from hlo_memopt.schedule.model_ilp import solve_order


@dataclass(frozen=True)
class WindowBudget:
    """What windows may cost.

    Attributes:
      states: of the dynamic program, in all windows together (a window counts for `_LEAST` at least).
      most: states in one window.
      sizes: nodes of a window; a larger size is tried where the smaller ones lower nothing.
      programs: integer programs, of ``ilp_nodes`` nodes and ``branches`` branch-and-bound nodes.
    """

    states: int
    most: int
    sizes: tuple[int, ...]
    programs: int
    ilp_nodes: int = 12
    branches: int = 200


_LEAST = 200


def improve_windows(
    flat: Flat,
    order: np.ndarray,
    bound: int,
    budget: WindowBudget,
    deadline: float | None = None,
    *,
    solver: str = "cbc",
) -> np.ndarray:
    """``order`` with windows around its peak solved exactly, as long as that lowers the peak towards ``bound``.

    ``bound`` in bytes; ``solver``: of the integer programs, "cbc" or "highs".
    """
    best = np.asarray(order, dtype=np.int64)
    programs, left = budget.programs, budget.states
    level = 0
    while level < len(budget.sizes) and left > 0 and not passed(deadline):
        profile = flat.profile(best)
        at = int(np.argmax(profile))
        if int(profile[at]) <= bound:
            break
        nodes = min(budget.sizes[level], flat.n)
        better = None
        # the peak in the middle of the window, near its end, near its start
        for ahead in (nodes // 2, nodes - 2, 1):
            low = max(0, min(at - ahead, flat.n - nodes))
            better, states, asked = _solve(flat, best, low, low + nodes, budget, programs > 0, solver)
            left -= max(states, _LEAST)
            programs -= asked
            if better is not None or left <= 0:
                break
        if better is None:
            level += 1
        else:
            best, level = better, 0
    return best


class _Window:
    """The nodes at [low, high) of an order as a problem of their own, and the order with them put anew."""

    def __init__(self, flat: Flat, order: np.ndarray, low: int, high: int) -> None:
        self._order, self._low, self._high = order, low, high
        before = np.zeros(flat.n, dtype=bool)
        before[order[:low]] = True
        self.part, self.base = flat.part(before, order[low:high])

    def put(self, local: Sequence[int]) -> np.ndarray:
        new = self._order.copy()
        new[self._low : self._high] = self._order[self._low : self._high][list(local)]
        return new


def _solve(
    flat: Flat, order: np.ndarray, low: int, high: int, budget: WindowBudget, may_ask: bool, solver: str
) -> tuple[np.ndarray | None, int, int]:
    """The order with [low, high) solved anew if that lowers the window's peak; states and integer programs used."""
    if high - low < 3:
        return None, 0, 0
    window = _Window(flat, order, low, high)
    peak = int(window.part.profile(np.arange(window.part.n)).max()) + window.base
    problem = window.part.to_problem()
    found = solve_exact(problem, max_states=budget.most, upper_bound=peak, fixed=window.base)
    if found.order is not None:
        return window.put(found.order), found.states, 0
    if found.proven or not may_ask:
        return None, found.states, 0
    return _ask_program(flat, order, low, high, budget, solver), found.states, 1


def _ask_program(
    flat: Flat, order: np.ndarray, low: int, high: int, budget: WindowBudget, solver: str
) -> np.ndarray | None:
    """The integer program on a shorter window around the peak."""
    at = low + int(np.argmax(flat.profile(order)[low:high]))
    low = max(low, at - budget.ilp_nodes // 2)
    window = _Window(flat, order, low, min(high, low + budget.ilp_nodes))
    given = list(range(window.part.n))
    result = solve_order(
        window.part.to_problem(),
        incumbent=given,
        fixed=window.base,
        max_nodes=budget.branches,
        max_seconds=10.0,
        solver=solver,
    )
    if result.order is None or list(result.order) == given:
        return None
    return window.put(result.order)
