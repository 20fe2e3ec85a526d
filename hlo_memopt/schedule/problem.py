"""The scheduling problem on plain data: what an order of one computation costs in bytes.

A `Problem` knows nothing of HLO. Nodes are steps to be ordered; a buffer is alive from its producer's
step to the step of its last consumer, both included (XLA allocates the outputs of an instruction before
it frees operands, see ``HeapSimulator::RunComputation``), and to the end if it is live out.

    usage(t) = sum of size(b) over buffers b alive at t + transient(order[t]) - reuse(t)

`reuse` is XLA's operand sharing: if node v is the last consumer of buffer b (and b is not live out), an
output c of v with equal size may take over b's bytes, so that b and c are counted once at v's step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np


@dataclass(frozen=True, slots=True)
class Buffer:
    """``size`` bytes, alive from ``producer`` (-1: from the start) to the last of ``consumers``."""

    size: int
    producer: int
    consumers: tuple[int, ...] = ()
    live_out: bool = False


@dataclass(frozen=True)
class Problem:
    """Order ``n`` nodes under ``preds`` (preds[v]: nodes that run before v) with least peak usage.

    Attributes:
      buffers: see `Buffer`. A consumer of a buffer that is not its producer comes after the producer
        (callers list the edge in ``preds`` too).
      transient: bytes needed only while a node runs (the peak of computations that it calls).
      reuse: triples (node, operand buffer, output buffer), tried in this order; sizes are equal.
    """

    n: int
    preds: tuple[tuple[int, ...], ...]
    buffers: tuple[Buffer, ...]
    transient: tuple[int, ...]
    reuse: tuple[tuple[int, int, int], ...] = ()
    names: tuple[str, ...] = field(default=(), compare=False)

    @cached_property
    def succs(self) -> tuple[tuple[int, ...], ...]:
        out: list[list[int]] = [[] for _ in range(self.n)]
        for v, ps in enumerate(self.preds):
            for p in ps:
                out[p].append(v)
        return tuple(tuple(s) for s in out)

    @cached_property
    def arrays(self) -> _Arrays:
        return _Arrays(self)


def renumbered(problem: Problem, order: Sequence[int]) -> Problem:
    """The same problem with node ``order[k]`` as node k."""
    new = {-1: -1} | {v: k for k, v in enumerate(order)}
    return Problem(
        problem.n,
        tuple(tuple(sorted(new[p] for p in problem.preds[v])) for v in order),
        tuple(
            Buffer(b.size, new[b.producer], tuple(sorted(new[c] for c in b.consumers)), b.live_out)
            for b in problem.buffers
        ),
        tuple(problem.transient[v] for v in order),
        tuple((new[v], b, c) for v, b, c in problem.reuse),
        tuple(problem.names[v] for v in order) if problem.names else (),
    )


class _Arrays:
    """The same problem as flat arrays, for evaluation."""

    def __init__(self, problem: Problem) -> None:
        buffers = problem.buffers
        self.size = np.array([b.size for b in buffers], dtype=np.int64)
        self.producer = np.array([b.producer for b in buffers], dtype=np.int64)
        self.live_out = np.array([b.live_out for b in buffers], dtype=bool)
        self.transient = np.array(problem.transient, dtype=np.int64)
        # each buffer's users, its producer first (a buffer that nobody reads dies where it is born)
        users = [((b.producer,) if b.producer >= 0 else ()) + b.consumers or (-1,) for b in buffers]
        self.user_start = np.zeros(len(buffers) + 1, dtype=np.int64)
        if buffers:
            self.user_start[1:] = np.cumsum([len(u) for u in users])
        self.users = np.array([x for u in users for x in u], dtype=np.int64)
        reuse = np.array(problem.reuse, dtype=np.int64).reshape(-1, 3)
        self.reuse_node, self.reuse_from, self.reuse_to = reuse.T


def live_intervals(problem: Problem, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each buffer's first and last step under ``order``, both included."""
    a = problem.arrays
    pos = np.empty(problem.n + 1, dtype=np.int64)
    pos[order] = np.arange(problem.n)
    pos[-1] = 0  # index -1: before the first step
    if not len(a.size):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    start = pos[a.producer]
    end = np.maximum.reduceat(pos[a.users], a.user_start[:-1])
    end[a.live_out] = problem.n - 1
    return start, end


def usage_profile(problem: Problem, order: np.ndarray | Sequence[int]) -> np.ndarray:
    """Bytes in use at each step of ``order`` (int64, shape [n])."""
    order = np.asarray(order, dtype=np.int64)
    a = problem.arrays
    n = problem.n
    if n == 0:
        return np.zeros(0, np.int64)
    start, end = live_intervals(problem, order)
    delta = np.zeros(n + 1, dtype=np.int64)
    np.add.at(delta, start, a.size)
    np.add.at(delta, end + 1, -a.size)
    usage = np.cumsum(delta[:n]) + a.transient[order]
    if len(a.reuse_node):
        pos = np.empty(n, dtype=np.int64)
        pos[order] = np.arange(n)
        at = pos[a.reuse_node]
        hits = np.flatnonzero((end[a.reuse_from] == at) & ~a.live_out[a.reuse_from])
        taken: set[int] = set()
        served: set[int] = set()
        for i in hits.tolist():
            b, c = int(a.reuse_from[i]), int(a.reuse_to[i])
            if b not in taken and c not in served:
                taken.add(b)
                served.add(c)
                usage[at[i]] -= a.size[c]
    return usage


def peak(problem: Problem, order: np.ndarray | Sequence[int]) -> int:
    """The largest entry of `usage_profile`, 0 for an empty problem."""
    profile = usage_profile(problem, order)
    return int(profile.max()) if len(profile) else 0


def is_topological(problem: Problem, order: np.ndarray | list[int]) -> bool:
    """Whether ``order`` is a permutation of the nodes in which predecessors come first."""
    order = [int(v) for v in order]
    if sorted(order) != list(range(problem.n)):
        return False
    pos = {v: i for i, v in enumerate(order)}
    return all(pos[p] < pos[v] for v in range(problem.n) for p in problem.preds[v])
