"""Temporaries put into idle places on purpose.

XLA puts a temporary into an idle allocation when the order happens to leave one idle for the temporary's whole life.
Here the order is made for it: of what is alive at the peak and the places that are idle then, a matching of largest
weight says who shall lie where; precedence keeps each place idle as long as its guest lives; guests cost nothing in the
problem that is then ordered anew. XLA serves large temporaries first, each with the last place in its list that fits
(`pack.assignment.allocation_order`), so the simulation has the last word.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence, Set

import numpy as np

from hlo_memopt.planner.idle import Fits, Place
from hlo_memopt.schedule.cuts import CutFinder
from hlo_memopt.schedule.flat import Flat
from hlo_memopt.schedule.problem import Problem, renumbered

_STEPS = 3  # peaks that are looked at
_SMALL = 3e-4  # guests below this share of the peak are not worth a precedence
_WORK = 400_000  # pairs tried times (nodes + buffers), about
_FEWEST = 8

Guest = tuple[int, int]  # buffer, place
Edge = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Hosted:
    """``problem`` in which guests cost nothing; ``nodes``: by node, its number in the problem we came from."""

    problem: Problem
    nodes: list[int]
    guests: list[Guest]


def invite(problem: Problem, places: list[Place], limit: int, banned: Set[Guest] = frozenset()) -> Hosted | None:
    """Choose guests at the peaks of the given order 0, 1, 2, ...; None if there are none.

    Args:
      limit: no precedence is added that forces a peak above so many bytes.
      banned: pairs that XLA did not put together when asked before.
    """
    party = _Party(problem, places, limit)
    left = max(_FEWEST, _WORK // (problem.n + len(problem.buffers)))
    for _ in range(_STEPS):
        wanted = party.wanted(banned)[:left]
        left -= len(wanted)
        if not party.invite(wanted):
            break
    return party.hosted() if party.guests else None


class _Party:
    def __init__(self, problem: Problem, places: list[Place], limit: int) -> None:
        self._problem, self._places, self._limit = problem, places, limit
        self._flat = Flat.of(problem)
        self._fits = Fits(problem, places)
        self._size = self._flat.size.copy()  # guests: 0
        self._preds = [set(p) for p in problem.preds]
        self._late: list[Edge] = []  # precedence that holds writers back
        self._order = np.arange(problem.n)
        self._rank = {i: k for k, i in enumerate(sorted(range(len(places)), key=lambda i: places[i].rank))}
        self._place_of = {p.companion: i for i, p in enumerate(places) if p.companion >= 0}
        self._users: list[list[int]] = [[b.producer, *b.consumers] for b in problem.buffers]
        self.guests: list[Guest] = []

    def _spans(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Each node's position; each buffer's first and last."""
        flat = self._flat
        at = np.empty(flat.n + 1, dtype=np.int64)
        at[self._order] = np.arange(flat.n)
        at[-1] = 0
        first = at[flat.producer]
        last = first.copy()
        np.maximum.at(last, flat.use_buffer, at[flat.use_node])
        last[flat.live_out] = flat.n
        return at, first, last

    def wanted(self, banned: Set[Guest]) -> list[Guest]:
        """Pairs that would save most at the peak of the present order, the largest first."""
        from scipy.optimize import linear_sum_assignment

        profile = dataclasses.replace(self._flat, size=self._size).profile(self._order)
        peak = int(np.argmax(profile))
        at, first, last = self._spans()
        alive = np.flatnonzero((first <= peak) & (last >= peak) & (self._size >= _SMALL * profile[peak]))
        busy = {i for b, i in self.guests if first[b] <= peak <= last[b]}
        idle = [
            i
            for i, place in enumerate(self._places)
            if i not in busy
            and all(at[r] <= peak for r in place.readers)
            and (place.writer < 0 or at[place.writer] >= peak)
        ]
        if not len(alive) or not idle:
            return []
        weight = np.zeros((len(alive), len(idle)))
        for x, b in enumerate(alive.tolist()):
            for y, i in enumerate(idle):
                if self._fits.of_buffer[b] >> i & 1 and (b, i) not in banned and self._in_turn(b, i):
                    weight[x, y] = self._size[b] + self._rank[i] / len(self._rank)
        rows, columns = linear_sum_assignment(weight, maximize=True)
        pairs = [(int(alive[x]), idle[y]) for x, y in zip(rows, columns, strict=True) if weight[x, y]]
        return sorted(pairs, key=lambda pair: (-self._size[pair[0]], pair))

    def _in_turn(self, b: int, i: int) -> bool:
        """Of places of one size XLA takes the last that fits: companions lie in earlier ones, so that none is lost."""
        own = self._place_of.get(b)
        return own is None or self._places[own].bytes != self._places[i].bytes or self._rank[i] < self._rank[own]

    def invite(self, pairs: Iterable[Guest]) -> bool:
        """Add the precedence that each pair needs, unless it forces a peak above the limit. Whether any was added."""
        pairs = list(pairs)
        for b, _ in pairs:
            self._size[b] = 0  # all of them at first: each is judged as if the others came too
        before = len(self.guests)
        for b, i in pairs:
            if not self._add(b, i):
                self._size[b] = self._flat.size[b]
        return len(self.guests) > before

    def _add(self, b: int, i: int) -> bool:
        early, late = self._edges(b, i)
        if any(u == w for u, w in early):
            return False  # what ends one guest makes the next
        preds = [set(p) for p in self._preds]
        for u, w in (*early, *late):
            preds[w].add(u)
        order = _near(self._problem, preds, {*self._late, *late}, self._order.tolist())
        if order is None:
            return False
        edges = np.array([(u, w) for w, us in enumerate(preds) for u in us], dtype=np.int64).reshape(-1, 2)
        flat = dataclasses.replace(self._flat, edge_from=edges[:, 0], edge_to=edges[:, 1], size=self._size)
        profile = flat.profile(np.array(order))
        peak = int(np.argmax(profile))
        if profile[peak] > self._limit and CutFinder(flat).cut(order[peak]).bound > self._limit:
            return False
        self._preds, self._order = preds, np.array(order)
        self._late += late
        self.guests.append((b, i))
        return True

    def _edges(self, b: int, i: int) -> tuple[list[Edge], list[Edge]]:
        """The place was read before the guest is made; it is written after the guest's last use; guests keep apart."""
        place, maker = self._places[i], self._problem.buffers[b].producer
        early = [(r, maker) for r in place.readers if r != maker]
        late = [(u, place.writer) for u in self._users[b] if place.writer >= 0 and u != place.writer]
        others = [j for j, k in self.guests if k == i]
        if others:
            _, first, last = self._spans()
            for other in others:
                earlier, later = (other, b) if last[other] < first[b] else (b, other)
                then = self._problem.buffers[later].producer
                early += [(u, then) for u in self._users[earlier]]
        return early, late

    def hosted(self) -> Hosted:
        """The problem, numbered along the present order."""
        problem, order = self._problem, self._order.tolist()
        buffers = tuple(
            dataclasses.replace(b, size=int(size)) for b, size in zip(problem.buffers, self._size, strict=True)
        )
        free = dataclasses.replace(
            problem,
            preds=tuple(tuple(sorted(p)) for p in self._preds),
            buffers=buffers,
            reuse=tuple(r for r in problem.reuse if buffers[r[1]].size == buffers[r[2]].size),
        )
        return Hosted(renumbered(free, order), order, self.guests)


def _near(problem: Problem, preds: list[set[int]], late: Set[Edge], order: list[int]) -> list[int] | None:
    """An order near the given one: readers come forward, ``late`` writers go back; None if ``preds`` has a cycle."""
    n = problem.n
    first = [
        {u for u in us if (u, w) not in late or u in problem.preds[w]} for w, us in enumerate(preds)
    ]
    pulled = _pull(first, order, {v: k for k, v in enumerate(order)}.__getitem__)
    if pulled is None:
        return None
    succs: list[set[int]] = [set() for _ in range(n)]
    for w, us in enumerate(preds):
        for u in us:
            succs[u].add(w)
    back = {v: n - k for k, v in enumerate(pulled)}
    pushed = _pull(succs, pulled[::-1], back.__getitem__)
    return None if pushed is None else pushed[::-1]


def _pull(needs: Sequence[Set[int]], order: Sequence[int], place: Callable[[int], int]) -> list[int] | None:
    """The nodes in ``order``, each behind what it needs, which comes forward for it; None if there is a cycle."""
    out: list[int] = []
    state = [0] * len(needs)  # 1: waits for what it needs, 2: placed
    for start in order:
        stack = [start]
        while stack:
            v = stack[-1]
            if state[v] == 2:
                stack.pop()
                continue
            missing = [p for p in needs[v] if state[p] != 2]
            if not missing:
                state[v] = 2
                out.append(stack.pop())
                continue
            if state[v] == 1:
                return None  # what it needs was stacked above it, and waits for it
            state[v] = 1
            stack += sorted(missing, key=place, reverse=True)
    return out
