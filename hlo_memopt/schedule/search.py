"""Order one computation: constructive orders, division at cuts, exact windows; never worse than the given order."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from hlo_memopt.schedule.construct import backward_greedy_order, depth_first_order, greedy_order
from hlo_memopt.schedule.divide import Work, divide
from hlo_memopt.schedule.problem import Problem, peak

# effort -> cuts that one start may spend
_CUTS = {"fast": 60, "default": 400, "max": 4000}

# an order is called optimal within this share of its bound
OPTIMAL = 1.001


@dataclass(frozen=True)
class OrderResult:
    """``orders``: different good orders, the best peak first; ``bound``: floor for the peak of any order. Bytes."""

    orders: list[list[int]]
    peak: int
    bound: int
    cuts: int
    timed_out: bool


def search(problem: Problem, effort: str = "default", deadline: float | None = None) -> OrderResult:
    """Good orders of ``problem``, whose given order is 0..n-1. Deterministic while ``deadline`` does not bite.

    Raises nothing: the given order is always among the candidates.
    """
    given = list(range(problem.n))
    starts: list[Callable[[Problem], list[int]]] = [
        depth_first_order, backward_greedy_order, greedy_order
    ]  # fmt: skip
    found = [(peak(problem, given), 0, given)]
    for i, construct in enumerate(starts):
        order = construct(problem)
        found.append((peak(problem, order), i + 1, order))
    found.sort(key=lambda f: f[:2])
    bound = cuts = 0
    timed_out = False
    improved: list[tuple[int, int, list[int]]] = []
    for _, i, order in found:
        if deadline is not None and time.perf_counter() > deadline:
            timed_out = True
            improved.append((peak(problem, order), i, order))
            continue
        work = Work(_CUTS[effort], deadline=deadline)
        better, floor = divide(problem, order, work, target=bound)
        timed_out |= work.timed_out
        bound = max(bound, floor)
        cuts += work.spent
        improved.append((peak(problem, better), i, better))
    improved.sort(key=lambda f: f[:2])
    orders: list[list[int]] = []
    for _, _, order in improved:
        if order not in orders:
            orders.append(order)
    return OrderResult(orders, improved[0][0], min(bound, improved[0][0]), cuts, timed_out)
