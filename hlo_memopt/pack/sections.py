"""A packing problem cut into parts that do not touch, and each part's times cut down to slots.

A slot is a time at which a maximal set of buffers is alive: any two buffers that are ever alive together are so in a
slot, and slots are all that decides where buffers may lie. A part ends where no buffer is alive on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np

from hlo_memopt.pack.problem import PackingProblem

Ints = np.ndarray


@dataclass(frozen=True)
class Part:
    """Buffers of one part as arrays, one entry a buffer.

    Attributes:
      index: its number in the problem.
      first, last: it is alive in the slots [first, last).
      length: of its life, in the problem's times.
      size: bytes.
      room: ``size`` rounded up to ``unit``.
      alignment: of its offset.
      fixed: its offset if that is given, else -1.
      slots: how many there are.
      unit: all alignments are multiples of this.
    """

    index: Ints
    first: Ints
    last: Ints
    length: Ints
    size: Ints
    room: Ints
    alignment: Ints
    fixed: Ints
    slots: int
    unit: int

    @property
    def n(self) -> int:
        return len(self.index)

    def slot_sums(self, values: Ints) -> Ints:
        """By slot, the sum of ``values`` over the buffers alive in it."""
        change = np.zeros(self.slots + 1, dtype=np.int64)
        np.add.at(change, self.first, values)
        np.add.at(change, self.last, -values)
        return np.cumsum(change)[:-1]

    def step(self) -> int:
        """All canonical heights are multiples of this: the greatest common divisor of all numbers."""
        common = gcd(*map(int, self.size), *map(int, self.alignment))
        return gcd(common, *(int(f) for f in self.fixed if f > 0))

    def height(self, offsets: Ints) -> int:
        return int((offsets + self.size).max())


def split(problem: PackingProblem) -> list[Part]:
    """The parts of the problem, in the order of time; buffers of no bytes are in none."""
    numbers = sorted(
        (n for n, b in enumerate(problem.buffers) if b.size),
        key=lambda n: (problem.buffers[n].lower, problem.buffers[n].upper, n),
    )
    parts: list[list[int]] = []
    end = None
    for n in numbers:
        buffer = problem.buffers[n]
        if end is None or buffer.lower >= end:
            parts.append([])
            end = buffer.upper
        parts[-1].append(n)
        end = max(end, buffer.upper)
    return [_part(problem, numbers) for numbers in parts]


def _part(problem: PackingProblem, numbers: list[int]) -> Part:
    buffers = [problem.buffers[n] for n in numbers]
    points = sorted([(b.upper, 0, k) for k, b in enumerate(buffers)] + [(b.lower, 1, k) for k, b in enumerate(buffers)])
    first, last = [0] * len(buffers), [0] * len(buffers)
    slots, grown = 0, False
    for _, born, k in points:
        if born:
            first[k] = slots
            grown = True
        else:
            slots += grown
            grown = False
            last[k] = slots
    unit = gcd(*(b.alignment for b in buffers))

    def ints(values: list[int]) -> Ints:
        return np.array(values, dtype=np.int64)

    size = ints([b.size for b in buffers])
    longest = 1 << 62  # times may be any integers
    return Part(
        ints(numbers),
        ints(first),
        ints(last),
        ints([min(b.upper - b.lower, longest) for b in buffers]),
        size,
        -(-size // unit) * unit,
        ints([b.alignment for b in buffers]),
        ints([-1 if b.offset is None else b.offset for b in buffers]),
        slots,
        unit,
    )
