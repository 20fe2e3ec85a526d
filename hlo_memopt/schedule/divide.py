"""Divide an order at its peak: the cheapest state before the peak's node splits the problem in two; recurse.

The binding cut of `schedule.cuts` is a good first half of a schedule. An order is improved by running its peak's
cheapest state first (in the order's own sequence), then the node, then the rest, each half improved in turn; a half
whose peak is below the target needs no work.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from hlo_memopt.schedule.cuts import CutFinder
from hlo_memopt.schedule.problem import Buffer, Problem, usage_profile


@dataclass
class Work:
    """What may still be spent: cuts, counted, so that every machine does the same; ``deadline`` is a safety net."""

    cuts: int
    deadline: float | None = None
    spent: int = 0
    timed_out: bool = False

    def take(self) -> bool:
        """Whether one more cut may be made; books it."""
        if self.spent >= self.cuts or self.timed_out:
            return False
        if self.deadline is not None and time.perf_counter() > self.deadline:
            self.timed_out = True
            return False
        self.spent += 1
        return True


@dataclass(frozen=True)
class Part:
    """Nodes of a larger problem as a problem of their own; ``base``: bytes alive throughout that none of them touches."""

    problem: Problem
    nodes: list[int]
    base: int


def restrict(problem: Problem, before: set[int], nodes: Sequence[int]) -> Part:
    """The part of ``problem`` that orders ``nodes`` after ``before`` has run (down-closed) and before the rest."""
    local = {v: i for i, v in enumerate(nodes)}
    base = 0
    buffers: list[Buffer] = []
    index: dict[int, int] = {}
    for j, b in enumerate(problem.buffers):
        started = b.producer < 0 or b.producer in before
        if not started and b.producer not in local:
            continue
        mine = tuple(local[c] for c in b.consumers if c in local)
        later = b.live_out or any(c not in local and c not in before for c in b.consumers)
        if started and not mine:
            base += b.size if later else 0
            continue
        if started and later:
            base += b.size
            continue
        index[j] = len(buffers)
        buffers.append(Buffer(b.size, -1 if started else local[b.producer], mine, later))
    preds = tuple(tuple(local[p] for p in problem.preds[v] if p in local) for v in nodes)
    transient = tuple(problem.transient[v] for v in nodes)
    reuse = tuple(
        (local[v], index[b], index[c]) for v, b, c in problem.reuse if v in local and b in index and c in index
    )
    return Part(Problem(len(nodes), preds, tuple(buffers), transient, reuse), list(nodes), base)


def divide(problem: Problem, order: Sequence[int], work: Work, target: int = 0) -> tuple[list[int], int]:
    """An order whose peak is at most that of ``order``, and a bound on the peak of every order of this problem.

    ``target``: a peak that is low enough.
    """
    best = list(order)
    bound = 0
    if problem.n < 3:
        return best, bound
    finder: CutFinder | None = None
    tried: set[int] = set()
    while True:
        profile = usage_profile(problem, best)
        at = int(profile.argmax())
        peak = int(profile[at])
        node = best[at]
        if peak <= max(bound, target) or node in tried:
            break
        if not work.take():
            break
        if finder is None:
            finder = CutFinder(problem)
        cut = finder.cut(node)
        bound = max(bound, cut.bound)
        if peak <= bound:
            break
        first = [v for v in best if cut.before[v]]
        rest = [v for v in best if not cut.before[v] and v != node]
        halves: list[int] = []
        done: set[int] = set()
        for nodes in (first, [node], rest):
            if len(nodes) > 2:
                part = restrict(problem, done, nodes)
                local, _ = divide(part.problem, range(len(nodes)), work, max(bound, target) - part.base)
                nodes = [part.nodes[i] for i in local]
            halves += nodes
            done.update(nodes)
        new_peak = int(usage_profile(problem, halves).max())
        if new_peak < peak:
            best = halves
            tried.clear()
        else:
            tried.add(node)
    return best, bound
