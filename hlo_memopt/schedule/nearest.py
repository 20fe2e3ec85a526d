"""Bring a good order back towards the given one, so that nothing is moved without need.

The third objective, after the peak and the area near it. Two means, in turn:

- Segments: the nodes of a stretch of the order, sorted as given, are in topological order too. Where that costs no
  more it is taken; else the stretch is divided, at its highest step or in the middle, and each part is tried.
- Pulls: going through the order, the first of the nodes left, in the given sequence, is pulled to the front of what
  is left if all steps that it passes can bear it; if not, it waits until the last of those that cannot is behind. The
  same from the end pushes nodes back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np

from hlo_memopt.schedule.flat import Flat

# Work is counted in nodes passed over (about 2 microseconds); a pull or a segment costs that many at least, and one
# more for so many of its steps.
_PULL, _PULL_STEPS = 4, 1024
_SEGMENT, _SEGMENT_STEPS = 40, 8
# what may be spent: so much, or so much a node
_LEAST, _A_NODE = 300_000, 12
# segments shorter than this are left to the pulls
_SHORT = 16
_PASSES = 8

_DONE = -(1 << 60)


def nearest(flat: Flat, order: np.ndarray, peak: int, near: float = 0.9, budget: int | None = None) -> np.ndarray:
    """``order`` brought closer to the given order 0..n-1: as many inversions against it or fewer, at no more bytes.

    The result's profile stays within ``peak`` bytes (ValueError if that of ``order`` does not), and its area above
    ``near`` * ``peak`` bytes (rounded down) within that of ``order``. If the given order does so, it is the result;
    the problem may have precedence that the given order breaks. ``budget``: work that may be spent (`default_budget`
    if None), in nodes passed over; with less of it the same is done, but not to the end.
    """
    work = default_budget(flat) if budget is None else budget
    return _approach(flat, order, _Limits(peak, int(near * peak), 0, work))


def nearest_accepted(
    flat: Flat,
    order: np.ndarray,
    peak: int,
    accepts: Callable[[np.ndarray], bool],
    near: float = 0.9,
    tries: int = 6,
) -> np.ndarray:
    """`nearest`, but only as far as ``accepts`` says yes: how far is found by bisection of the work, in ``tries``.

    ``accepts`` may cost more than the profile: the heap may not pack as well. ``order`` itself is not asked for.
    """
    budget = default_budget(flat)
    limits = _Limits(peak, int(near * peak), 0, budget)
    found = _approach(flat, order, limits)
    if accepts(found):
        return found
    best = np.array(order, dtype=np.int64)
    least, most = 0, budget - limits.work
    for _ in range(tries):
        middle = (least + most) // 2
        found = nearest(flat, order, peak, near, middle)
        if accepts(found):
            best, least = found, middle
        else:
            most = middle
    return best


def default_budget(flat: Flat) -> int:
    """Work for a second or less up to 25,000 nodes, for two or three seconds at 100,000."""
    return max(_LEAST, _A_NODE * flat.n)


def _approach(flat: Flat, order: np.ndarray, limits: _Limits) -> np.ndarray:
    """Segments, then pulls from both ends in turn, until neither moves anything."""
    best = np.array(order, dtype=np.int64)
    if flat.n == 0:
        return best
    profile = flat.profile(best)
    if int(profile.max()) > limits.peak:
        raise ValueError(f"the order's peak is {int(profile.max())} bytes, more than {limits.peak}")
    most = _area(profile, limits.line)

    def keep(new: np.ndarray) -> None:
        """Segments and pulls do not see it all: a buffer that nothing touches counts at whatever step is first."""
        nonlocal best, profile
        steps = flat.profile(new)
        if int(steps.max()) <= limits.peak and _area(steps, limits.line) <= most:
            best, profile = new, steps

    keep(_sort_segments(flat, best, limits))
    spans = _Spans.of(flat)
    mirrored = spans.mirrored()
    number = idle = 0
    while number < _PASSES and idle < 2 and limits.work > 0:
        limits.slack = most - _area(profile, limits.line)
        if number % 2:
            pulls = _Pulls(mirrored, _mirrored(best), profile[::-1], limits)
            keep(_mirrored(pulls.run()))
        else:
            pulls = _Pulls(spans, best, profile, limits)
            keep(pulls.run())
        idle = 0 if pulls.moved else idle + 1
        number += 1
    return best


def _mirrored(order: np.ndarray) -> np.ndarray:
    """The same order from its end, with node v as n - 1 - v."""
    return len(order) - 1 - order[::-1]


def _area(profile: np.ndarray, line: int) -> int:
    """What of a profile is above ``line``: bytes, summed over the steps."""
    return int(np.maximum(profile - line, 0).sum())


@dataclass
class _Limits:
    """In bytes: no step above ``peak``; ``slack``: what the area above ``line`` may still grow.

    ``work``: left to spend.
    """

    peak: int
    line: int
    slack: int
    work: int


# -- segments ------------------------------------------------------------------------------------------------


def _sort_segments(flat: Flat, order: np.ndarray, limits: _Limits, base: int = 0) -> np.ndarray:
    """``order`` with stretches of it sorted, the longest that can be. ``base``: bytes alive all along."""
    n = flat.n
    given = np.arange(n)
    if limits.work <= 0 or (order == given).all():
        return order
    limits.work -= _SEGMENT + n // _SEGMENT_STEPS
    profile, wanted = flat.profile(order) + base, flat.profile(given) + base
    if int(wanted.max()) <= limits.peak and (flat.edge_from < flat.edge_to).all():
        more = _area(wanted, limits.line) - _area(profile, limits.line)
        if more <= limits.slack:
            limits.slack -= more
            return given
    if n < _SHORT:
        return order
    at = int(np.argmax(profile))
    cuts = [0, at, at + 1, n] if n // 8 <= at < n - n // 8 else [0, n // 2, n]
    order = order.copy()
    before = np.zeros(n, dtype=bool)
    for low, high in pairwise(cuts):
        if high - low > 1:
            nodes = np.sort(order[low:high])
            part, beside = flat.part(before, nodes)
            local = np.searchsorted(nodes, order[low:high])
            order[low:high] = nodes[_sort_segments(part, local, limits, base + beside)]
        before[order[low:high]] = True
    return order


# -- pulls ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Spans:
    """A problem that looks the same from its end: a buffer is alive from the first to the last node that touches it.

    Attributes:
      open_start, open_end: by buffer, whether it is alive before its first, after its last node.
      reuse_node, reuse_ends, reuse_starts: at the node, the one buffer may take over the bytes of the other, if the
        one ends and the other starts there.
    """

    n: int
    edge_from: np.ndarray
    edge_to: np.ndarray
    size: np.ndarray
    open_start: np.ndarray
    open_end: np.ndarray
    use_buffer: np.ndarray
    use_node: np.ndarray
    transient: np.ndarray
    reuse_node: np.ndarray
    reuse_ends: np.ndarray
    reuse_starts: np.ndarray

    @classmethod
    def of(cls, flat: Flat) -> _Spans:
        use_buffer, use_node = np.divmod(np.unique(flat.use_buffer * flat.n + flat.use_node), flat.n)
        return cls(
            flat.n, flat.edge_from, flat.edge_to,
            flat.size, flat.producer < 0, flat.live_out,
            use_buffer, use_node,
            flat.transient,
            flat.reuse_node, flat.reuse_from, flat.reuse_to,
        )  # fmt: skip

    def mirrored(self) -> _Spans:
        """From the end: node v becomes n - 1 - v."""
        top = self.n - 1
        return _Spans(
            self.n, top - self.edge_to, top - self.edge_from,
            self.size, self.open_end, self.open_start,
            self.use_buffer, top - self.use_node,
            self.transient[::-1],
            top - self.reuse_node, self.reuse_starts, self.reuse_ends,
        )  # fmt: skip


def _rows(row: np.ndarray, value: np.ndarray, rows: int) -> tuple[list[int], list[int]]:
    """``value`` by ``row``, which is sorted: the values, and where each row starts (and the last one ends)."""
    return value.tolist(), np.searchsorted(row, np.arange(rows + 1)).tolist()


class _Pulls:
    """One pass over an order. A node keeps its place in that order until it is passed or pulled to the front.

    ``usage``: bytes at each place, as far as the order is still to run, if the rest runs as it stands.
    """

    def __init__(self, spans: _Spans, order: np.ndarray, usage: np.ndarray, limits: _Limits) -> None:
        n, m = spans.n, len(spans.size)
        self.limits = limits
        self.nodes = order
        self.usage: np.ndarray = usage.copy()
        self.order: list[int] = order.tolist()
        place = np.empty(n, dtype=np.int64)
        place[order] = np.arange(n)
        self.place: list[int] = place.tolist()
        self.size: list[int] = spans.size.tolist()
        self.transient: list[int] = spans.transient.tolist()
        self.started: list[bool] = spans.open_start.tolist()
        self.open_end: list[bool] = spans.open_end.tolist()
        # the nodes of a buffer by place; those that ran are dropped from the end as they are met
        by_buffer = np.lexsort((place[spans.use_node], spans.use_buffer))
        self.users, starts = _rows(spans.use_buffer[by_buffer], place[spans.use_node[by_buffer]], m)
        self.first, self.behind = starts[:-1], starts[1:]
        self.left = [b - a for a, b in zip(self.first, self.behind, strict=True)]
        by_node = np.argsort(spans.use_node, kind="stable")
        self.touched, self.touched_at = _rows(spans.use_node[by_node], spans.use_buffer[by_node], n)
        by_node = np.argsort(spans.edge_from, kind="stable")
        self.succs, self.succs_at = _rows(spans.edge_from[by_node], spans.edge_to[by_node], n)
        self.missing: list[int] = np.bincount(spans.edge_to, minlength=n).tolist()
        self.reuse: dict[int, list[tuple[int, int]]] = {}
        triples = zip(spans.reuse_node.tolist(), spans.reuse_ends.tolist(), spans.reuse_starts.tolist(), strict=True)
        for v, ends, begins in triples:
            self.reuse.setdefault(v, []).append((ends, begins))
        self.live = int(spans.size[spans.open_start & (spans.open_end | (np.array(self.left, dtype=int) > 0))].sum())
        self.done = [False] * n
        self.ready = [v for v in range(n) if not self.missing[v]]
        heapify(self.ready)
        self.result: list[int] = []
        self.scratch: np.ndarray = np.empty(n, dtype=np.int64)
        self.lowest = 0
        self.moved = 0

    def run(self) -> np.ndarray:
        """The new order."""
        order, done, ready, limits = self.order, self.done, self.ready, self.limits
        waiting: list[tuple[int, int]] = []
        tries: dict[int, int] = {}
        limits.work -= len(order)
        front = 0
        while front < len(order):
            u = order[front]
            if done[u]:
                front += 1
                continue
            while waiting and waiting[0][0] < front:
                heappush(ready, heappop(waiting)[1])
            while ready and done[ready[0]]:
                heappop(ready)
            if not ready or ready[0] >= u or limits.work <= 0:
                self._pass(u)
                front += 1
                continue
            v = heappop(ready)
            while done[self.lowest]:
                self.lowest += 1
            there = self.place[v]
            blocked = self._pull(v, front)
            if blocked < 0:
                self._pass(v)
                self.moved += 1
                continue
            tries[v] = min(tries.get(v, 0) + 1, 20)
            again = max(blocked, front + (1 << tries[v]) - 2)  # more and more seldom
            if again < there:
                heappush(waiting, (again, v))
        return np.array(self.result, dtype=np.int64)

    def _pass(self, v: int) -> None:
        """``v`` runs next."""
        self.done[v] = True
        self.usage[self.place[v]] = _DONE
        started, left, size = self.started, self.left, self.size
        for b in self.touched[self.touched_at[v] : self.touched_at[v + 1]]:
            if not started[b]:
                started[b] = True
                self.live += size[b]
            left[b] -= 1
            if not left[b] and not self.open_end[b]:
                self.live -= size[b]
        missing = self.missing
        for w in self.succs[self.succs_at[v] : self.succs_at[v + 1]]:
            missing[w] -= 1
            if not missing[w]:
                heappush(self.ready, w)
        self.result.append(v)

    def _pull(self, v: int, front: int) -> int:
        """Book that ``v`` runs at ``front``: -1; or the place that must have been passed before it may."""
        limits, there, size = self.limits, self.place[v], self.size
        limits.work -= _PULL + (there - front) // _PULL_STEPS
        old: np.ndarray = self.usage[front:there]
        new: np.ndarray = self.scratch[front:there]
        if v > self.lowest:
            to_run = old > _DONE // 2
            lower = np.count_nonzero(to_run & (self.nodes[front:there] < v))
            if 2 * lower >= np.count_nonzero(to_run):
                return front  # no fewer inversions
        own = self.live + self.transient[v] - self._credit(v, self._ends_next, lambda b: not self.started[b])
        throughout = 0
        stretches: list[tuple[int, int, int]] = []
        turned: dict[int, tuple[set[int], set[int]]] = {}  # place -> buffers that now end, no longer start there
        for b in self.touched[self.touched_at[v] : self.touched_at[v + 1]]:
            if not self.started[b]:
                own += size[b]
                start = self.users[self.first[b]]
                if start == there:
                    throughout += size[b]
                else:
                    stretches.append((0, start - front, size[b]))
                    turned.setdefault(start, (set(), set()))[1].add(b)
            if not self.open_end[b]:
                if self.left[b] == 1:
                    throughout -= size[b]
                elif self._last(b) == there:
                    end = self._last_but_one(b)
                    stretches.append((end + 1 - front, there - front, -size[b]))
                    turned.setdefault(end, (set(), set()))[0].add(b)
        if own > limits.peak:
            return front
        np.add(old, throughout, out=new)
        for low, high, more in stretches:
            new[low:high] += more
        for at, (ends, starts) in turned.items():
            if self.order[at] in self.reuse:
                new[at - front] += self._credit_at(at, set(), set()) - self._credit_at(at, ends, starts)
        highest = int(new.max())
        if highest > limits.peak:
            return front + int(np.flatnonzero(new > limits.peak)[-1])
        line = limits.line
        area = max(own - line, 0) - max(int(self.usage[there]) - line, 0)
        if highest > line:
            area += _area(new, line) - _area(old, line)
        if area > limits.slack:
            grown = np.flatnonzero((new > line) & (new > old))
            return front + int(grown[-1]) if len(grown) else front
        limits.slack -= area
        old[:] = new
        return -1

    # -- who touches a buffer last, who takes over its bytes

    def _last(self, b: int) -> int:
        """Place of the last node left that touches ``b`` (there is one)."""
        end = self.behind[b]
        while self.done[self.order[self.users[end - 1]]]:
            end -= 1
        self.behind[b] = end
        return self.users[end - 1]

    def _last_but_one(self, b: int) -> int:
        """The one before it (there is one; `_last` was asked)."""
        last = self.behind[b] - 1
        end = last
        while self.done[self.order[self.users[end - 1]]]:
            end -= 1
        self.users[end], self.behind[b] = self.users[last], end + 1
        return self.users[end - 1]

    def _ends_next(self, b: int) -> bool:
        return self.left[b] == 1 and not self.open_end[b]

    def _credit_at(self, at: int, ends: set[int], starts: set[int]) -> int:
        """Bytes taken over at a place to come, were ``ends`` to end there and ``starts`` not to start there."""

        def does_end(b: int) -> bool:
            return b in ends or (not self.open_end[b] and self._last(b) == at)

        def does_start(b: int) -> bool:
            return b not in starts and not self.started[b] and self.users[self.first[b]] == at

        return self._credit(self.order[at], does_end, does_start)

    def _credit(self, v: int, does_end: Callable[[int], bool], does_start: Callable[[int], bool]) -> int:
        taken: set[int] = set()
        served: set[int] = set()
        total = 0
        for ends, starts in self.reuse.get(v, ()):
            if ends not in taken and starts not in served and does_end(ends) and does_start(starts):
                taken.add(ends)
                served.add(starts)
                total += self.size[ends]
        return total
