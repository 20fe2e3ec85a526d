"""Pulls: one pass over an order that brings nodes back to where they stand in the given one.

See `schedule.nearest`. Usage is tracked exactly, operand reuse included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from hlo_memopt.schedule.flat import Flat

# Work is counted in nodes passed over (about 2 microseconds); a pull costs that many at least, and one more for so many
# of its steps.
_PULL, _PULL_STEPS = 4, 1024

_DONE = -(1 << 60)


def area_above(profile: np.ndarray, line: int) -> int:
    """What of a profile is above ``line``: bytes, summed over the steps."""
    return int(np.maximum(profile - line, 0).sum())


@dataclass
class Limits:
    """In bytes: no step above ``peak``; ``slack``: what the area above ``line`` may still grow.

    ``work``: left to spend.
    """

    peak: int
    line: int
    slack: int
    work: int


@dataclass(frozen=True)
class Spans:
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
    def of(cls, flat: Flat) -> Spans:
        use_buffer, use_node = np.divmod(np.unique(flat.use_buffer * flat.n + flat.use_node), flat.n)
        return cls(
            flat.n, flat.edge_from, flat.edge_to,
            flat.size, flat.producer < 0, flat.live_out,
            use_buffer, use_node,
            flat.transient,
            flat.reuse_node, flat.reuse_from, flat.reuse_to,
        )  # fmt: skip

    def mirrored(self) -> Spans:
        """From the end: node v becomes n - 1 - v."""
        top = self.n - 1
        return Spans(
            self.n, top - self.edge_to, top - self.edge_from,
            self.size, self.open_end, self.open_start,
            self.use_buffer, top - self.use_node,
            self.transient[::-1],
            top - self.reuse_node, self.reuse_starts, self.reuse_ends,
        )  # fmt: skip


def _rows(row: np.ndarray, value: np.ndarray, rows: int) -> tuple[list[int], list[int]]:
    """``value`` by ``row``, which is sorted: the values, and where each row starts (and the last one ends)."""
    return value.tolist(), np.searchsorted(row, np.arange(rows + 1)).tolist()


class Pulls:
    """One pass over an order. A node keeps its place in that order until it is passed or pulled to the front.

    ``usage``: bytes at each place, as far as the order is still to run, if the rest runs as it stands.
    """

    def __init__(self, spans: Spans, order: np.ndarray, usage: np.ndarray, limits: Limits) -> None:
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
            area += area_above(new, line) - area_above(old, line)
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
