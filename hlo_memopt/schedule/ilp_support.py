"""What the integer programs of `model_ilp` need besides their equations: units, exact offsets, early updates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hlo_memopt.schedule.exact import ancestor_masks, reuse_pairs
from hlo_memopt.schedule.problem import Problem, live_intervals

MAX_UNITS = 1 << 20  # the sum of all sizes in units; far above it CBC's tolerances (1e-6) could hide a unit


def node_count(model: Any) -> int:
    """Nodes of CBC's last search, -1 if the library does not say (python-mip has no call for it)."""
    try:
        import cffi
        from mip import cbc

        ffi = cffi.FFI()
        ffi.cdef("int Cbc_getNodeCount(void *model);")
        handle = ffi.cast("void *", int(cbc.ffi.cast("uintptr_t", model.solver._model)))
        return int(ffi.dlopen(cbc.libfile).Cbc_getNodeCount(handle))
    except Exception:
        return -1


def unit_of(sizes: Iterable[int]) -> tuple[int, int]:
    """(gcd of the sizes, bytes a unit): the gcd, or a multiple that keeps the sum of the sizes at `MAX_UNITS`."""
    sizes = list(sizes)
    step = math.gcd(*sizes) or 1
    return step, step * max(1, -(-sum(sizes) // (step * MAX_UNITS)))


def bytes_bound(units: float, unit: int, step: int) -> int:
    """Bytes that a bound of CBC in units proves: less its tolerance, then up to a whole unit, then a whole step."""
    whole = math.ceil(units - max(1e-4, 1e-6 * abs(units)))
    return -(-whole * unit // step) * step


def greedy_is_best(pairs: list[tuple[int, int]]) -> bool:
    """Whether list-order matching takes as many of any subset of operands as possible: true if operands that share
    an output share all their outputs (equal sizes: any maximal matching is then a largest one)."""
    outs = {b: {c for d, c in pairs if d == b} for b, _ in pairs}
    return all(outs[b] == outs[d] or not outs[b] & outs[d] for b in outs for d in outs)


def never_meet(problem: Problem, anc: Sequence[int], i: int, j: int) -> bool:
    """Whether in every order block i is gone before j is made, or j before i (blocks: buffers, then transients)."""
    count = len(problem.buffers)

    def users(i: int) -> set[int]:
        return {problem.buffers[i].producer, *problem.buffers[i].consumers} - {-1} if i < count else {i - count}

    def gone_before(i: int, j: int) -> bool:
        made = problem.buffers[j].producer if j < count else j - count
        if made < 0 or not users(i) or (i < count and problem.buffers[i].live_out):
            return False
        return all(anc[made] >> u & 1 for u in users(i))

    return gone_before(i, j) or gone_before(j, i)


def stack_blocks(
    problem: Problem,
    order: Sequence[int],
    room: Sequence[int],
    place: dict[int, tuple[int, int, int]],
    shares: list[tuple[int, int]],
) -> list[int]:
    """Exact offsets from CBC's: in the order of ``place``, each block (with those that share its bytes) goes right
    above the blocks already set that are in memory with it. Offsets are sums of ``room``, hence aligned."""
    start, end = live_intervals(problem, np.asarray(order))
    pos = {v: s for s, v in enumerate(order)}
    span = [(int(s), int(e)) for s, e in zip(start, end, strict=True)] + [(pos[v], pos[v]) for v in range(problem.n)]
    group = {i: [i] for i in place}
    for b, c in shares:
        if group[b] is not group[c]:
            group[b] += group[c]
            for i in group[c]:
                group[i] = group[b]
    offset = [0] * len(room)
    done: list[int] = []
    for i in sorted(place, key=lambda i: place[i]):
        if i in done:
            continue
        meets = [j for j in done if any(span[j][0] <= span[g][1] and span[g][0] <= span[j][1] for g in group[i])]
        for g in group[i]:
            offset[g] = max((offset[j] + room[j] for j in meets), default=0)
        done += group[i]
    return offset


def early_updates(problem: Problem, *, safe: bool = True) -> tuple[tuple[int, int], ...]:
    """Edges (u, w), "u before w", that run weight updates and their like as soon as they can run.

    The paper forces updates early because a gradient is kept until its update has run. Here v counts as an update if
    it frees at least what it leaves, whatever ran before: bytes of its outputs <= bytes of operands that nobody else
    reads. Let p be the last predecessor of v (all others come before p); v then goes before every other successor of
    p. That shrinks the spans of the programs above.

    ``safe``: only nodes that need no bytes beyond their operands while they run (outputs and transient within what
    reuse surely saves); these edges keep a least-peak order possible: in any order that has the edges found so far, v
    may move to right after p, where usage(v) <= live bytes after p <= usage(p), and no step between sees more bytes.
    With ``safe=False``, as in the paper, a heuristic: v's own outputs may make the step after p the new peak.
    """
    n, buffers = problem.n, problem.buffers
    preds = [set(p) for p in problem.preds]
    pairs = reuse_pairs(problem)
    edges: list[tuple[int, int]] = []
    for v in range(n):
        own = {i for i, b in enumerate(buffers) if not b.live_out and b.producer != v and set(b.consumers) == {v}}
        made = [i for i, b in enumerate(buffers) if b.producer == v]
        kept = sum(buffers[i].size for i in made if buffers[i].live_out or set(buffers[i].consumers) - {v})
        if kept > sum(buffers[i].size for i in own):
            continue
        sure: dict[int, int] = {}  # output -> operand, in list order (more operands that die at v only save more)
        for b, c in pairs[v]:
            if b in own and b not in sure.values() and c not in sure and c in made:
                sure[c] = b
        extra = sum(buffers[i].size for i in made if i not in sure) + problem.transient[v]
        if safe and extra > 0:
            continue
        anc = ancestor_masks(n, tuple(tuple(p) for p in preds))
        last = [p for p in preds[v] if all(u == p or anc[p] >> u & 1 for u in preds[v])]
        if not last:
            continue
        for w in range(n):
            if w != v and last[0] in preds[w] and not anc[v] >> w & 1 and v not in preds[w]:
                preds[w].add(v)
                edges.append((v, w))
    return tuple(edges)
