"""Small scheduling problems for tests: random ones, families with a known shape, and brute-force answers."""

from __future__ import annotations

import random
from collections.abc import Iterator

from hypothesis import strategies as st

from hlo_memopt.schedule.problem import Buffer, Problem, live_intervals, peak


def closed(n: int, edges: set[tuple[int, int]], buffers: list[Buffer]) -> tuple[tuple[int, ...], ...]:
    """preds with the edges that the buffers need."""
    preds: list[set[int]] = [set() for _ in range(n)]
    for u, v in edges:
        preds[v].add(u)
    for b in buffers:
        for c in b.consumers:
            if b.producer >= 0 and c != b.producer:
                preds[c].add(b.producer)
    return tuple(tuple(sorted(p)) for p in preds)


def random_problem(rng: random.Random, n: int, *, scale: int = 1, reuse: bool = True) -> Problem:
    """A random problem of ``n`` nodes whose node numbers are no topological order.

    Buffers: none to three a node, up to three consumers, some live out, some live in (producer -1), size 0 now
    and then; transients on a third of the nodes; reuse pairs in random list order, also competing ones.
    """
    rank = list(range(n))
    rng.shuffle(rank)  # rank[i]: the node at place i of a hidden order
    sizes = rng.choice([[1, 2, 4, 8], [1, 1, 1, 2], [3, 5, 7, 11, 13], [0, 1, 100, 101]])
    buffers: list[Buffer] = []

    def consumers(first: int) -> tuple[int, ...]:
        later = rank[first:]
        picked = rng.sample(later, min(len(later), rng.choice([0, 1, 1, 1, 2, 2, 3])))
        return tuple(picked)

    for place in range(n):
        for _ in range(rng.choice([0, 1, 1, 1, 1, 2, 3])):
            near = min(n, place + 1 + rng.choice([0, 0, 0, 1, 2]))
            buffers.append(Buffer(rng.choice(sizes) * scale, rank[place], consumers(near), rng.random() < 0.12))
    for _ in range(rng.choice([0, 0, 1, 2, 3])):
        buffers.append(Buffer(rng.choice(sizes) * scale, -1, consumers(0), rng.random() < 0.12))
    rng.shuffle(buffers)
    places = {(rng.randrange(n), rng.randrange(n)) for _ in range(rng.choice([0, 0, 1, 2]))} if n > 1 else set()
    preds = closed(n, {(rank[i], rank[j]) for i, j in places if i < j}, buffers)
    transient = tuple(rng.choice(sizes) * scale if rng.random() < 0.3 else 0 for _ in range(n))
    pairs = [
        (v, i, j)
        for i, b in enumerate(buffers)
        for j, c in enumerate(buffers)
        for v in set(b.consumers)
        if c.producer == v and c.size == b.size and i != j and rng.random() < 0.8
    ]
    rng.shuffle(pairs)
    return Problem(n, preds, tuple(buffers), transient, tuple(pairs) if reuse else ())


def competing_problem(rng: random.Random, n: int) -> Problem:
    """Few sizes, several outputs a node: reuse pairs compete, so that greedy matching is often not the best one."""
    buffers: list[Buffer] = []
    for v in range(n):
        for _ in range(2):
            later = list(range(v + 1, n))
            buffers.append(Buffer(1, v, tuple(rng.sample(later, min(len(later), rng.choice([1, 2])))), False))
    pairs = [
        (v, i, j)
        for i, b in enumerate(buffers)
        for j, c in enumerate(buffers)
        for v in b.consumers
        if c.producer == v and rng.random() < 0.7
    ]
    rng.shuffle(pairs)
    return Problem(n, closed(n, set(), buffers), tuple(buffers), (0,) * n, tuple(pairs))


def alias_chain(rng: random.Random, n: int) -> Problem:
    """Update chains (each node takes over the buffer of the one before) with side results, as loop carries make."""
    buffers: list[Buffer] = []
    pairs: list[tuple[int, int, int]] = []
    tails: list[int] = []  # buffer at the end of each chain
    for v in range(n):
        if tails and rng.random() < 0.7:
            k = rng.randrange(len(tails))
            b = buffers[tails[k]]
            buffers[tails[k]] = Buffer(b.size, b.producer, (*b.consumers, v), False)
            pairs.append((v, tails[k], len(buffers)))
            tails[k] = len(buffers)
            buffers.append(Buffer(b.size, v, (), False))
        else:
            tails.append(len(buffers))
            buffers.append(Buffer(rng.randint(1, 9), v, (), False))
        if rng.random() < 0.4:
            buffers.append(Buffer(rng.randint(1, 9), v, tuple(rng.sample(range(v + 1, n), min(1, n - v - 1))), False))
    for k in tails:
        buffers[k] = Buffer(buffers[k].size, buffers[k].producer, buffers[k].consumers, rng.random() < 0.5)
    return Problem(n, closed(n, set(), buffers), tuple(buffers), (0,) * n, tuple(pairs))


def training_like(layers: int, rng: random.Random) -> Problem:
    """Forward chain, backward chain that reads it in reverse, an update of each weight (3 * layers nodes)."""
    n = 3 * layers
    acts = [rng.randint(1, 20) for _ in range(layers)]
    buffers: list[Buffer] = []
    for i in range(layers):
        readers = [i + 1] if i + 1 < layers else [layers]
        backward = 2 * layers - 1 - i  # the node that makes layer i's gradients
        buffers.append(Buffer(acts[i], i, tuple(sorted({*readers, backward})), False))
        if i > 0:
            buffers.append(Buffer(acts[i], backward, (backward + 1,), False))  # gradient passed on
        weight = rng.randint(1, 20)
        buffers.append(Buffer(weight, backward, (2 * layers + i,), False))  # weight gradient
        buffers.append(Buffer(weight, 2 * layers + i, (), True))  # new weight
    pairs = tuple(
        (v, i, j)
        for i, b in enumerate(buffers)
        for j, c in enumerate(buffers)
        for v in b.consumers
        if c.producer == v and v >= 2 * layers and b.size == c.size
    )
    return Problem(n, closed(n, set(), buffers), tuple(buffers), (0,) * n, pairs)


def branchy(rng: random.Random, branches: int, length: int) -> Problem:
    """A source, ``branches`` chains of ``length`` nodes that it feeds, a sink that reads the ends."""
    n = branches * length + 2
    source, sink = 0, n - 1
    heads = tuple(1 + k * length for k in range(branches))
    buffers = [Buffer(8, source, heads, False)]
    for k in range(branches):
        for i in range(length):
            v = 1 + k * length + i
            buffers.append(Buffer(rng.randint(1, 32), v, (v + 1 if i + 1 < length else sink,), False))
    buffers.append(Buffer(4, sink, (), True))
    return Problem(n, closed(n, set(), buffers), tuple(buffers), (0,) * n)


def layered(rng: random.Random, n: int, width: int) -> Problem:
    """A random graph of about ``width`` nodes abreast; each node reads one to three buffers of recent nodes."""
    readers: list[list[int]] = [[] for _ in range(n)]
    for v in range(1, n):
        for u in {max(0, v - 1 - rng.randrange(2 * width)) for _ in range(rng.choice([1, 1, 2, 3]))}:
            readers[u].append(v)
    buffers = [Buffer(rng.randint(1, 64), v, tuple(readers[v]), not readers[v]) for v in range(n)]
    transient = tuple(rng.choice([0, 0, 0, 16]) for _ in range(n))
    return Problem(n, closed(n, set(), buffers), tuple(buffers), transient)


def orders(problem: Problem) -> Iterator[list[int]]:
    """Every topological order."""
    order: list[int] = []
    used = [False] * problem.n

    def extend() -> Iterator[list[int]]:
        if len(order) == problem.n:
            yield order
            return
        for v in range(problem.n):
            if not used[v] and all(used[p] for p in problem.preds[v]):
                used[v] = True
                order.append(v)
                yield from extend()
                order.pop()
                used[v] = False

    yield from extend()


def count_orders(problem: Problem, most: int) -> int:
    """The number of topological orders, at most ``most``."""
    ways = {0: 1}
    preds = [sum(1 << p for p in set(ps)) for ps in problem.preds]
    for _ in range(problem.n):
        after: dict[int, int] = {}
        for mask, k in ways.items():
            for v in range(problem.n):
                if not mask >> v & 1 and not preds[v] & ~mask:
                    after[mask | 1 << v] = after.get(mask | 1 << v, 0) + k
        ways = after
    return min(most, sum(ways.values()))


def brute_peak(problem: Problem) -> int:
    """The least `peak` over all orders."""
    return min(peak(problem, order) for order in orders(problem))


def slow_usage(problem: Problem, order: list[int]) -> list[int]:
    """`usage_profile`, step by step and without arrays."""
    pos = {v: i for i, v in enumerate(order)}
    last = []
    for b in problem.buffers:
        users = [pos[c] for c in b.consumers] + ([pos[b.producer]] if b.producer >= 0 else [])
        last.append(problem.n - 1 if b.live_out else max(users, default=0))
    profile = []
    for step, v in enumerate(order):
        total = problem.transient[v]
        for i, b in enumerate(problem.buffers):
            born = pos[b.producer] if b.producer >= 0 else 0
            total += b.size if born <= step <= last[i] else 0
        taken: set[tuple[str, int]] = set()
        for w, i, j in problem.reuse:
            hit = w == v and last[i] == step and not problem.buffers[i].live_out
            if hit and ("from", i) not in taken and ("to", j) not in taken:
                taken |= {("from", i), ("to", j)}
                total -= problem.buffers[j].size
        profile.append(total)
    return profile


def rectangles(problem: Problem, order: list[int]) -> list[tuple[int, int, int]]:
    """(first step, last step, bytes) of each buffer and then of each node's transient, under ``order``."""
    import numpy as np

    start, end = live_intervals(problem, np.asarray(order))
    out = [(int(s), int(e), b.size) for s, e, b in zip(start, end, problem.buffers, strict=True)]
    pos = {v: i for i, v in enumerate(order)}
    return out + [(pos[v], pos[v], problem.transient[v]) for v in range(problem.n)]


@st.composite
def problems(draw: st.DrawFn, max_nodes: int = 8) -> Problem:
    """Hypothesis: `random_problem` from a drawn seed and size (shrinks towards few nodes)."""
    n = draw(st.integers(1, max_nodes))
    return random_problem(random.Random(draw(st.integers(0, 2**32))), n)
