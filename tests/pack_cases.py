"""Packing problems for tests, and the least height by brute force."""

from __future__ import annotations

import csv
import itertools
import random
from pathlib import Path

from hypothesis import strategies as st

from hlo_memopt.pack.problem import PackBuffer, PackingProblem

MINIMALLOC = Path(__file__).resolve().parents[2] / "shared" / "data" / "minimalloc"
CAPACITY = 1048576


def read_csv(path: Path, capacity: int | None = CAPACITY) -> PackingProblem:
    rows = csv.DictReader(path.open())
    buffers = [PackBuffer(r["id"], int(r["lower"]), int(r["upper"]), int(r["size"])) for r in rows]
    return PackingProblem(buffers, capacity)


def least_height(problem: PackingProblem) -> int:
    """Of all orders, each buffer at the lowest offset that is free; one of them is the best packing."""
    buffers = [b for b in problem.buffers if b.size]
    fixed = [(b, b.offset) for b in buffers if b.offset is not None]
    live = max((sum(b.size for b in buffers if b.lower <= a.lower < b.upper) for a in buffers), default=0)
    ends = [b.offset for b in problem.buffers if not b.size and b.offset is not None]
    best = sum(b.size + b.alignment for b in buffers) + sum(b.offset or 0 for b in problem.buffers) + 1

    def grow(placed: list, left: list, height: int) -> None:
        nonlocal best
        if height >= best or best == live:
            return
        if not left:
            best = height
            return
        for k, b in enumerate(left):
            near = [(at, at + a.size) for a, at in placed if a.lower < b.upper and b.lower < a.upper]
            free = (-(-x // b.alignment) * b.alignment for x in itertools.chain((0,), (end for _, end in near)))
            at = min(x for x in free if all(x + b.size <= low or end <= x for low, end in near))
            grow([*placed, (b, at)], left[:k] + left[k + 1 :], max(height, at + b.size))

    grow(fixed, [b for b in buffers if b.offset is None], max([0, *ends, *(at + b.size for b, at in fixed)]))
    return best


@st.composite
def problems(draw: st.DrawFn, most: int = 7, sizes: int = 12) -> PackingProblem:
    """Small problems, many with alignments and offsets given."""
    alignments = draw(st.sampled_from([(1,), (1,), (4,), (1, 2, 4), (2, 3)]))
    buffers: list[PackBuffer] = []
    for n in range(draw(st.integers(0, most))):
        lower = draw(st.integers(-3, 9))
        upper = lower + draw(st.integers(1, 6))
        size = draw(st.integers(0, sizes))
        alignment = draw(st.sampled_from(alignments))
        offset = draw(st.one_of(st.none(), st.none(), st.none(), st.integers(0, 10)))
        buffer = PackBuffer(str(n), lower, upper, size, alignment, None if offset is None else offset * alignment)
        try:
            PackingProblem([*buffers, buffer])
        except ValueError:  # two fixed ones collide
            continue
        buffers.append(buffer)
    return PackingProblem(buffers)


def sliced(seed: int, cuts: int, width: int = 1000, height: int = 1_000_000, shrink: float = 0.0) -> PackingProblem:
    """A rectangle of times and bytes cut into ``cuts`` + 1 buffers at random, so that a packing without waste exists.

    ``shrink``: each buffer loses up to twice this part of its bytes.
    """
    rng = random.Random(seed)
    pieces = [(0, width, height)]
    while len(pieces) <= cuts:
        some = rng.sample(range(len(pieces)), min(3, len(pieces)))
        k = max(some, key=lambda k: pieces[k][2] * (pieces[k][1] - pieces[k][0]))
        lower, upper, size = pieces[k]
        share = rng.uniform(0.2, 0.8)
        if (rng.random() < 0.5 and size > 20) or upper - lower < 8:
            low = max(1, int(size * share))
            pieces[k] = (lower, upper, low)
            pieces.append((lower, upper, size - low))
        else:
            middle = lower + max(1, int((upper - lower) * share))
            pieces[k] = (lower, middle, size)
            pieces.append((middle, upper, size))
    rng.shuffle(pieces)
    sizes = [max(1, int(size * (1 - 2 * shrink * rng.random()))) for _, _, size in pieces]
    return PackingProblem(
        [PackBuffer(str(n), a, b, s) for n, ((a, b, _), s) in enumerate(zip(pieces, sizes, strict=True))]
    )
