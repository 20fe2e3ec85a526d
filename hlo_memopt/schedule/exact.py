"""Exact least-peak order of a small `Problem`: best-first search over the sets of executed nodes.

What is in memory after some nodes have run depends on the *set* M of those nodes and not on their order:

    live(M)     = sum of size(b) over b with producer in M (or -1) and (b live out, or a consumer not in M)
    usage(v, M) = live(M) + bytes of v's outputs + transient(v) - reuse(v, M)          v ready in M

so a least-peak order is a shortest path in the lattice of down-closed sets, from {} to all nodes, where the
length of a path is the largest ``usage`` on it. `solve_exact` runs Dijkstra's algorithm for that minimax length
(the dynamic program over down-sets of Liu 1987 and of Kessler & Rauber 1995; a set is a Python int, one bit a
node), depth first among sets of equal length. No path is shorter than `static_bound`, so every length starts there;
`exact_rules` keeps the number of sets small: nodes that only add memory are run late, what pays is run at once.

All quantities are bytes, exact Python ints.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from hlo_memopt.schedule.exact_rules import Steps, ancestor_masks, reuse_pairs
from hlo_memopt.schedule.problem import Problem


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
    desc = ancestor_masks(n, problem.succs)
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
    steps = Steps(problem)
    lower = static_bound(problem)
    order: list[int] | None = None
    limit = (1 << 200) if upper_bound is None else upper_bound - fixed  # wanted: a length below this
    if limit <= lower:
        return ExactResult(None, limit + fixed, True, lower + fixed, 0)
    path, length = steps.dive(lower)
    if length < limit:
        order, limit = path, length

    parent: dict[int, tuple[int, tuple[int, ...]]] = {}  # down-set -> (set it came from, moves since)
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
        """The moves by which ``mask`` was reached."""
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
        awake = ready & steps.wakeable
        while rest:
            bit = rest & -rest
            rest ^= bit
            v = bit.bit_length() - 1
            if awake and steps.first[v] & awake:
                continue
            usage, after = steps.run(v, mask, live)
            longer = usage if usage > length else length
            child = mask | steps.whole[v]
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
            if not now:
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
    nodes = None if order is None else tuple(steps.expand(order))
    return ExactResult(nodes, limit + fixed, proven, bound + fixed, len(best))
