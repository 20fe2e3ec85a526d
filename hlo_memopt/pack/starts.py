"""Cheap packings to start from: buffers in some order, each into a free gap.

The orders are XLA's two (by size, by duration; see xla_heap) and others from the literature on dynamic storage
allocation; the gap is the tightest one that takes the buffer, as in XLA, or the lowest. Buffers with a given offset go
first.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hlo_memopt.pack.sections import Ints, Part

_MANY = 2000  # buffers; of more, only XLA's orders are tried


def starts(part: Part) -> Iterator[Ints]:
    """Packings (offsets by buffer), one after the other; the first are XLA's."""
    size, length = part.size, part.length
    area = size.astype(float) * length
    slots = part.last - part.first
    sums = part.slot_sums(part.room)
    total = np.array([sums[a:b].max() for a, b in zip(part.first, part.last, strict=True)])
    keys: list[tuple[Ints, ...]] = [(-size, -length), (-length, -size)]
    if part.n <= _MANY:
        keys += [(-area, -size), (-total, -slots, -area), (-total, -size), (part.first, -size), (-part.last, -size)]
    for tightest in (True, False):
        for key in keys:
            order = np.lexsort((*reversed(key), part.fixed < 0))
            yield _place(part, order, tightest)


def _place(part: Part, order: Ints, tightest: bool) -> Ints:
    """Offsets if buffers come in ``order``, each at the lowest offset of its gap."""
    n = part.n
    offsets = np.zeros(n, dtype=np.int64)
    first, last = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int64)
    low, high = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int64)
    for placed, b in enumerate(order):
        if part.fixed[b] >= 0:
            at = int(part.fixed[b])
        else:
            near = (first[:placed] < part.last[b]) & (last[:placed] > part.first[b])
            at = _gap(low[:placed][near], high[:placed][near], int(part.size[b]), int(part.alignment[b]), tightest)
        offsets[b] = at
        first[placed], last[placed], low[placed], high[placed] = part.first[b], part.last[b], at, at + part.size[b]
    return offsets


def _gap(low: Ints, high: Ints, size: int, alignment: int, tightest: bool) -> int:
    if not len(low):
        return 0
    by_low = np.argsort(low, kind="stable")
    low, high = low[by_low], np.maximum.accumulate(high[by_low])
    begin = -(-np.concatenate(([0], high)) // alignment) * alignment
    gap = low - begin[:-1]
    fits = np.flatnonzero(gap >= size)
    if not len(fits):
        return int(begin[-1])
    return int(begin[fits[np.argmin(gap[fits])] if tightest else fits[0]])
