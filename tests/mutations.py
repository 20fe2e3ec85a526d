"""Ways to damage a scheduled module, and XLA:CPU as the judge of what the checker let through.

Run as a script (``python mutations.py demo`` or ``judge``) it registers hooks, so the tests start it in a process of
its own; it prints one JSON object.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

from hlo_memopt.check import PlanCheckError, check_rewrite, ordering_edges
from hlo_memopt.check.rewrite import _Facts
from hlo_memopt.hlo import proto

Edges = dict[int, list[tuple[int, int]]]


def parse(text: str) -> bytes:
    """HLO text -> serialized module."""
    from jaxlib import _hlo

    return _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()


class Edit:
    """A module being damaged. Instructions and computations go by name."""

    def __init__(self, data: bytes) -> None:
        self.message = proto.parse_module(data)

    def done(self) -> bytes:
        return proto.serialize(self.message)

    def computation(self, name: str) -> Any:
        return next(c for c in self.message.computations if c.name == name)

    def instruction(self, name: str) -> Any:
        return next(i for c in self.message.computations for i in c.instructions if i.name == name)

    def sequence(self, key: int) -> Any:
        return next(s.value.instruction_ids for s in self.message.schedule.sequences if s.key == key)

    def home(self, name: str) -> Any:
        """The computation that holds an instruction."""
        return next(c for c in self.message.computations if any(i.name == name for i in c.instructions))

    def move(self, name: str, after: str) -> Edit:
        """Put an instruction right behind another one in the schedule."""
        ids = self.sequence(self.home(name).id)
        mover, anchor = self.instruction(name).id, self.instruction(after).id
        order = [k for k in ids if k != mover]
        order.insert(order.index(anchor) + 1, mover)
        ids[:] = order
        return self


def random_order(data: bytes, rng: random.Random, edges: Edges | None = None) -> bytes:
    """The module in a random topological order that also respects ``edges``; fusions stay as they are."""
    message = proto.parse_module(data)
    computations = {c.id: c for c in message.computations}
    for sequence in message.schedule.sequences:
        c = computations[sequence.key]
        if c.is_fusion_computation:
            continue
        after: dict[int, list[int]] = {i.id: [] for i in c.instructions}
        waits = dict.fromkeys(after, 0)
        needs = [(o, i.id) for i in c.instructions for o in (*i.operand_ids, *i.control_predecessor_ids)]
        for x, y in (*needs, *(edges or {}).get(c.id, ())):
            after[x].append(y)
            waits[y] += 1
        ready = [k for k, n in waits.items() if not n]
        order = []
        while ready:
            k = rng.randrange(len(ready))
            ready[k], ready[-1] = ready[-1], ready[k]
            order.append(ready.pop())
            for y in after[order[-1]]:
                waits[y] -= 1
                if not waits[y]:
                    ready.append(y)
        assert len(order) == len(after), f"the constraints of {c.name} have a cycle"
        sequence.value.instruction_ids[:] = order
    return proto.serialize(message)


def elide_copy(data: bytes, name: str) -> bytes:
    """The module with one copy removed, its users reading the operand: makes orders matter on CPU."""
    edit = Edit(data)
    c, copy = edit.home(name), edit.instruction(name)
    gone, source = copy.id, copy.operand_ids[0]
    for i in c.instructions:
        for ids in (i.operand_ids, i.control_predecessor_ids):
            ids[:] = [source if k == gone else k for k in ids]
    if c.root_id == gone:
        c.root_id = source
    ids = edit.sequence(c.id)
    ids[:] = [k for k in ids if k != gone]
    del c.instructions[next(n for n, i in enumerate(c.instructions) if i.id == gone)]
    return edit.done()


def copies(data: bytes) -> list[str]:
    """Names of the copies of vectors that keep shape and layout (a loop whose counter is damaged may never end)."""
    message = proto.parse_module(data)
    found = []
    for c in message.computations:
        shapes = {i.id: i.shape for i in c.instructions}
        if c.is_fusion_computation:
            continue
        for i in c.instructions:
            if i.opcode == "copy" and i.shape.dimensions and shapes[i.operand_ids[0]] == i.shape:
                found.append(i.name)
    return found


def outputs_share(data: bytes) -> bool:
    """Whether two outputs would lie in one buffer: XLA:CPU aborts the process on such a module."""
    message = proto.parse_module(data)
    aliases = _Facts(message).aliases
    root = next(c.root_id for c in message.computations if c.id == message.entry_computation_id)
    sets = [aliases._find(n) for n in aliases._nodes[root]]  # the programs here return flat tuples
    return len(sets) != len(set(sets))


class Judge:
    """Compiles a JAX function on CPU, with any module in place of the one XLA scheduled, and runs it."""

    def __init__(self) -> None:
        import jax
        from jax.extend import xla

        self.jax = jax
        self.seen: bytes | None = None
        self.replacement: bytes | None = None
        self.where: dict[str, Any] = {"name": "judge", "stage": xla.PipelineStage.POST_SCHEDULER, "platforms": "cpu"}
        xla.register_hlo_module_transformation(self._hook, **self.where)

    def close(self) -> None:
        from jax.extend import xla

        xla.clear_hlo_module_transformation(**self.where)

    def _hook(self, data: bytes) -> bytes | None:
        if proto.parse_module(data).name != "jit_judged":
            return None
        self.seen = data
        return self.replacement

    def run(self, f: Callable[..., Any], args: tuple[Any, ...], donate: Iterable[int], module: bytes | None) -> bytes:
        """The outputs' bytes; ``seen`` then holds the module as XLA scheduled it."""

        def judged(*a: Any) -> Any:
            return f(*a)

        import numpy as np

        self.replacement = module
        compiled = self.jax.jit(judged, donate_argnums=tuple(donate)).lower(*args).compile()
        out = compiled(*(self.jax.numpy.array(a) for a in args))
        return b"".join(np.asarray(x).tobytes() for x in self.jax.tree.leaves(out))


def random_program(seed: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A small program over vectors and an index, with updates in place, loops, branches and scatters."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    n, rng = 8, random.Random(seed)
    data = np.random.default_rng(seed)
    plan = [(rng.randrange(10), [rng.random() for _ in range(3)]) for _ in range(rng.randint(4, 8))]
    outputs = rng.randint(2, 4)

    def swap_loop(a: Any, b: Any) -> Any:
        step = lambda k, c: (c[1].at[k].set(c[0][k] + 1), c[0] * 0.5 + c[1])  # noqa: E731
        return jax.lax.fori_loop(0, 3, step, (a, b))

    def scan(a: Any, b: Any) -> Any:
        return jax.lax.scan(lambda c, x: (jnp.roll(c, 1).at[0].add(x), c[2] * x), a, b)

    def branch(a: Any, b: Any) -> Any:
        return jax.lax.cond(a[0] > 0, lambda a, b: (a.at[1].set(2.0), b), lambda a, b: (b, a + 1), a, b)

    def program(i: Any, *vectors: Any) -> Any:
        pool = list(vectors)
        for op, (x, y, z) in plan:
            a, b, c = (pool[int(r * len(pool))] for r in (x, y, z))
            made: Any
            if op == 0:
                made = (jnp.tanh(a * b + c),)
            elif op == 1:
                made = (a.at[i].set(b[1]),)
            elif op == 2:
                made = (jax.lax.dynamic_update_slice(a, b[:3] * 2, (i,)),)
            elif op == 3:
                made = (a.at[jnp.argsort(b)].add(c, mode="drop"),)
            elif op == 4:
                made = (jnp.sort(a),)
            elif op == 5:
                made = (jnp.cumsum(a) / n,)
            elif op == 6:
                made = swap_loop(a, b)
            elif op == 7:
                made = branch(a, b)
            elif op == 8:
                made = scan(a, b)
            else:
                made = (jnp.where(a > b, a, c - a), jax.lax.dynamic_update_slice(a, c[:2], (i + 1,)))
            pool += made
        return tuple(pool[-outputs:])

    args = (np.int32(2), *(data.standard_normal(n).astype(np.float32) for _ in range(3)))
    return program, args


def judge(seeds: Iterable[int], orders: int, elisions: int) -> dict[str, int]:
    """Accepted orders must run bit-equal, with XLA's copies and with some of them removed; counts what was seen."""
    count = dict.fromkeys(("programs", "accepted", "rejected", "wrong_accepted", "wrong_rejected", "elided"), 0)
    xla = Judge()

    def try_orders(f: Any, args: Any, base: bytes, want: bytes, rng: random.Random) -> None:
        edges = ordering_edges(base)
        for k in range(orders):
            new = random_order(base, rng, edges if k == 0 else None)
            try:
                check_rewrite(base, new)
                verdict = "accepted"
            except PlanCheckError:
                assert k, "an order that respects the edges must pass"
                verdict = "rejected"
            count[verdict] += 1
            if xla.run(f, args, donated, new) != want:
                count["wrong_" + verdict] += 1
                if verdict == "accepted":
                    print(f"accepted, yet wrong: seed {seed}", file=sys.stderr)

    for seed in seeds:
        rng = random.Random(seed)
        f, args = random_program(seed)
        donated = range(1, len(args))
        want = xla.run(f, args, donated, None)
        base = xla.seen
        assert base is not None
        count["programs"] += 1
        try_orders(f, args, base, want, rng)
        names = copies(base)
        for name in rng.sample(names, min(elisions, len(names))):
            less = elide_copy(base, name)
            # XLA itself must show that the removal is right in this order
            if not outputs_share(less) and xla.run(f, args, donated, less) == want:
                count["elided"] += 1
                try_orders(f, args, less, want, rng)
    xla.close()
    return count


def demo() -> dict[str, Any]:
    """A reader moved behind an in-place writer: rejected by us, compiled clean by XLA, and wrong."""
    import jax.numpy as jnp
    import numpy as np

    def f(x: Any, y: Any) -> Any:
        return x.at[0].set(y[0]), jnp.sort(x)

    args = (np.arange(8, dtype=np.float32)[::-1].copy(), np.full(8, 50, np.float32))
    xla = Judge()
    want = xla.run(f, args, (0,), None)
    assert xla.seen is not None
    result: dict[str, Any] = {}
    for base in [elide_copy(xla.seen, c) for c in copies(xla.seen)]:
        if xla.run(f, args, (0,), base) != want:
            continue
        for k in range(10):
            new = random_order(base, random.Random(k))
            right = xla.run(f, args, (0,), new) == want
            try:
                check_rewrite(base, new)
                result["accepted_right"] = result.get("accepted_right", True) and right
            except PlanCheckError as e:
                if not right:
                    result["rejected_wrong"] = str(e)
    xla.close()
    return result


if __name__ == "__main__":
    print(json.dumps(demo() if sys.argv[1] == "demo" else judge(range(int(sys.argv[2])), 4, 3)))
