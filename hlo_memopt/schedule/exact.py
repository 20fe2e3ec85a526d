"""Exact least-peak order of a small `Problem`: best-first search over the sets of executed nodes.

What is in memory after some nodes have run depends on the *set* M of those nodes and not on their order:

    live(M)     = sum of size(b) over b with producer in M (or -1) and (b live out, or a consumer not in M)
    usage(v, M) = live(M) + bytes of v's outputs + transient(v) - reuse(v, M)          v ready in M

so a least-peak order is a shortest path in the lattice of down-closed sets, from {} to all nodes, where the
length of a path is the largest ``usage`` on it. `solve_exact` runs Dijkstra's algorithm for that minimax length
(the dynamic program over down-sets of Liu 1987 and of Kessler & Rauber 1995; a set is a Python int, one bit a
node), depth first among sets of equal length. Two rules keep the number of sets small, neither loses optimality:

  * No path is shorter than `static_bound`, so every length starts there.
  * Descent: let Q be a ready node followed by nodes that each depend on the one before (a chain, often one node),
    with no usage on the way above the length so far and live(M + Q) <= live(M), Q the shortest such. Then Q may be
    run at once and no alternative need be tried. (Take any completion and move Q to its front. For a set S of
    other nodes a node frees at least as much after M + S as after M, so live(M + S + Q) <= live(M + S + Q') for each
    beginning Q' of Q: no other node sees more bytes, and a buffer it shares with Q can only die there instead.)

All quantities are bytes, exact Python ints.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from hlo_memopt.schedule.problem import Problem

_CHAIN_TRIES = 48  # nodes looked at while one descent is sought


class ExactResult(NamedTuple):
    """Result of `solve_exact`.

    Attributes:
      order: best order found; None if no order below ``upper_bound`` was found.
      peak: its peak in bytes (``fixed`` included); ``upper_bound`` if ``order`` is None.
      proven: no order has a smaller peak (order None: none has a peak below ``upper_bound``).
      bound: no order has a peak below ``min(bound, upper_bound)`` bytes, also where the search was cut short.
      states: down-sets stored.
    """

    order: tuple[int, ...] | None
    peak: int
    proven: bool
    bound: int
    states: int


def reuse_pairs(problem: Problem) -> list[list[tuple[int, int]]]:
    """For each node its (operand, output) pairs, in list order: those that can ever be taken, each once."""
    pairs: list[list[tuple[int, int]]] = [[] for _ in range(problem.n)]
    for v, b, c in problem.reuse:
        buf = problem.buffers[b]
        if not buf.live_out and (v in buf.consumers or v == buf.producer) and (b, c) not in pairs[v]:
            pairs[v].append((b, c))
    return pairs


def ancestor_masks(n: int, preds: tuple[tuple[int, ...], ...]) -> list[int]:
    """anc[v]: bit u is set if u runs before v in every order (v itself is not in it). ValueError on a cycle."""
    waiting = [len(set(p)) for p in preds]
    succs: list[list[int]] = [[] for _ in range(n)]
    for v in range(n):
        for p in set(preds[v]):
            succs[p].append(v)
    anc = [0] * n
    stack = [v for v in range(n) if not waiting[v]]
    done = 0
    while stack:
        v = stack.pop()
        done += 1
        for w in succs[v]:
            anc[w] |= anc[v] | 1 << v
            waiting[w] -= 1
            if not waiting[w]:
                stack.append(w)
    if done != n:
        raise ValueError("the predecessor relation has a cycle")
    return anc


def static_bound(problem: Problem) -> int:
    """A lower bound in bytes on the peak of every order, O(nodes * buffers).

    When v runs, b is in memory for certain if v or an ancestor of v makes it and v or a descendant of v reads it:

        peak >= max_v  transient(v) + sum of size(b) over such b - most bytes that v's reuse pairs can save
        peak >= bytes live in,  peak >= bytes live out                    (first and last step)
    """
    n, buffers = problem.n, problem.buffers
    if n == 0:
        return 0
    anc = ancestor_masks(n, problem.preds)
    desc = [0] * n
    for v in range(n):
        for u in range(n):
            if anc[v] >> u & 1:
                desc[u] |= 1 << v
    readers = [sum({1 << u for u in b.consumers}) for b in buffers]
    pairs = reuse_pairs(problem)
    best = max(sum(b.size for b in buffers if b.producer < 0), sum(b.size for b in buffers if b.live_out))
    for v in range(n):
        here, after = anc[v] | 1 << v, desc[v] | 1 << v
        total = problem.transient[v]
        for b, mask in zip(buffers, readers, strict=True):
            if b.producer == v or ((b.producer < 0 or here >> b.producer & 1) and (b.live_out or mask & after)):
                total += b.size
        can = [(b, c) for b, c in pairs[v] if not readers[b] & desc[v]]
        total -= min(
            sum(buffers[b].size for b in {b for b, _ in can}),
            sum(buffers[c].size for c in {c for _, c in can}),
        )
        best = max(best, total)
    return best


class _Steps:
    """The problem compiled for `run`: what one node does to a state (M, ready nodes, live bytes)."""

    def __init__(self, problem: Problem) -> None:
        n, buffers = problem.n, problem.buffers
        self.n = n
        self.out = [0] * n  # bytes of v's outputs
        self.need = [0] * n  # bytes that v adds to live(M) while it runs
        frees: list[dict[int, int]] = [{} for _ in range(n)]  # v -> {other users of b: bytes freed once all have run}
        self.live_in = 0
        self.first_only = 0  # live in and never read: in memory at the first step only
        masks: list[int] = []
        for b in buffers:
            users = set(b.consumers) | ({b.producer} if b.producer >= 0 else set())
            mask = sum(1 << u for u in users)
            masks.append(mask)
            if b.producer >= 0:
                self.out[b.producer] += b.size
            elif users or b.live_out:
                self.live_in += b.size
            else:
                self.first_only += b.size
            if not b.live_out and b.size:
                for u in users:
                    others = mask ^ 1 << u
                    frees[u][others] = frees[u].get(others, 0) + b.size
        self.drop = [f.pop(0, 0) for f in frees]  # bytes that v always frees
        self.frees = [tuple(sorted(f.items())) for f in frees]
        for v in range(n):
            self.need[v] = self.out[v] + problem.transient[v]
        pred_mask = [sum({1 << p for p in ps}) for ps in problem.preds]
        self.succs = [tuple((1 << w, pred_mask[w]) for w in sorted(set(ws))) for ws in problem.succs]
        self.roots = sum(1 << v for v in range(n) if not pred_mask[v])
        self.reuse = [
            tuple((masks[b] ^ 1 << v, b, c, buffers[c].size) for b, c in pairs)
            for v, pairs in enumerate(reuse_pairs(problem))
        ]

    def run(self, v: int, mask: int, live: int) -> tuple[int, int]:
        """(usage while v runs after ``mask``, live bytes after it)."""
        usage = live + self.need[v]
        if not mask:
            usage += self.first_only
        after = live + self.out[v] - self.drop[v]
        for others, size in self.frees[v]:
            if not others & ~mask:
                after -= size
        if self.reuse[v]:
            taken: list[int] = []  # operands b, and ~c for outputs c
            for others, b, c, size in self.reuse[v]:
                if not others & ~mask and b not in taken and ~c not in taken:
                    taken += b, ~c
                    usage -= size
        return usage, after

    def ready(self, v: int, mask: int) -> int:
        """The nodes that become ready when v has run, ``mask`` including v."""
        new = 0
        for bit, preds in self.succs[v]:
            if not preds & ~mask:
                new |= bit
        return new

    def descend(self, mask: int, ready: int, live: int, length: int, path: list[int]) -> tuple[int, int, int]:
        """Runs every chain that the descent rule allows (module docstring); appends it to ``path``."""
        again = True
        while again:
            again = False
            rest = ready
            while rest:
                bit = rest & -rest
                rest ^= bit
                v = bit.bit_length() - 1
                usage, after = self.run(v, mask, live)
                if usage > length:
                    continue
                if after <= live:
                    path.append(v)
                    mask |= bit
                    new = self.ready(v, mask)
                    ready = ready ^ bit | new
                    rest |= new
                    again |= bool(rest != ready)  # what was passed over may have become free
                    live = after
                    continue
                chain = self._chain(v, mask, after, live, length)
                if chain:
                    for v, after in chain:
                        path.append(v)
                        mask |= 1 << v
                        ready = ready & ~(1 << v) | self.ready(v, mask)
                        live = after
                    again = True
                    break
        return mask, ready, live

    def _chain(self, v: int, mask: int, after: int, goal: int, length: int) -> list[tuple[int, int]]:
        """A chain from v down to at most ``goal`` live bytes as [(node, live bytes after it)], [] if none is seen."""
        chain = [(v, after)]
        mask |= 1 << v
        stack: list[tuple[int, int]] = [(mask, self.ready(v, mask))]
        tries = _CHAIN_TRIES
        while stack and tries:
            mask, new = stack[-1]
            if not new:
                stack.pop()
                chain.pop()
                continue
            bit = new & -new
            stack[-1] = (mask, new ^ bit)
            tries -= 1
            w = bit.bit_length() - 1
            usage, low = self.run(w, mask, chain[-1][1])
            if usage > length:
                continue
            chain.append((w, low))
            if low <= goal:
                return chain
            mask |= bit
            stack.append((mask, self.ready(w, mask)))
        return []

    def dive(self, length: int) -> tuple[list[int], int]:
        """A greedy order and its peak: descents, else the node of least (length, live bytes after it)."""
        path: list[int] = []
        mask, ready, live = self.descend(0, self.roots, self.live_in, length, path)
        while ready:
            rest, best = ready, (0, 0, -1)
            while rest:
                v = (rest & -rest).bit_length() - 1
                rest &= rest - 1
                usage, after = self.run(v, mask, live)
                key = (max(usage, length), after, v)
                if best[2] < 0 or key < best:
                    best = key
            length, live, v = best
            path.append(v)
            mask |= 1 << v
            ready = ready ^ 1 << v | self.ready(v, mask)
            mask, ready, live = self.descend(mask, ready, live, length, path)
        return path, length


def solve_exact(
    problem: Problem, *, max_states: int = 200_000, upper_bound: int | None = None, fixed: int = 0
) -> ExactResult:
    """A least-peak order of ``problem``; deterministic.

    Args:
      max_states: stop after this many stored down-sets (then ``proven`` may be False).
      upper_bound: only orders with a peak below this many bytes are wanted.
      fixed: bytes in use at every step besides (a window's context).
    """
    if problem.n == 0:
        return ExactResult((), 0, True, 0, 0)
    steps = _Steps(problem)
    lower = static_bound(problem)
    full = (1 << problem.n) - 1
    order: list[int] | None = None
    limit = (1 << 200) if upper_bound is None else upper_bound - fixed  # wanted: a length below this
    if limit <= lower:
        return ExactResult(None, limit + fixed, True, lower + fixed, 0)
    path, length = steps.dive(lower)
    if length < limit:
        order, limit = path, length

    parent: dict[int, tuple[int, tuple[int, ...]]] = {}  # down-set -> (set it came from, nodes run since)
    best: dict[int, int] = {}  # down-set -> least length with which it was reached
    buckets: dict[int, list[tuple[int, int, int]]] = {}
    lengths: list[int] = []
    bound = limit
    path = []
    state = steps.descend(0, steps.roots, steps.live_in, lower, path)
    if lower < limit:
        parent[state[0]] = (0, tuple(path))
        buckets[lower] = [state]
        heapq.heappush(lengths, lower)
    start = state[0]

    def trace(mask: int) -> list[int]:
        """The order of the nodes of ``mask``, by which it was reached."""
        parts = [parent[mask][1]]
        while mask != start:
            mask = parent[mask][0]
            parts.append(parent[mask][1])
        return [v for nodes in reversed(parts) for v in nodes]

    while lengths and lengths[0] < limit:
        length = lengths[0]
        if len(best) > max_states:
            bound = length
            break
        stack = buckets[length]
        if not stack:
            heapq.heappop(lengths)
            del buckets[length]
            continue
        mask, ready, live = stack.pop()
        if best.get(mask, length) < length:
            continue  # reached by a shorter path since
        children = []
        rest = ready
        while rest:
            bit = rest & -rest
            rest ^= bit
            v = bit.bit_length() - 1
            usage, after = steps.run(v, mask, live)
            longer = usage if usage > length else length
            child = mask | bit
            if longer >= limit or best.get(child, limit) <= longer:
                continue
            best[child] = longer
            path = [v]
            child, now, after = steps.descend(child, ready ^ bit | steps.ready(v, child), after, longer, path)
            if len(path) > 1:
                if best.get(child, limit) <= longer:
                    continue
                best[child] = longer
            parent[child] = (mask, tuple(path))
            if child == full:
                order, limit = trace(child), longer
            else:
                children.append((-longer, -after, v, child, now))
        children.sort()
        for minus_length, minus_live, _, child, now in children:  # the most promising last: it is popped first
            if -minus_length >= limit:
                continue
            if -minus_length not in buckets:
                buckets[-minus_length] = []
                heapq.heappush(lengths, -minus_length)
            buckets[-minus_length].append((child, now, -minus_live))
    bound = min(bound, limit)
    proven = bound >= limit
    return ExactResult(None if order is None else tuple(order), limit + fixed, proven, bound + fixed, len(best))
