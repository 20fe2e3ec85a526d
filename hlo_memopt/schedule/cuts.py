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
        buffer = np.arange(n, n + m)
        consumer = flat.use_node != flat.producer[flat.use_buffer]
        out = np.flatnonzero(flat.live_out)
        self._tails = np.concatenate([
            np.where(flat.producer < 0, self.source, flat.producer),
            flat.use_buffer[consumer] + n,
            out + n,
            flat.edge_to,
        ])  # fmt: skip
        self._heads = np.concatenate([
            buffer,
            flat.use_node[consumer],
            np.full(len(out), self.sink),
            flat.edge_from,
        ])  # fmt: skip
        self._caps = np.full(len(self._tails), _INF, dtype=np.int32)
        self._caps[:m] = flat.size // self.scale
        self._own = flat.own_bytes() if own is None else own

    def cut(self, node: int) -> Cut:
        """The cheapest state from which ``node`` can run, the smallest such set."""
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        flat = self.flat
        preds = flat.edge_from[flat.edge_to == node]
        tails = np.concatenate([self._tails, np.full(len(preds), self.source), [node]])
        heads = np.concatenate([self._heads, preds, [self.sink]])
        caps = np.concatenate([self._caps, np.full(len(preds) + 1, _INF, dtype=np.int32)])
        # scipy adds up parallel edges: keep one of each (they are all infinite)
        _, pick = np.unique(tails * self.nodes + heads, return_index=True)
        graph = csr_array((caps[pick], (tails[pick], heads[pick])), shape=(self.nodes, self.nodes), dtype=np.int32)
        result = maximum_flow(graph, self.source, self.sink)
        residual = graph - result.flow
        residual.data = (residual.data > 0).astype(np.int8)
        residual.eliminate_zeros()
        reach = breadth_first_order(residual, self.source, return_predecessors=False)
        mask = np.zeros(self.nodes, dtype=bool)
        mask[reach] = True
        bound = int(result.flow_value) * self.scale + int(self._own[node])
        return Cut(node, bound, mask[: flat.n])
