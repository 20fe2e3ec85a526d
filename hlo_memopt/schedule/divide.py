"""Divide an order at its peak: the cheapest state before the peak's node splits the problem in two; recurse.

The binding cut of `schedule.cuts` is a good first half of a schedule. An order is improved by running its peak's
cheapest state first (in the order's own sequence), then the node, then the rest, each half improved in turn; a half
whose peak is below the target needs no work.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hlo_memopt.schedule.cuts import CutFinder
from hlo_memopt.schedule.flat import Flat


def passed(deadline: float | None) -> bool:
    """Whether a deadline (time.perf_counter; None: there is none) has passed."""
    return deadline is not None and time.perf_counter() > deadline


@dataclass
class Work:
    """What may still be spent: nodes of the flow networks solved, counted, so that every machine does the same.

    ``deadline`` (time.perf_counter) is a safety net. ``largest``: of equally cheap states take the largest, another
    order of the same peak.
    """

    budget: int
    deadline: float | None = None
    spent: int = 0
    timed_out: bool = False
    largest: bool = False

    def take(self, amount: int) -> bool:
        """Book ``amount``; whether it was still to be had."""
        if self.spent >= self.budget or self.timed_out:
            return False
        if passed(self.deadline):
            self.timed_out = True
            return False
        self.spent += amount
        return True

    @property
    def exhausted(self) -> bool:
        """Whether `take` has begun to refuse."""
        return self.timed_out or self.spent >= self.budget


class Divided(NamedTuple):
    """``order``; ``bound``: bytes that no order's peak falls below; ``node``: whose cut says so (-1: none)."""

    order: np.ndarray
    bound: int
    node: int


def divide(flat: Flat, order: np.ndarray, work: Work, target: int = 0) -> Divided:
    """An order whose peak is at most that of ``order``, and a bound on the peak of every order of this problem.

    ``target``: a peak that is low enough. Bytes.
    """
    best = np.asarray(order, dtype=np.int64)
    bound, binding = 0, -1
    if flat.n < 3:
        return Divided(best, bound, binding)
    finder: CutFinder | None = None
    tried: set[int] = set()
    profile = flat.profile(best)
    while True:
        at = int(np.argmax(profile))
        peak, node = int(profile[at]), int(best[at])
        if peak <= max(bound, target) or node in tried or not work.take(flat.n + len(flat.size)):
            return Divided(best, bound, binding)
        if finder is None:
            finder = CutFinder(flat)
        cut = finder.cut(node, work.largest)
        if cut.bound > bound:
            bound, binding = cut.bound, node
        if peak <= bound:
            return Divided(best, bound, binding)
        others = best[best != node]
        inside = cut.before[others]
        before = np.zeros(flat.n, dtype=bool)
        first = _improve_part(flat, before, others[inside], work, max(bound, target))
        before[first] = before[node] = True
        rest = _improve_part(flat, before, others[~inside], work, max(bound, target))
        new = np.concatenate([first, [node], rest])
        new_profile = flat.profile(new)
        if int(new_profile.max()) < peak:
            best, profile = new, new_profile
            tried.clear()
        else:
            tried.add(node)


def _improve_part(flat: Flat, before: np.ndarray, nodes: np.ndarray, work: Work, target: int) -> np.ndarray:
    if len(nodes) < 3:
        return nodes
    part, base = flat.part(before, nodes)
    return nodes[divide(part, np.arange(len(nodes)), work, target - base).order]


def smooth(flat: Flat, order: np.ndarray, work: Work, above: int) -> np.ndarray:
    """Lower the profile of a good order wherever it is higher than ``above`` bytes, not only at its peak.

    Each side of a peak is a problem of its own, divided again, and so on. The peak does not rise; with less alive
    beside it, the buffers pack better.
    """
    order = np.asarray(order, dtype=np.int64)
    pending = [(0, len(order))]
    while pending:
        low, high = pending.pop()
        if high - low < 3:
            continue
        before = np.zeros(flat.n, dtype=bool)
        before[order[:low]] = True
        part, base = flat.part(before, order[low:high])
        local = divide(part, np.arange(high - low), work).order
        order[low:high] = order[low:high][local]
        profile = part.profile(local)
        at = int(np.argmax(profile))
        if int(profile[at]) + base < above or work.exhausted:
            continue
        pending += [(low + at + 1, high), (low, low + at)]
    return order
