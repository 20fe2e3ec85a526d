"""Checks a packing against its problem, by itself: it shares no code with the solver."""

from __future__ import annotations

from collections.abc import Sequence

from hlo_memopt.pack.problem import PackingProblem


class PackingError(ValueError):
    """A packing that does not hold."""


def validate(problem: PackingProblem, offsets: Sequence[int], capacity: int | None = None) -> int:
    """The height in bytes; raises `PackingError` with the first fault: of a buffer, else of a pair.

    ``capacity``: the height that must not be passed; the problem's own is not looked at, as a packing that passes it
    is a packing still.
    """
    if len(offsets) != len(problem.buffers):
        raise PackingError(f"{len(offsets)} offsets for {len(problem.buffers)} buffers")
    height = 0
    for buffer, offset in zip(problem.buffers, offsets, strict=True):
        where = f"buffer {buffer.id!r} at offset {offset}"
        if offset < 0:
            raise PackingError(f"{where}: negative")
        if offset % buffer.alignment:
            raise PackingError(f"{where}: not a multiple of its alignment {buffer.alignment}")
        if buffer.offset is not None and offset != buffer.offset:
            raise PackingError(f"{where}: it is fixed to {buffer.offset}")
        if capacity is not None and offset + buffer.size > capacity:
            raise PackingError(f"{where} ends at {offset + buffer.size}, beyond the capacity {capacity}")
        height = max(height, offset + buffer.size)
    rows = sorted((b.lower, n) for n, b in enumerate(problem.buffers) if b.size)
    alive: list[int] = []
    for lower, n in rows:
        alive = [m for m in alive if problem.buffers[m].upper > lower]
        begin, end = offsets[n], offsets[n] + problem.buffers[n].size
        for m in alive:
            other_begin, other_end = offsets[m], offsets[m] + problem.buffers[m].size
            if begin < other_end and other_begin < end:
                raise PackingError(
                    f"buffers {problem.buffers[m].id!r} [{other_begin}, {other_end}) and "
                    f"{problem.buffers[n].id!r} [{begin}, {end}) share bytes while both are alive at time {lower}"
                )
        alive.append(n)
    return height
