"""Offsets for buffers with known lives (dynamic storage allocation), as low as the budget finds.

In this order: the largest live sum as lower bound, cheap packings (starts.py), and for what is left above the bound the
canonical search (search.py), first at the bound itself, then between the bound and the best packing. Times that no
buffer crosses split a problem (sections.py); the highest part goes first, and the others need not be lower than it.
"""

from __future__ import annotations

import time

import numpy as np

from hlo_memopt.pack.bounds import live_bound
from hlo_memopt.pack.problem import Packing, PackingProblem
from hlo_memopt.pack.search import fit
from hlo_memopt.pack.sections import Ints, Part, split
from hlo_memopt.pack.starts import starts
from hlo_memopt.pack.validate import validate

NODES = {"fast": 200_000, "default": 10_000_000, "max": 200_000_000}  # placements tried in a part; some 10^6 a second
_AT_BOUND = 2  # half of the nodes go into the first tries, at the target and at the bound
_STEPS = 8  # then each ceiling gets this part of what is left


def pack(
    problem: PackingProblem, effort: str = "default", *, nodes: int | None = None, time_limit: float | None = None
) -> Packing:
    """A valid packing: within the capacity if one is found, else the lowest found.

    With a capacity the search ends at the first packing within it. A lower bound above the capacity proves that there
    is none.

    Args:
      effort: "fast", "default" or "max": how many nodes the search may visit.
      nodes: how many instead, in each part.
      time_limit: seconds after which the search stops with what it has; without it, results are the same everywhere.
    """
    if effort not in NODES:
        raise ValueError(f"effort must be one of {', '.join(NODES)}, not {effort!r}")
    budget = NODES[effort] if nodes is None else nodes
    deadline = None if time_limit is None else time.perf_counter() + time_limit
    offsets = np.array([b.offset or 0 for b in problem.buffers], dtype=np.int64)
    level = max((b.offset or 0 for b in problem.buffers if not b.size), default=0)
    bound, spent = level, 0
    parts = sorted(((live_bound(p), p) for p in split(problem)), key=lambda pair: -pair[0])
    if parts:
        bound = level = max(level, parts[0][0])
    if problem.capacity is not None:
        level = max(level, problem.capacity)
    for low, part in parts:
        solution = _Part(part, low, level, budget, deadline)
        offsets[part.index] = solution.offsets
        level = max(level, solution.height)
        bound = max(bound, solution.bound)
        spent += solution.nodes
    height = validate(problem, offsets.tolist())
    return Packing(tuple(offsets.tolist()), height, bound, height == bound, spent)


class _Part:
    """The packing of one part: as low as ``target`` if that is found, else as low as the nodes allow."""

    def __init__(self, part: Part, bound: int, target: int, budget: int, deadline: float | None) -> None:
        self.part, self.bound, self.target, self.deadline = part, bound, target, deadline
        self.budget, self.nodes = budget, 0
        self.step = part.step()
        self.offsets = np.empty(0, dtype=np.int64)
        self.height = -1
        for found in starts(part):
            self._take(found)
            if self.height <= target:
                return
        self._lower()

    def _take(self, offsets: Ints) -> None:
        height = self.part.height(offsets)
        if self.height < 0 or height < self.height:
            self.offsets, self.height = offsets, height

    def _try(self, ceiling: int, nodes: int) -> bool | None:
        """Whether there is a packing within ``ceiling``; None: not known."""
        outcome = fit(self.part, ceiling, nodes, self.deadline)
        self.nodes += outcome.nodes
        if outcome.offsets is not None:
            self._take(outcome.offsets)
            return True
        if outcome.proven:
            self.bound = max(self.bound, (ceiling // self.step + 1) * self.step)
            return False
        return None

    def _lower(self) -> None:
        """Search at the target and at the bound, then halve what lies between the highest failure and the best packing.

        A lower ceiling cuts off more, so a packing at the bound may be found where none was at a roomier target.
        """
        failed = self.target
        if self.bound < self.target:
            if self._try(failed, self.budget // _AT_BOUND // 2) or self._try(self.bound, self.budget // _AT_BOUND // 2):
                return
        elif self._try(failed, self.budget // _AT_BOUND):
            return
        open_steps = True
        while self._left() > 0:
            floor = max(failed, self.bound - 1)
            if self.height <= max(self.bound, self.target):
                return
            ceiling = (floor + self.height) // 2 if open_steps else self.height - 1
            ceiling = max(ceiling // self.step * self.step, floor)
            if ceiling <= floor:
                ceiling, open_steps = self.height - 1, False
            share = max(self._left() // _STEPS, 1) if open_steps else self._left()
            before = self.nodes
            answer = self._try(ceiling, share)
            if answer is None:
                if not open_steps or self.nodes == before:
                    return
                failed = ceiling
            elif answer is False:
                failed = max(failed, ceiling)

    def _left(self) -> int:
        if self.deadline is not None and time.perf_counter() >= self.deadline:
            return 0
        return self.budget - self.nodes
