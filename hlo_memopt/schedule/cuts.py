"""Minimum cuts: the cheapest state from which a node can run, and the bound on every order that follows.

A state of a schedule is a down-closed set of nodes already run. For a node v the states from which v can run hold
v's ancestors and neither v nor its descendants; the bytes alive in such a state are a cut:

    source -> b           size(b)   buffer alive from the start (producer -1)
    producer(b) -> b      size(b)   cut when the producer has run and ...
    b -> consumer(c)      inf       ... some consumer has not
    b -> sink             inf       live out: it never dies
    v -> pred(v)          inf       down-closed: what has run had its predecessors run before

    bound(v) = min cut + bytes that v itself brings up - bytes it may take over from dying operands

The largest bound over any set of nodes is a floor for the peak of every order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hlo_memopt.schedule.problem import Problem

_INF = 2**31 - 1


@dataclass(frozen=True)
class Cut:
    """``bound`` bytes for node ``node``; ``before``: mask [n] of a cheapest state, small or large as asked."""

    node: int
    bound: int
    before: np.ndarray


def own_bytes(problem: Problem) -> np.ndarray:
    """Per node: its outputs and transient bytes, less what it can at most take over from operands (int64, [n])."""
    own = np.array(problem.transient, dtype=np.int64)
    for b in problem.buffers:
        if b.producer >= 0:
            own[b.producer] += b.size
    taken: set[int] = set()
    served: set[int] = set()
    # each output takes over at most one operand and each operand serves at most one output: an upper bound on
    # the saving is the sum over outputs that have any partner
    for v, _, c in problem.reuse:
        if c not in served:
            served.add(c)
            taken.add(c)
            own[v] -= problem.buffers[c].size
    return own


class CutFinder:
    """Minimum cuts of one problem. Capacities are scaled down to 31 bits, so that bounds stay true bounds."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        n, m = problem.n, len(problem.buffers)
        self._source, self._sink = n + m, n + m + 1
        self._size = n + m + 2
        total = sum(b.size for b in problem.buffers)
        self.scale = max(1, -(-total // (2**30)))
        tails: list[int] = []
        heads: list[int] = []
        caps: list[int] = []
        for j, b in enumerate(problem.buffers):
            tails.append(b.producer if b.producer >= 0 else self._source)
            heads.append(n + j)
            caps.append(b.size // self.scale)
            for c in b.consumers:
                tails.append(n + j)
                heads.append(c)
                caps.append(_INF)
            if b.live_out:
                tails.append(n + j)
                heads.append(self._sink)
                caps.append(_INF)
        for v, ps in enumerate(problem.preds):
            for p in ps:
                tails.append(v)
                heads.append(p)
                caps.append(_INF)
        self._tails = np.array(tails, dtype=np.int32)
        self._heads = np.array(heads, dtype=np.int32)
        self._caps = np.array(caps, dtype=np.int32)
        self._own = own_bytes(problem)

    def _reach(self, start: Sequence[int], neighbours: Sequence[Sequence[int]]) -> list[int]:
        seen = set(start)
        stack = list(start)
        while stack:
            for w in neighbours[stack.pop()]:
                if w not in seen:
                    seen.add(w)
                    stack.append(w)
        return sorted(seen)

    def cut(self, node: int, largest: bool = False) -> Cut:
        """The cheapest state from which ``node`` can run: the smallest such set, or the largest."""
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        problem = self.problem
        n = problem.n
        before = [v for v in self._reach([node], problem.preds) if v != node]
        after = self._reach([node], problem.succs)
        tails = np.concatenate([self._tails, np.full(len(before), self._source, np.int32), np.array(after, np.int32)])
        heads = np.concatenate([self._heads, np.array(before, np.int32), np.full(len(after), self._sink, np.int32)])
        caps = np.concatenate([self._caps, np.full(len(before) + len(after), _INF, np.int32)])
        # parallel edges (a node that is both predecessor and consumer) are never both finite: keep the largest
        key = tails.astype(np.int64) * self._size + heads
        order = np.lexsort((caps, key))
        key = key[order]
        last = np.append(key[1:] != key[:-1], True)
        pick = order[last]
        graph = csr_array((caps[pick], (tails[pick], heads[pick])), shape=(self._size, self._size), dtype=np.int32)
        result = maximum_flow(graph, self._source, self._sink)
        residual = graph - result.flow
        residual.data = (residual.data > 0).astype(np.int8)
        residual.eliminate_zeros()
        if largest:
            reach = breadth_first_order(residual.T.tocsr(), self._sink, return_predecessors=False)
            mask = np.ones(self._size, dtype=bool)
            mask[reach] = False
        else:
            reach = breadth_first_order(residual, self._source, return_predecessors=False)
            mask = np.zeros(self._size, dtype=bool)
            mask[reach] = True
        bound = int(result.flow_value) * self.scale + int(self._own[node])
        return Cut(node, bound, mask[:n])
