"""Packing problems and their solutions, as plain data. All sizes and offsets are bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_BYTES = 1 << 60  # of all buffers together, and of any offset or alignment: the search counts in 64 bits


@dataclass(frozen=True, slots=True)
class PackBuffer:
    """A buffer alive at the times [``lower``, ``upper``).

    Attributes:
      id: a name for people; need not be unique.
      size: bytes; a buffer of none conflicts with nothing.
      alignment: its offset must be a multiple of this.
      offset: where it has to lie; None: anywhere.
    """

    id: str
    lower: int
    upper: int
    size: int
    alignment: int = 1
    offset: int | None = None

    def fault(self) -> str | None:
        """What is wrong with these numbers, if anything is."""
        if self.lower >= self.upper:
            return f"lower {self.lower} is not before upper {self.upper}"
        if not 0 <= self.size <= MAX_BYTES:
            return f"size {self.size} is not between 0 and 2^60"
        if not 1 <= self.alignment <= MAX_BYTES:
            return f"alignment {self.alignment} is not between 1 and 2^60"
        if self.offset is not None:
            if not 0 <= self.offset <= MAX_BYTES:
                return f"offset {self.offset} is not between 0 and 2^60"
            if self.offset % self.alignment:
                return f"the fixed offset {self.offset} is not a multiple of the alignment {self.alignment}"
        return None


@dataclass(frozen=True)
class PackingProblem:
    """Buffers to be placed such that those alive at a common time share no byte.

    ``capacity``: the height to stay within; None: as low as can be. Raises ValueError where buffers are senseless or
    fixed ones collide.
    """

    buffers: tuple[PackBuffer, ...]
    capacity: int | None = None

    def __init__(self, buffers: Sequence[PackBuffer], capacity: int | None = None) -> None:
        object.__setattr__(self, "buffers", tuple(buffers))
        object.__setattr__(self, "capacity", capacity)
        if capacity is not None and not 0 <= capacity <= MAX_BYTES:
            raise ValueError(f"the capacity {capacity} is not between 0 and 2^60")
        for buffer in self.buffers:
            fault = buffer.fault()
            if fault is not None:
                raise ValueError(f"buffer {buffer.id!r}: {fault}")
        if sum(b.size + b.alignment for b in self.buffers) + max((b.offset or 0 for b in self.buffers), default=0) > (
            1 << 61
        ):
            raise ValueError("the buffers have more than 2^61 bytes in all")
        clash = self._clash()
        if clash is not None:
            a, b = clash
            raise ValueError(f"buffers {a.id!r} and {b.id!r} are fixed to the same bytes while both are alive")

    def _clash(self) -> tuple[PackBuffer, PackBuffer] | None:
        fixed = sorted((b for b in self.buffers if b.offset is not None and b.size), key=lambda b: b.lower)
        live: list[PackBuffer] = []
        for b in fixed:
            live = [a for a in live if a.upper > b.lower]
            for a in live:
                assert a.offset is not None and b.offset is not None
                if a.offset < b.offset + b.size and b.offset < a.offset + a.size:
                    return a, b
            live.append(b)
        return None


@dataclass(frozen=True)
class Packing:
    """Where every buffer lies.

    Attributes:
      offsets: one for each of the problem's buffers, in their order.
      height: the highest end of a buffer.
      lower_bound: no packing is lower than this.
      proven: no packing is lower than ``height``.
      nodes: placements that the search tried.
    """

    offsets: tuple[int, ...]
    height: int
    lower_bound: int
    proven: bool
    nodes: int = 0
