"""Proves that buffers alive at a common step do not share bytes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from heapq import heappop, heappush

from hlo_memopt.check.errors import PlanCheckError

Buffer = tuple[str, int, int, int, int]


def check_offsets(buffers: Sequence[Buffer], *, alignment: int = 1, capacity: int | None = None) -> None:
    """Raise `PlanCheckError` unless the packing holds.

    ``buffers``: (name, offset, size, start, end); a buffer is alive at every step from ``start`` to ``end``, both
    included. Every offset must be a multiple of ``alignment``, and everything must lie in [0, ``capacity``).
    Buffers of no bytes take part in nothing but the checks of their own numbers.
    """
    if alignment < 1:
        raise PlanCheckError(f"the alignment {alignment} is not positive")
    for name, offset, size, start, end in buffers:
        if offset < 0 or size < 0:
            raise PlanCheckError(f"buffer {name!r} has offset {offset} and size {size}: both must be at least 0")
        if start > end:
            raise PlanCheckError(f"buffer {name!r} is born at step {start}, after its end at step {end}")
        if offset % alignment:
            raise PlanCheckError(f"buffer {name!r} has offset {offset}, not a multiple of {alignment}")
        if capacity is not None and offset + size > capacity:
            raise PlanCheckError(f"buffer {name!r} ends at byte {offset + size}, beyond the capacity {capacity}")

    # Sweep over time. The live buffers are disjoint in bytes (or we have raised), so a new one can only collide
    # with its two neighbours by offset.
    live: list[tuple[int, int]] = []  # (offset, index into buffers), sorted
    ends: list[tuple[int, int, int]] = []  # (end, offset, index), a heap
    for index in sorted((i for i, b in enumerate(buffers) if b[2]), key=lambda i: buffers[i][3]):
        name, offset, size, start, end = buffers[index]
        while ends and ends[0][0] < start:
            _, gone, which = heappop(ends)
            del live[bisect_left(live, (gone, which))]
        at = bisect_left(live, (offset, index))
        for _, other in live[max(at - 1, 0) : at + 1]:
            name2, offset2, size2, start2, end2 = buffers[other]
            if offset2 < offset + size and offset < offset2 + size2:
                step = max(start, start2)
                raise PlanCheckError(
                    f"buffers {name2!r} [{offset2}, {offset2 + size2}) and {name!r} [{offset}, {offset + size}) "
                    f"share bytes while both are alive at step {step} (steps {start2}-{end2} and {start}-{end})"
                )
        live.insert(at, (offset, index))
        heappush(ends, (end, offset, index))
