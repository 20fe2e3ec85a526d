"""Generated scheduling problems: unrolled transformers with their backward pass and optimizer, random graphs."""

from __future__ import annotations

import random

from hlo_memopt.schedule.problem import Buffer, Problem


class _Builder:
    """Nodes, numbered in order of creation; each makes one buffer and reads others."""

    def __init__(self) -> None:
        self.preds: list[tuple[int, ...]] = []
        self.size: list[int] = []
        self.readers: list[list[int]] = []
        self.reuse: list[tuple[int, int, int]] = []

    def node(self, size: int, *inputs: int, in_place: bool = False) -> int:
        v = len(self.preds)
        self.preds.append(tuple(sorted(set(inputs))))
        self.size.append(size)
        self.readers.append([])
        for i in set(inputs):
            self.readers[i].append(v)
        if in_place and inputs and self.size[inputs[0]] == size:
            self.reuse.append((v, inputs[0], v))
        return v

    def problem(self, order: list[int] | None = None) -> Problem:
        """The problem, its nodes renumbered along ``order`` (the given schedule)."""
        order = order or list(range(len(self.preds)))
        new = {v: i for i, v in enumerate(order)}
        buffers = tuple(Buffer(self.size[v], new[v], tuple(sorted(new[r] for r in self.readers[v]))) for v in order)
        preds = tuple(tuple(sorted(new[p] for p in self.preds[v])) for v in order)
        reuse = tuple((new[v], new[b], new[c]) for v, b, c in self.reuse)
        return Problem(len(order), preds, buffers, (0,) * len(order), reuse)


def breadth_first(builder: _Builder) -> list[int]:
    """The order of XLA:CPU's default scheduler in spirit: level by level."""
    level = [0] * len(builder.preds)
    for v, ps in enumerate(builder.preds):
        level[v] = 1 + max((level[p] for p in ps), default=0)
    return sorted(range(len(level)), key=lambda v: (level[v], v))


def transformer(layers: int, heads: int = 12, width: int = 768, tokens: int = 4096, seed: int = 0) -> Problem:
    """A training step of an unrolled transformer: forward, backward, AdamW; about 48 + 8 * heads nodes a layer."""
    b = _Builder()
    rng = random.Random(seed)
    act = tokens * width * 4
    saved: list[dict[str, int]] = []
    x = b.node(act)
    for _ in range(layers):
        s: dict[str, int] = {"x": x}
        s["stat1"] = b.node(tokens * 8, x)
        s["n1"] = b.node(act, x, s["stat1"])
        for h in range(heads):
            part = act // heads
            q, k, v = (b.node(part, s["n1"]) for _ in range(3))
            scores = b.node(tokens * 512 * 4 // 8, q, k)
            s[f"p{h}"] = b.node(tokens * 512 * 4 // 8, scores, in_place=True)
            s[f"q{h}"], s[f"k{h}"], s[f"v{h}"] = q, k, v
            s[f"o{h}"] = b.node(part, s[f"p{h}"], v)
        s["o"] = b.node(act, *(s[f"o{h}"] for h in range(heads)))
        attended = b.node(act, s["o"])
        s["y"] = b.node(act, x, attended)
        s["stat2"] = b.node(tokens * 8, s["y"])
        s["n2"] = b.node(act, s["y"], s["stat2"])
        s["h"] = b.node(4 * act, s["n2"])
        s["g"] = b.node(4 * act, s["h"])
        out = b.node(act, s["g"])
        x = b.node(act, s["y"], out)
        saved.append(s)
    logits = b.node(4 * act, x)
    loss = b.node(4 * act, logits, in_place=True)
    grad = b.node(act, loss)

    def update(gradient: int) -> None:
        """AdamW in place of its state: reads the gradient, leaves nothing in temp."""
        for _ in range(3):
            b.node(64, gradient)

    for s in reversed(saved):
        dg = b.node(4 * act, grad)
        update(b.node(4 * width * width * 4, grad, s["g"]))
        dh = b.node(4 * act, dg, s["h"], in_place=True)
        update(b.node(4 * width * width * 4, dh, s["n2"]))
        dn2 = b.node(act, dh)
        dy = b.node(act, dn2, s["y"], s["stat2"], grad)
        do = b.node(act, dy)
        update(b.node(width * width * 4, dy, s["o"]))
        parts = []
        for h in range(heads):
            part = act // heads
            dp = b.node(tokens * 512 * 4 // 8, do, s[f"v{h}"])
            dv = b.node(part, s[f"p{h}"], do)
            ds = b.node(tokens * 512 * 4 // 8, dp, s[f"p{h}"], in_place=True)
            parts += [b.node(part, ds, s[f"k{h}"]), b.node(part, ds, s[f"q{h}"]), dv]
        dn1 = b.node(act, *parts)
        update(b.node(3 * width * width * 4, *parts, s["n1"]))
        grad = b.node(act, dn1, s["x"], s["stat1"], dy)
        for _ in range(rng.randrange(2)):
            b.node(1024, grad)
    return b.problem(breadth_first(b))


def series_parallel(nodes: int, seed: int = 0) -> Problem:
    """A random series-parallel graph with random sizes."""
    rng = random.Random(seed)
    b = _Builder()

    def build(n: int, entry: int) -> int:
        if n <= 1:
            return b.node(rng.randint(1, 64) << 16, entry)
        if rng.random() < 0.6:
            k = rng.randint(1, n - 1)
            return build(n - k, build(k, entry))
        branches = rng.randint(2, min(4, n))
        ends = [build(max(1, (n - 1) // branches), entry) for _ in range(branches)]
        return b.node(rng.randint(1, 64) << 16, *ends)

    end = b.node(1 << 20)
    while len(b.preds) < nodes:
        end = build(min(400, nodes - len(b.preds)), end)
    return b.problem(breadth_first(b))


def irregular(nodes: int, seed: int = 0, window: int = 40) -> Problem:
    """An irregular, NAS-like graph: each node reads one to three of the last ``window``."""
    rng = random.Random(seed)
    b = _Builder()
    for v in range(nodes):
        recent = range(max(0, v - window), v)
        inputs = rng.sample(recent, min(len(recent), rng.choice((1, 1, 2, 2, 3))))
        b.node(rng.randint(1, 64) << 16, *inputs, in_place=rng.random() < 0.3)
    return b.problem(breadth_first(b))
