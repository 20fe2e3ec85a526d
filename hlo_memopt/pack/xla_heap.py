"""XLA's own placement of buffers, simulated.

After scheduling, XLA places the buffers of a heap in decreasing size, each at the best-fitting free offset
(``GlobalDecreasingSizeBestFitHeap``), once sorted by size and once by duration, and keeps the smaller heap.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Chunk:
    """Something to place: ``bytes``, alive during every one of ``intervals`` (event times, ends included).

    The first interval is the one of the buffer that XLA allocates, the others share its chunk.
    """

    id: int
    bytes: int
    intervals: tuple[tuple[int, int], ...]


def place(chunks: list[Chunk], alignment: int) -> tuple[int, dict[int, int]]:
    """Heap size and offset by chunk id, as XLA would choose them. Bytes."""
    chunks = [c for c in chunks if c.bytes > 0]

    def spatial(c: Chunk) -> tuple[int, int, int]:
        start, end = c.intervals[0]
        return (-c.bytes, start - end, c.id)

    def temporal(c: Chunk) -> tuple[int, int, int]:
        return (min(s for s, _ in c.intervals) - max(e for _, e in c.intervals), -c.bytes, c.id)

    best = _best_fit(sorted(chunks, key=spatial), alignment)
    other = _best_fit(sorted(chunks, key=temporal), alignment)
    return min(best, other, key=lambda r: r[0])


def _best_fit(chunks: list[Chunk], alignment: int) -> tuple[int, dict[int, int]]:
    total = sum(len(c.intervals) for c in chunks)
    starts = np.empty(total, dtype=np.int64)
    ends = np.empty(total, dtype=np.int64)
    lows = np.empty(total, dtype=np.int64)
    highs = np.empty(total, dtype=np.int64)
    placed = 0
    heap = 0
    offsets: dict[int, int] = {}
    for chunk in chunks:
        busy = None
        for start, end in chunk.intervals:
            hit = (starts[:placed] <= end) & (ends[:placed] >= start)
            busy = hit if busy is None else busy | hit
        assert busy is not None
        offset = _smallest_gap(lows[:placed][busy], highs[:placed][busy], chunk.bytes)
        offsets[chunk.id] = offset
        heap = max(heap, offset + chunk.bytes)
        high = -(-(offset + chunk.bytes) // alignment) * alignment
        for start, end in chunk.intervals:
            starts[placed], ends[placed], lows[placed], highs[placed] = start, end, offset, high
            placed += 1
    return heap, offsets


def _smallest_gap(lows: np.ndarray, highs: np.ndarray, size: int) -> int:
    """Offset of the smallest free gap that takes ``size`` bytes, the lowest of equals; else behind the last."""
    if not len(lows):
        return 0
    order = np.argsort(lows, kind="stable")
    lows, highs = lows[order], np.maximum.accumulate(highs[order])
    gap_start = np.concatenate(([0], highs[:-1]))
    gap = lows - gap_start
    fits = np.flatnonzero(gap >= size)
    if len(fits):
        return int(gap_start[fits[np.argmin(gap[fits])]])
    return int(highs[-1])
