"""Order one computation: constructive orders, division at cuts, exact windows; never worse than the given order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from hlo_memopt.schedule.construct import backward_greedy_order, depth_first_order, greedy_order
from hlo_memopt.schedule.divide import Work, divide, passed, smooth
from hlo_memopt.schedule.exact import solve_exact
from hlo_memopt.schedule.flat import Flat
from hlo_memopt.schedule.local import improve_local
from hlo_memopt.schedule.nearest import nearest
from hlo_memopt.schedule.problem import Problem, renumbered
from hlo_memopt.schedule.windows import WindowBudget, improve_windows

# effort -> (flow-network nodes that all starts together may spend, whole-problem cuts that are always allowed)
_BUDGET = {"fast": (100_000, 10), "default": (400_000, 40), "max": (10_000_000, 400)}

_WINDOWS = {
    "fast": WindowBudget(states=0, most=0, sizes=(), programs=0),
    "default": WindowBudget(states=60_000, most=5_000, sizes=(24, 40, 64, 100), programs=1, branches=50),
    "max": WindowBudget(states=3_000_000, most=100_000, sizes=(24, 40, 64, 100, 160), programs=20, ilp_nodes=16),
}
# problems up to this size go to the dynamic program, with so many states
_EXACT_NODES = 6_000
_EXACT_STATES = {"fast": 2_000, "default": 10_000, "max": 200_000}
# moves of the local search: a node, and at most
_MOVES = {"fast": 1_000, "default": 3_000, "max": 100_000}
_MOST_MOVES = {"fast": 6_000_000, "default": 60_000_000, "max": 500_000_000}
# how often a search starts again, in problems up to a size
_AGAIN = {"fast": 0, "default": 1, "max": 8}
_SMALL = 20_000

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

    @property
    def optimal(self) -> bool:
        """Whether the best order is within `OPTIMAL` of the bound."""
        return self.peak <= OPTIMAL * self.bound

    def with_others(self, orders: list[list[int]], peak: int, bound: int = 0, node: int = -1) -> OrderResult:
        """Further orders (``peak``: of the first) and what bounds them all."""
        first, second = (orders, self.orders) if orders and peak < self.peak else (self.orders, orders)
        if bound <= self.bound:
            bound, node = self.bound, self.node
        return replace(
            self,
            orders=[*first, *(o for o in second if o not in first)],
            peak=min(self.peak, peak) if orders else self.peak,
            bound=bound,
            node=node if node >= 0 else self.node,
        )


def search(
    problem: Problem, effort: str = "default", deadline: float | None = None, solver: str = "cbc"
) -> OrderResult:
    """Good orders of ``problem``, whose given order is 0..n-1. Deterministic while ``deadline`` does not bite.

    The given order is always among the starts, so the result is never worse. ``solver``: of the integer programs.
    Where division leaves a gap, the dynamic program tries the whole, then the local search. Division starts again from
    the order found: numbered along that, its starts differ. Windows come last.
    """
    best = _divided(problem, effort, deadline)
    flat = Flat.of(problem)
    if problem.n <= _EXACT_NODES and not best.optimal and not passed(deadline):
        exact = solve_exact(problem, max_states=_EXACT_STATES[effort], upper_bound=best.peak)
        orders = [] if exact.order is None else [list(exact.order)]
        best = best.with_others(orders, exact.peak, min(exact.bound, best.peak))
    if not best.optimal and not passed(deadline):
        moves = min(_MOVES[effort] * problem.n, _MOST_MOVES[effort])
        for start in (np.array(best.orders[0]), np.arange(problem.n)):
            moved = improve_local(flat, start, best.bound, moves, deadline)
            best = best.with_others([moved.tolist()], int(flat.profile(moved).max()))
    for _ in range(_AGAIN[effort] if problem.n <= _SMALL else 0):
        if best.optimal or passed(deadline):
            break
        order = best.orders[0]
        found = _divided(renumbered(problem, order), effort, deadline)
        better = found.peak < best.peak
        best = best.with_others(
            [[order[v] for v in o] for o in found.orders],
            found.peak,
            found.bound,
            order[found.node] if found.node >= 0 else -1,
        )
        if not better:
            break
    if not best.optimal and _WINDOWS[effort].states and not passed(deadline):
        given, budget = np.array(best.orders[0]), _WINDOWS[effort]
        windowed = improve_windows(flat, given, best.bound, budget, deadline, solver=solver)
        best = best.with_others([windowed.tolist()], int(flat.profile(windowed).max()))
    return replace(best, timed_out=best.timed_out or passed(deadline))


def _divided(problem: Problem, effort: str, deadline: float | None) -> OrderResult:
    """The given order and constructed ones, each divided at its peaks."""
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
    orders: list[list[int]] = []
    for peak, _, order in improved:
        if peak <= 1.05 * improved[0][0] and order.tolist() not in orders:
            orders.append(order.tolist())
    return OrderResult(orders, improved[0][0], min(bound, improved[0][0]), node, spent, timed_out)


def variants(problem: Problem, orders: Iterable[list[int]]) -> Iterator[list[int]]:
    """Orders of no higher peak, drawn towards depth-first and greedy ones. They pack differently, often better."""
    flat = Flat.of(problem)
    targets = []
    for start, nears in ((depth_first_order, (0.97, 0.9, 0.8)), (greedy_order, (0.9,))):
        toward = start(problem)
        place = np.empty(problem.n, dtype=np.int64)
        place[toward] = np.arange(problem.n)
        targets.append((toward, place, Flat.of(renumbered(problem, toward)), nears))
    for order in orders:
        peak = int(flat.profile(np.array(order)).max())
        for toward, place, along, nears in targets:
            for near in nears:
                yield [toward[v] for v in nearest(along, place[order], peak, near).tolist()]


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
