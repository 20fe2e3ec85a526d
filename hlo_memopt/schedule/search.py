"""Order one computation: constructive orders, division at cuts, exact windows; never worse than the given order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hlo_memopt.schedule.construct import backward_greedy_order, depth_first_order, greedy_order
from hlo_memopt.schedule.divide import Work, divide, passed, smooth
from hlo_memopt.schedule.exact import solve_exact
from hlo_memopt.schedule.flat import Flat
from hlo_memopt.schedule.problem import Problem
from hlo_memopt.schedule.windows import WindowBudget, improve_windows

# effort -> (flow-network nodes that all starts together may spend, whole-problem cuts that are always allowed)
_BUDGET = {"fast": (100_000, 10), "default": (400_000, 40), "max": (10_000_000, 400)}

_WINDOWS = {
    "fast": WindowBudget(windows=0, nodes=0, states=0, programs=0),
    "default": WindowBudget(windows=24, nodes=24, states=4_000, programs=1),
    "max": WindowBudget(windows=400, nodes=40, states=100_000, programs=20, ilp_nodes=16),
}
# problems up to this size are solved exactly, by the dynamic program
_SMALL, _SMALL_STATES = 40, 50_000

# an order is called optimal within this share of its bound
OPTIMAL = 1.001


@dataclass(frozen=True)
class OrderResult:
    """``orders``: different good orders, the best peak first; ``bound``: floor for the peak of any order. Bytes.

    ``node``: the node whose minimum cut gave the bound (-1: none); ``work``: spent, in the budget's unit.
    """

    orders: list[list[int]]
    peak: int
    bound: int
    node: int
    work: int
    timed_out: bool


def search(
    problem: Problem, effort: str = "default", deadline: float | None = None, solver: str = "cbc"
) -> OrderResult:
    """Good orders of ``problem``, whose given order is 0..n-1. Deterministic while ``deadline`` does not bite.

    The given order is always among the starts, so the result is never worse. ``solver``: of the integer programs.
    """
    if problem.n == 0:
        return OrderResult([[]], 0, 0, -1, 0, False)
    flat = Flat.of(problem)
    starts = [np.arange(problem.n)]
    starts += [np.array(f(problem)) for f in (depth_first_order, backward_greedy_order, greedy_order)]
    found = sorted(
        ((int(flat.profile(o).max()), i, o) for i, o in enumerate(starts)), key=lambda f: f[:2]
    )
    nodes, whole = _BUDGET[effort]
    total = max(nodes, whole * (problem.n + len(problem.buffers)))
    bound, node, spent = 0, -1, 0
    timed_out = False
    improved: list[tuple[int, int, np.ndarray]] = []
    runs = [(i, order, largest) for _, i, order in found for largest in (False, True)]
    for rank, (i, order, largest) in enumerate(runs):
        done = bool(improved) and improved[0][0] <= OPTIMAL * bound
        # once an order is proven optimal, further ones are only there to be packed: spend little on them
        share = (total - spent) // (6 if done else max(1, (len(runs) - rank) // 2))
        work = Work(share, deadline=deadline, largest=largest)
        result = divide(flat, order, work, target=bound)
        timed_out |= work.timed_out
        if result.bound > bound:
            bound, node = result.bound, result.node
        spent += work.spent
        improved.append((int(flat.profile(result.order).max()), 2 * i + largest, result.order))
        improved.sort(key=lambda f: f[:2])
    if problem.n <= _SMALL and improved[0][0] > bound and not timed_out:
        exact = solve_exact(problem, max_states=_SMALL_STATES, upper_bound=improved[0][0])
        if exact.order is not None:
            improved.insert(0, (exact.peak, -1, np.array(exact.order)))
        bound = max(bound, min(exact.bound, improved[0][0]))
    best = improved[0]
    if best[0] > OPTIMAL * bound and _WINDOWS[effort].windows and not timed_out:
        better = improve_windows(flat, best[2], bound, _WINDOWS[effort], deadline, solver=solver)
        improved.insert(0, (int(flat.profile(better).max()), best[1], better))
    timed_out |= passed(deadline)
    orders: list[list[int]] = []
    for peak, _, order in improved:
        if peak <= 1.05 * improved[0][0] and order.tolist() not in orders:
            orders.append(order.tolist())
    return OrderResult(orders, improved[0][0], min(bound, improved[0][0]), node, spent, timed_out)


def smoothed(
    problem: Problem, order: list[int], above: float, effort: str = "default", deadline: float | None = None
) -> list[int]:
    """The same peak, with less alive wherever it is above that share of the peak: see `divide.smooth`."""
    flat = Flat.of(problem)
    given = np.array(order)
    peak = int(flat.profile(given).max())
    work = Work(_BUDGET[effort][0] // 4, deadline=deadline)
    better = smooth(flat, given, work, above=int(above * peak))
    return better.tolist() if int(flat.profile(better).max()) <= peak else order
