"""A `Problem` as flat arrays, and parts of it, for the inner loops of the search."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hlo_memopt.schedule.problem import Buffer, Problem

Ints = np.ndarray


@dataclass(frozen=True)
class Flat:
    """Arrays of a problem (bytes are int64).

    Attributes:
      n: nodes.
      edge_from, edge_to: precedence, ``edge_from`` runs before ``edge_to``.
      size, producer, live_out: by buffer; producer -1: alive from the start.
      use_buffer, use_node: a pair for each buffer and node that touches it (its producer included), by buffer.
      transient: by node.
      reuse_node, reuse_from, reuse_to: as in `Problem.reuse`.
    """

    n: int
    edge_from: Ints
    edge_to: Ints
    size: Ints
    producer: Ints
    live_out: Ints
    use_buffer: Ints
    use_node: Ints
    transient: Ints
    reuse_node: Ints
    reuse_from: Ints
    reuse_to: Ints

    @classmethod
    def of(cls, problem: Problem) -> Flat:
        edges = [(p, v) for v, ps in enumerate(problem.preds) for p in ps]
        uses: list[tuple[int, int]] = []
        for j, b in enumerate(problem.buffers):
            if b.producer >= 0:
                uses.append((j, b.producer))
            uses += [(j, c) for c in b.consumers]
        edge = np.array(edges, dtype=np.int64).reshape(-1, 2)
        use = np.array(uses, dtype=np.int64).reshape(-1, 2)
        reuse = np.array(problem.reuse, dtype=np.int64).reshape(-1, 3)
        return cls(
            problem.n,
            edge[:, 0], edge[:, 1],
            np.array([b.size for b in problem.buffers], dtype=np.int64),
            np.array([b.producer for b in problem.buffers], dtype=np.int64),
            np.array([b.live_out for b in problem.buffers], dtype=bool),
            use[:, 0], use[:, 1],
            np.array(problem.transient, dtype=np.int64),
            reuse[:, 0], reuse[:, 1], reuse[:, 2],
        )  # fmt: skip

    def to_problem(self) -> Problem:
        """Back to the readable form (for the exact solvers; parts are small)."""
        preds: list[list[int]] = [[] for _ in range(self.n)]
        for a, b in zip(self.edge_from.tolist(), self.edge_to.tolist(), strict=True):
            preds[b].append(a)
        users: list[list[int]] = [[] for _ in range(len(self.size))]
        for j, v in zip(self.use_buffer.tolist(), self.use_node.tolist(), strict=True):
            if v != self.producer[j]:
                users[j].append(v)
        buffers = tuple(
            Buffer(s, p, tuple(u), o)
            for s, p, u, o in zip(
                self.size.tolist(), self.producer.tolist(), users, self.live_out.tolist(), strict=True
            )
        )
        reuse = tuple(
            zip(self.reuse_node.tolist(), self.reuse_from.tolist(), self.reuse_to.tolist(), strict=True)
        )
        return Problem(self.n, tuple(tuple(p) for p in preds), buffers, tuple(self.transient.tolist()), reuse)

    def profile(self, order: Ints) -> Ints:
        """Bytes in use at each step of ``order``; the same figure as `problem.usage_profile`."""
        n = self.n
        pos = np.empty(n, dtype=np.int64)
        pos[order] = np.arange(n)
        start = np.where(self.producer < 0, 0, pos[self.producer])
        end = start.copy()
        if len(self.use_node):
            first = np.flatnonzero(np.r_[True, self.use_buffer[1:] != self.use_buffer[:-1]])
            owner = self.use_buffer[first]
            end[owner] = np.maximum(end[owner], np.maximum.reduceat(pos[self.use_node], first))
        end[self.live_out] = n - 1
        delta = np.bincount(start, self.size, n + 1) - np.bincount(end + 1, self.size, n + 1)
        usage = np.cumsum(delta[:n]).astype(np.int64) + self.transient[order]
        if len(self.reuse_node):
            at = pos[self.reuse_node]
            hits = np.flatnonzero((end[self.reuse_from] == at) & ~self.live_out[self.reuse_from])
            taken: set[int] = set()
            served: set[int] = set()
            for i in hits.tolist():
                b, c = int(self.reuse_from[i]), int(self.reuse_to[i])
                if b not in taken and c not in served:
                    taken.add(b)
                    served.add(c)
                    usage[at[i]] -= self.size[c]
        return usage

    def own_bytes(self) -> Ints:
        """Per node: outputs and transient bytes, less what outputs may at most take over from operands."""
        own = self.transient.copy()
        made = self.producer >= 0
        np.add.at(own, self.producer[made], self.size[made])
        if len(self.reuse_to):
            served, first = np.unique(self.reuse_to, return_index=True)
            np.subtract.at(own, self.reuse_node[first], self.size[served])
        return own

    def part(self, before: Ints, nodes: Ints) -> tuple[Flat, int]:
        """Ordering ``nodes`` (in this sequence: 0..k-1) after the mask ``before`` has run and before the rest.

        Also the bytes that stay alive throughout the part whatever its order.
        """
        k = len(nodes)
        local = np.full(self.n + 1, -1, dtype=np.int64)
        local[nodes] = np.arange(k)
        ran = np.append(before, True)  # index -1: the start
        started = ran[self.producer]
        made_here = ~started & (local[self.producer] >= 0)
        m = len(self.size)
        here = local[self.use_node] >= 0
        mine = np.bincount(self.use_buffer[here], minlength=m) > 0
        later = self.live_out | (np.bincount(self.use_buffer[~here & ~ran[self.use_node]], minlength=m) > 0)
        base = int(self.size[started & later].sum())
        keep = made_here | (started & ~later & mine)
        index = np.full(m, -1, dtype=np.int64)
        index[keep] = np.arange(int(keep.sum()))
        use = here & keep[self.use_buffer]
        edge = (local[self.edge_from] >= 0) & (local[self.edge_to] >= 0)
        reuse = (local[self.reuse_node] >= 0) & keep[self.reuse_from] & keep[self.reuse_to]
        part = Flat(
            k,
            local[self.edge_from[edge]], local[self.edge_to[edge]],
            self.size[keep],
            np.where(started[keep], -1, local[self.producer[keep]]),
            later[keep],
            index[self.use_buffer[use]], local[self.use_node[use]],
            self.transient[nodes],
            local[self.reuse_node[reuse]], index[self.reuse_from[reuse]], index[self.reuse_to[reuse]],
        )  # fmt: skip
        return part, base
