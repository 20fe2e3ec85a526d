"""Minimum cuts: the cheapest state from which a node can run, and the bound on every order that follows.

A state of a schedule is a down-closed set of nodes already run. For a node v the states from which v can run hold
v's ancestors and neither v nor its descendants; the bytes alive in such a state are a cut:

    source -> b           size(b)   buffer alive from the start (producer -1)
    producer(b) -> b      size(b)   cut when the producer has run and ...
    b -> consumer(c)      inf       ... some consumer has not
    b -> sink             inf       live out: it never dies
    w -> pred(w)          inf       down-closed: what has run had its predecessors run before
    source -> pred(v)     inf       what v needs has run
    v -> sink             inf       v has not (nor, by the edges above, has any descendant)

    bound(v) = min cut + bytes that v itself brings up - bytes its outputs may take over from dying operands

The largest bound over any set of nodes is a floor for the peak of every order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hlo_memopt.schedule.flat import Flat

_INF = 2**31 - 1


@dataclass(frozen=True)
class Cut:
    """``bound`` bytes for node ``node``; ``before``: mask [n] of a cheapest state."""

    node: int
    bound: int
    before: np.ndarray


class CutFinder:
    """Minimum cuts of one problem. Capacities are scaled down to 31 bits and floored, so bounds stay true bounds.

    (``scipy.sparse.csgraph.maximum_flow`` wants 32-bit capacities and is silently wrong above.)
    """

    def __init__(self, flat: Flat, own: np.ndarray | None = None) -> None:
        """``own``: bytes by node that it brings up itself, instead of `Flat.own_bytes`."""
        self.flat = flat
        n, m = flat.n, len(flat.size)
        self.source, self.sink = n + m, n + m + 1
        self.nodes = n + m + 2
        self.scale = max(1, -(-int(flat.size.sum()) // 2**30))
        node, buffer = np.arange(n), np.arange(n, n + m)
        consumer = flat.use_node != flat.producer[flat.use_buffer]
        out = np.flatnonzero(flat.live_out)
        # the edges that a cut switches on (source -> predecessors, node -> sink) are all there, with no capacity
        tails = np.concatenate([
            np.where(flat.producer < 0, self.source, flat.producer), flat.use_buffer[consumer] + n, out + n,
            flat.edge_to, np.full(n, self.source), node,
        ])  # fmt: skip
        heads = np.concatenate([
            buffer, flat.use_node[consumer], np.full(len(out), self.sink),
            flat.edge_from, node, np.full(n, self.sink),
        ])  # fmt: skip
        caps = np.full(len(tails), _INF, dtype=np.int32)
        caps[:m] = flat.size // self.scale
        caps[len(caps) - 2 * n :] = 0
        # with every reverse edge in place scipy returns the flow on the same structure
        key = np.concatenate([tails * self.nodes + heads, heads * self.nodes + tails])
        key, place = np.unique(key, return_inverse=True)
        self._caps = np.zeros(len(key), dtype=np.int32)
        self._caps[place[: len(caps)]] = caps
        self._indices = (key % self.nodes).astype(np.int32)
        self._indptr = np.searchsorted(key, np.arange(self.nodes + 1) * self.nodes).astype(np.int32)
        self._from_source = place[len(caps) - 2 * n : len(caps) - n]
        self._to_sink = place[len(caps) - n : len(caps)]
        self._own = flat.own_bytes() if own is None else own

    def cut(self, node: int, largest: bool = False) -> Cut:
        """The cheapest state from which ``node`` can run: of equals the smallest set, or the largest."""
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import maximum_flow

        flat = self.flat
        caps = self._caps.copy()
        caps[self._from_source[flat.edge_from[flat.edge_to == node]]] = _INF
        caps[self._to_sink[node]] = _INF
        shape = (self.nodes, self.nodes)
        result = maximum_flow(csr_array((caps, self._indices, self._indptr), shape=shape), self.source, self.sink)
        # flow - capacity: no overflow, both are at most _INF; an edge can take more where it is negative
        open_edges = result.flow.data - caps < 0
        if largest:
            mask = ~self._reach(open_edges, self.sink, backwards=True)
        else:
            mask = self._reach(open_edges, self.source, backwards=False)
        bound = int(result.flow_value) * self.scale + int(self._own[node])
        return Cut(node, bound, mask[: flat.n])

    def _reach(self, open_edges: np.ndarray, start: int, backwards: bool) -> np.ndarray:
        """Nodes that can be reached from ``start`` along open edges (against them), as a mask."""
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order

        indptr = np.concatenate([[0], np.cumsum(open_edges)])[self._indptr].astype(np.int32)
        indices = self._indices[open_edges]
        graph = csr_array((np.ones(len(indices), np.int8), indices, indptr), shape=(self.nodes, self.nodes))
        if backwards:
            graph = graph.T.tocsr()
        mask = np.zeros(self.nodes, dtype=bool)
        mask[breadth_first_order(graph, start, return_predecessors=False)] = True
        return mask
