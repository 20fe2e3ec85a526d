"""Constructive orders: greedy list scheduling forwards and backwards, and depth-first order."""

from __future__ import annotations

import heapq

from hlo_memopt.schedule.problem import Problem


def greedy_order(problem: Problem) -> list[int]:
    """List scheduling: of the ready nodes always the one that frees most (freed bytes - new bytes).

    The rule is that of XLA's ListMemoryScheduler (after Sarkar's list scheduling): a buffer counts as freed by a
    node that is its last remaining consumer. Ties: the node that stands first in the given numbering.
    """
    consumers, left, new_bytes = _tables(problem)
    missing = [len(p) for p in problem.preds]
    freed = [0] * problem.n

    def benefit(v: int) -> int:
        return freed[v] - new_bytes[v]

    for j, b in enumerate(problem.buffers):
        if len(left[j]) == 1 and not b.live_out:
            (last,) = left[j]
            freed[last] += b.size
    heap = [(-benefit(v), v) for v in range(problem.n) if not missing[v]]
    heapq.heapify(heap)
    done = [False] * problem.n
    order: list[int] = []
    while heap:
        negative, v = heapq.heappop(heap)
        if done[v] or -negative != benefit(v):
            continue  # an outdated entry; the current one is in the heap too
        done[v] = True
        order.append(v)
        for j in consumers[v]:
            left[j].discard(v)
            if len(left[j]) == 1 and not problem.buffers[j].live_out:
                (last,) = left[j]
                freed[last] += problem.buffers[j].size
                if not missing[last] and not done[last]:
                    heapq.heappush(heap, (-benefit(last), last))
        for w in problem.succs[v]:
            missing[w] -= 1
            if not missing[w]:
                heapq.heappush(heap, (-benefit(w), w))
    return order


def backward_greedy_order(problem: Problem) -> list[int]:
    """The same rule on the reversed program: build the order from its end.

    Going backwards, running v makes alive what v reads (where no later reader did) and ends what v produces.
    """
    missing = [len(s) for s in problem.succs]
    alive = [b.live_out for b in problem.buffers]
    reads: list[list[int]] = [[] for _ in range(problem.n)]
    makes: list[list[int]] = [[] for _ in range(problem.n)]
    for j, b in enumerate(problem.buffers):
        for c in b.consumers:
            reads[c].append(j)
        if b.producer >= 0:
            makes[b.producer].append(j)
    size = [b.size for b in problem.buffers]

    def cost(v: int) -> int:
        return sum(size[j] for j in reads[v] if not alive[j]) - sum(size[j] for j in makes[v] if alive[j])

    heap = [(cost(v), -v) for v in range(problem.n) if not missing[v]]
    heapq.heapify(heap)
    done = [False] * problem.n
    order: list[int] = []
    while heap:
        value, negative = heapq.heappop(heap)
        v = -negative
        if done[v]:
            continue
        now = cost(v)
        if now != value:
            heapq.heappush(heap, (now, -v))
            continue
        done[v] = True
        order.append(v)
        for j in reads[v]:
            if not alive[j]:
                alive[j] = True
                for w in (*problem.buffers[j].consumers, problem.buffers[j].producer):
                    if w >= 0 and not done[w] and not missing[w]:
                        heapq.heappush(heap, (cost(w), -w))
        for w in problem.preds[v]:
            missing[w] -= 1
            if not missing[w]:
                heapq.heappush(heap, (cost(w), -w))
    order.reverse()
    return order


def depth_first_order(problem: Problem) -> list[int]:
    """Post-order from the sinks, the operand whose subgraph holds more bytes first (XLA's DFSMemoryScheduler)."""
    _, _, total = _tables(problem)
    for v in _topological(problem):
        # paths are counted, so shared subgraphs many times: kept small
        total[v] = min(total[v] + sum(total[p] for p in problem.preds[v]), 2**62)
    done = [False] * problem.n
    order: list[int] = []
    sinks = [v for v in range(problem.n) if not problem.succs[v]]
    for sink in sinks:
        stack: list[tuple[int, bool]] = [(sink, False)]
        while stack:
            v, ready = stack.pop()
            if done[v]:
                continue
            if ready:
                done[v] = True
                order.append(v)
                continue
            stack.append((v, True))
            for p in sorted(problem.preds[v], key=lambda p: (total[p], -p)):
                if not done[p]:
                    stack.append((p, False))
    return order


def _topological(problem: Problem) -> list[int]:
    missing = [len(p) for p in problem.preds]
    ready = [v for v in range(problem.n) if not missing[v]]
    out: list[int] = []
    while ready:
        v = ready.pop()
        out.append(v)
        for w in problem.succs[v]:
            missing[w] -= 1
            if not missing[w]:
                ready.append(w)
    return out


def _tables(problem: Problem) -> tuple[list[list[int]], list[set[int]], list[int]]:
    """By node: buffers it reads; by buffer: its readers; by node: bytes it brings up."""
    consumers: list[list[int]] = [[] for _ in range(problem.n)]
    left: list[set[int]] = []
    new_bytes = list(problem.transient)
    for j, b in enumerate(problem.buffers):
        left.append(set(b.consumers))
        if b.producer >= 0:
            new_bytes[b.producer] += b.size
        for c in set(b.consumers):
            consumers[c].append(j)
    return consumers, left, new_bytes
