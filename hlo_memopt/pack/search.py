"""Looks for a packing of one part within a ceiling: the search of kernel.py from several preference orders in turn.

Which of two buffers is tried first at equal offsets decides whether a search ends after hundreds of nodes or never
(MiniMalloc, ASPLOS 2023, orders by total of the fullest slot, width and area, and so do we). So searches from different
orders take turns, each going on where it stopped, with turns that double in length. One that runs out of choices proves
that there is no such packing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from hlo_memopt.pack import kernel
from hlo_memopt.pack.sections import Ints, Part

# each a list of columns, the largest first: T(otal of its fullest slot), W(idth in time), C(ount of slots), A(rea),
# B(ytes times slots), S(ize), L(ate end), E(arly start)
_ORDERS = ("TWC", "LEA", "ETA", "BLC", "TWA", "TAW", "TCS", "CTL")
_FIRST_TURN = 2000  # nodes
_MAX_PAIRS = 40_000_000  # of buffers alive together, which are kept as a list
_MEMO_BITS = 16


@dataclass(frozen=True)
class Outcome:
    """``offsets``: the packing found, or None. ``proven``: there is none. ``nodes``: placements tried."""

    offsets: Ints | None
    proven: bool
    nodes: int


def fit(part: Part, ceiling: int, nodes: int, deadline: float | None = None) -> Outcome:
    """A packing of ``part`` no higher than ``ceiling`` bytes, looked for with at most some ``nodes`` placements.

    ``deadline``: time.perf_counter, looked at between turns; without it the result depends on nothing but arguments.
    """
    shared = _Shared.of(part)
    if shared is None or (part.size > ceiling - np.maximum(part.fixed, 0)).any():
        return Outcome(None, shared is not None, 0)
    searches: list[_Search] = []
    spent, turn = 0, _FIRST_TURN
    while True:
        for k, order in enumerate(_ORDERS):
            if spent >= nodes or (deadline is not None and time.perf_counter() >= deadline):
                return Outcome(None, False, spent)
            if k == len(searches):
                searches.append(_Search(part, shared, _ranked(part, shared.sums, order), ceiling))
            search = searches[k]
            before = search.nodes
            status = search.run(min(turn, nodes - spent), deadline)
            spent += search.nodes - before
            if status == kernel.FOUND:
                return Outcome(search.offsets(), False, spent)
            if status == kernel.EXHAUSTED:
                return Outcome(None, True, spent)
        turn *= 2


def _ranked(part: Part, sums: Ints, columns: str) -> Ints:
    """Buffers as the search prefers them; what else is equal stays as it is."""
    slots = part.last - part.first
    keys = {
        "T": lambda: np.array([sums[a:b].max() for a, b in zip(part.first, part.last, strict=True)]),
        "W": lambda: part.length,
        "C": lambda: slots,
        "A": lambda: part.size.astype(float) * part.length,
        "B": lambda: part.size * slots,
        "S": lambda: part.size,
        "L": lambda: part.last,
        "E": lambda: -part.first,
    }
    return np.lexsort([-keys[c]() for c in reversed(columns)])


@dataclass(frozen=True)
class _Shared:
    """What the searches of a part have in common."""

    sums: Ints
    pairs: int

    @classmethod
    def of(cls, part: Part) -> _Shared | None:
        """None: too many pairs to be kept."""
        starts, ends = np.sort(part.first), np.sort(part.last)
        begun = np.searchsorted(starts, part.last, side="left")  # that start before its end
        gone = np.searchsorted(ends, part.first, side="right")  # of these, that end before its start
        pairs = int((begun - gone).sum()) - part.n
        if pairs > _MAX_PAIRS:
            return None
        return cls(part.slot_sums(part.room), pairs)


class _Search:
    """One depth-first search; its state is in arrays that the kernel goes on from."""

    def __init__(self, part: Part, shared: _Shared, ranked: Ints, ceiling: int) -> None:
        n, slots = part.n, part.slots
        self.ranked = ranked
        first, last, room = part.first[ranked], part.last[ranked], part.room[ranked]
        fixed, alignment = part.fixed[ranked], part.alignment[ranked]
        near_count = np.zeros(n + 1, dtype=np.int64)
        near = np.empty(shared.pairs, dtype=np.int32)
        for b in range(n):
            others = np.flatnonzero((first < last[b]) & (last > first[b]))
            others = others[others != b]
            near_count[b + 1] = near_count[b] + len(others)
            near[near_count[b] : near_count[b + 1]] = others
        lives = last - first
        buffers = np.repeat(np.arange(n), lives)
        alive_in = np.arange(len(buffers)) - np.repeat(np.cumsum(lives) - lives, lives) + np.repeat(first, lives)
        slot_buffers = buffers[np.argsort(alive_in, kind="stable")].astype(np.int32)
        slot_start = np.concatenate(([0], np.cumsum(np.bincount(alive_in, minlength=slots))))
        limit = np.where(fixed >= 0, fixed, ceiling - part.size[ranked])
        low = np.maximum(fixed, 0)
        cut = np.zeros(slots + 1, dtype=np.int64)
        np.add.at(cut, first, 1)
        np.add.at(cut, last - 1, -1)
        spare = int((part.room - part.size).max())
        # hashes keep offsets below 2^43 and numbers below 2^20 apart
        small = ceiling < 1 << 43 and n < 1 << 20
        memo = 1 << min(_MEMO_BITS, max(6, n)) if small else 1
        self._fixed_arguments = (
            first, last, room, limit, alignment, fixed, _twins(first, last, room, alignment, fixed, part.size[ranked]),
            near_count, near, slot_start, slot_buffers,
        )  # fmt: skip
        self._offset = np.full(n, -1, dtype=np.int64)
        frames = np.zeros((n + 2, kernel.FRAME_COLUMNS), dtype=np.int64)
        frames[0, : kernel.PART_COLUMNS] = (0, slots, 0, n, 0, 0, -1, -1)
        self._state = (
            self._offset, low, np.zeros(slots, dtype=np.int64), shared.sums.copy(), np.cumsum(cut)[:-1],
            np.arange(n), frames, np.zeros((2 * n + 8, kernel.PART_COLUMNS), dtype=np.int64),
        )  # fmt: skip
        self._trail = np.zeros((2, n + slots + 4096), dtype=np.int64)
        self._queue = np.zeros(n, dtype=np.int64)
        self._control = np.zeros(kernel.CONTROL_WORDS, dtype=np.int64)
        self._control[kernel.ENTER] = 1
        self._memo = (
            np.zeros(memo, dtype=np.int64), np.zeros(memo, dtype=np.int64),
            np.full(memo, kernel.FAR, dtype=np.int64), np.zeros(memo, dtype=np.int64),
        )  # fmt: skip
        self._ceiling = ceiling + spare

    @property
    def nodes(self) -> int:
        return int(self._control[kernel.NODES])

    def run(self, budget: int, deadline: float | None) -> int:
        """Go on for ``budget`` nodes, in pieces if there is a deadline; one of the kernel's status words."""
        stop = self.nodes + budget
        while True:
            left = stop - self.nodes
            if deadline is not None:
                left = min(left, 20_000)
            status = kernel.compiled()(
                *self._fixed_arguments, *self._state, self._trail[0], self._trail[1], self._queue, self._control,
                *self._memo, self._ceiling, left,
            )  # fmt: skip
            if status == kernel.OUT_OF_TRAIL:
                more = np.zeros((2, 2 * self._trail.shape[1]), dtype=np.int64)
                more[:, : self._trail.shape[1]] = self._trail
                self._trail = more
            elif (
                status != kernel.OUT_OF_NODES
                or self.nodes >= stop
                or (deadline is not None and time.perf_counter() >= deadline)
            ):
                return int(status)

    def offsets(self) -> Ints:
        """Of the packing found, in the part's own order of buffers."""
        result = np.empty(len(self.ranked), dtype=np.int64)
        result[self.ranked] = self._offset
        return result


def _twins(*columns: Ints) -> Ints:
    """For each buffer the last one before it that is equal in all ``columns``, else -1; fixed ones have none."""
    seen: dict[tuple[int, ...], int] = {}
    result = np.full(len(columns[0]), -1, dtype=np.int64)
    for b, row in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        result[b] = seen.get(row, -1)
        seen[row] = b
    return result
