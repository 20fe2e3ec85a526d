"""Copies left out: which are, that the check proves each case, and that XLA's results stay the same."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from check_modules import HEAD
from conftest import corpus, read_corpus
from xla_cases import compile_caught

import hlo_memopt
from hlo_memopt.check import PlanCheckError, check_rewrite
from hlo_memopt.elide import needless_copies
from hlo_memopt.hlo.graph import Module
from hlo_memopt.hlo.proto import parse_module, serialize
from hlo_memopt.hlo.read import read_module
from hlo_memopt.hook import donation
from hlo_memopt.liveness.dataflow import Dataflow
from hlo_memopt.planner import plan_module
from hlo_memopt.platforms import platform
from hlo_memopt.rewrite import remove_copies

ALIAS = HEAD + ", input_output_alias={ {0}: (0, {}, may-alias) }\n"
# ``p`` is donated to the first result, ``c`` is XLA's copy of it.
BODY = """
ENTRY e {
  p = f32[64,64] parameter(0)
  q = f32[64,64] parameter(1)
  c = f32[64,64] copy(p)
  %s
  ROOT t = (f32[64,64], f32[64,64]) tuple(w, r)
}
"""
FUSION = """
f {
  a = f32[64,64] parameter(0)
  b = f32[64,64] parameter(1)
  %s
}
"""

# name -> (HLO text, whether the copy may go)
CASES = {
    "read before it is overwritten": (ALIAS + BODY % "r = f32[64,64] negate(c)\n w = f32[64,64] exponential(q)", True),
    "read after it is overwritten": (ALIAS + BODY % "w = f32[64,64] exponential(q)\n r = f32[64,64] negate(c)", False),
    "the writer reads it, element by element": (
        ALIAS + BODY % "r = f32[64,64] negate(c)\n w = f32[64,64] add(c, q)",
        True,
    ),
    "the writer reads it elsewhere": (
        ALIAS + BODY % "r = f32[64,64] negate(c)\n w = f32[64,64] transpose(c), dimensions={1,0}",
        False,
    ),
    "a fusion writes over it, element by element": (
        ALIAS
        + FUSION % "s = f32[64,64] multiply(b, b)\n ROOT o = f32[64,64] add(a, s)"
        + BODY % "r = f32[64,64] negate(c)\n w = f32[64,64] fusion(c, q), kind=kLoop, calls=f",
        True,
    ),
    "a fusion reads it elsewhere": (
        ALIAS
        + FUSION % "s = f32[64,64] transpose(a), dimensions={1,0}\n ROOT o = f32[64,64] add(b, s)"
        + BODY % "r = f32[64,64] negate(c)\n w = f32[64,64] fusion(c, q), kind=kLoop, calls=f",
        False,
    ),
    "a fusion reads it twice, once elsewhere": (
        ALIAS
        + FUSION % "s = f32[64,64] reverse(a), dimensions={0}\n ROOT o = f32[64,64] add(a, s)"
        + BODY % "r = f32[64,64] negate(c)\n w = f32[64,64] fusion(c, q), kind=kLoop, calls=f",
        False,
    ),
    "the copy is a result": (
        ALIAS + BODY.replace("tuple(w, r)", "tuple(w, c)") % "w = f32[64,64] exponential(q)",
        False,
    ),
    "the copy is handed on": (
        ALIAS + BODY % "x = f32[4096] bitcast(c)\n r = f32[64,64] bitcast(x)\n w = f32[64,64] exponential(q)",
        False,
    ),
    "something waits for the copy": (
        ALIAS + BODY % "r = f32[64,64] negate(c)\n w = f32[64,64] exponential(q), control-predecessors={c}",
        False,
    ),
    "it is sent, and the send is done after it is overwritten": (
        ALIAS
        + BODY
        % """k = token[] after-all()
  s = (f32[64,64], u32[], token[]) send(c, k), channel_id=1, is_host_transfer=true
  w = f32[64,64] exponential(q)
  d = token[] send-done(s), channel_id=1, is_host_transfer=true
  r = f32[64,64] negate(q)""",
        False,
    ),
    "a fusion writes over it in another layout": (
        ALIAS
        + """
f {
  a = f32[64,64]{1,0} parameter(0)
  m = f32[64,64]{1,0} multiply(a, a)
  o = f32[64,64]{0,1} copy(m)
  ROOT u = (f32[64,64]{0,1}, f32[64,64]{1,0}) tuple(o, m)
}
ENTRY e {
  p = f32[64,64]{1,0} parameter(0)
  q = f32[64,64]{1,0} parameter(1)
  c = f32[64,64]{1,0} copy(p)
  z = (f32[64,64]{0,1}, f32[64,64]{1,0}) fusion(c), kind=kLoop, calls=f
  w = f32[64,64]{0,1} get-tuple-element(z), index=0
  r = f32[64,64]{1,0} get-tuple-element(z), index=1
  ROOT t = (f32[64,64]{0,1}, f32[64,64]{1,0}) tuple(w, r)
}
""",
        False,
    ),
    "not a copy of an argument": (
        ALIAS
        + BODY.replace("copy(p)", "negate(p)") % "d = f32[64,64] copy(c)\n r = f32[64,64] negate(d)\n"
        " w = f32[64,64] exponential(q)",
        False,
    ),
}


def _read(text: str, tmp_path) -> bytes:  # type: ignore[no-untyped-def]
    path = tmp_path / "m.txt"
    path.write_text(text)
    return read_module(path)


def _needless(data: bytes) -> list[str]:
    module = Module.from_bytes(data)
    return needless_copies(module, Dataflow(module, platform("cpu")))


@pytest.mark.parametrize("name", CASES)
def test_which_copies_go(name: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """What is left out is proven safe; what is not left out, the check refuses."""
    text, may_go = CASES[name]
    data = _read(text, tmp_path)
    copy = next(i.name for i in Module.from_bytes(data).entry.instructions if i.opcode == "copy")
    assert _needless(data) == ([copy] if may_go else [])
    lean = remove_copies(data, [copy])
    if may_go:
        check_rewrite(data, lean)
    else:
        with pytest.raises(PlanCheckError):
            check_rewrite(data, lean)


def test_a_reader_moved_behind_the_writer_is_caught(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Fine while the copy is there; not once it is left out."""
    data = _read(CASES["read before it is overwritten"][0], tmp_path)

    def late(given: bytes) -> bytes:
        message = parse_module(given)
        entry = next(c for c in message.computations if c.id == message.entry_computation_id)
        (reader,) = (i.id for i in entry.instructions if i.name == "r")
        (writer,) = (i.id for i in entry.instructions if i.name == "w")
        (sequence,) = (s.value.instruction_ids for s in message.schedule.sequences if s.key == entry.id)
        sequence.remove(reader)
        sequence.insert(list(sequence).index(writer) + 1, reader)
        return serialize(message)

    check_rewrite(data, late(data))
    lean = remove_copies(data, ["c"])
    check_rewrite(data, lean)
    with pytest.raises(PlanCheckError, match=r"overwrote|overwrites"):
        check_rewrite(data, late(lean))


def test_more_than_a_copy_is_caught(tmp_path) -> None:  # type: ignore[no-untyped-def]
    data = _read(CASES["read before it is overwritten"][0], tmp_path)
    message = parse_module(remove_copies(data, ["c"]))
    entry = next(c for c in message.computations if c.id == message.entry_computation_id)
    reader = next(i for i in entry.instructions if i.name == "r")
    argument = next(i for i in entry.instructions if i.name == "q")
    reader.operand_ids[0] = argument.id  # reads another argument than the one that was copied
    with pytest.raises(PlanCheckError):
        check_rewrite(data, serialize(message))


def test_removing_what_is_not_there() -> None:
    function = jax.jit(lambda x: x + 1).lower(jnp.ones(3)).compile()
    data = function.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
    with pytest.raises(ValueError, match="leaves out the copy 'nothing'"):
        remove_copies(data, ["nothing"])


def _train(width: int, depth: int):  # type: ignore[no-untyped-def]
    def loss(weights, x, y):  # type: ignore[no-untyped-def]
        for w in weights:
            x = jnp.tanh(x @ w)
        return ((x - y) ** 2).mean()

    def step(weights, momentum, x, y):  # type: ignore[no-untyped-def]
        value, grads = jax.value_and_grad(loss)(weights, x, y)
        momentum = [0.9 * m + g for m, g in zip(momentum, grads, strict=True)]
        return [w - 0.1 * m for w, m in zip(weights, momentum, strict=True)], momentum, value

    keys = jax.random.split(jax.random.key(0), depth + 2)
    weights = [jax.random.normal(k, (width, width)) / width**0.5 for k in keys[:depth]]
    momentum = [jnp.zeros((width, width)) for _ in weights]
    return step, weights, momentum, *(jax.random.normal(k, (8, width)) for k in keys[depth:])


def test_donated_steps_give_the_same_bits_without_copies() -> None:
    """XLA copies weights that are read after they could be updated; a step without those copies is the same step."""
    step, weights, momentum, x, y = _train(96, 5)
    plain = jax.jit(step, donate_argnums=(0, 1))
    better = hlo_memopt.jit(step, donate_argnums=(0, 1), options=hlo_memopt.Options(strict=True))
    states = [
        (jax.tree.map(jnp.copy, weights), jax.tree.map(jnp.copy, momentum)),
        (jax.tree.map(jnp.copy, weights), jax.tree.map(jnp.copy, momentum)),
    ]
    for _ in range(3):
        for n, f in enumerate((plain, better)):
            w, m, _ = f(*states[n], x, y)
            states[n] = (w, m)
        a, b = (jax.tree.leaves(s) for s in states)
        assert all(np.array_equal(np.asarray(p), np.asarray(q)) for p, q in zip(a, b, strict=True))
    temp = [
        f.lower(weights, momentum, x, y).compile().memory_analysis().temp_size_in_bytes for f in (plain, better)
    ]
    assert temp[1] < temp[0]


def test_copies_can_be_kept() -> None:
    step, weights, momentum, x, y = _train(64, 4)
    seen = {}
    for keep in (True, False):
        options = hlo_memopt.Options(strict=True, elide_copies=not keep)

        def run(*args):  # type: ignore[no-untyped-def]
            return step(*args)

        hlo_memopt.jit(run, donate_argnums=(0, 1), options=options).lower(weights, momentum, x, y).compile()
        seen[keep] = hlo_memopt.plans()[0]
    assert not seen[True].elided
    assert seen[False].peak_after <= seen[True].peak_after


@pytest.mark.parametrize("path", corpus("cpu"))
def test_the_corpus_loses_only_copies_that_the_check_lets_go(path) -> None:  # type: ignore[no-untyped-def]
    data, _ = read_corpus(path)
    plan = plan_module(data, "cpu", hlo_memopt.Options(effort="fast"))
    assert plan.elided
    check_rewrite(data, plan.apply(data))


def test_copies_go_without_a_new_order() -> None:
    step, weights, momentum, x, y = _train(48, 3)
    data = _scheduled(step, weights, momentum, x, y)
    plan = plan_module(data, "cpu", hlo_memopt.Options(reorder=False))
    module = Module.from_bytes(data)
    given = [module.entry.by_id[i].name for i in module.schedule[module.entry.id]]
    assert plan.elided and plan.changed
    assert plan.schedule[module.entry.name] == [name for name in given if name not in plan.elided]
    untouched = plan_module(data, "cpu", hlo_memopt.Options(reorder=False, elide_copies=False))
    assert not untouched.changed and not untouched.elided


def test_what_does_not_pay_is_left_as_it_was() -> None:
    """`against`: a carried module that needs no less leaves a plan that changes nothing, copies included."""
    step, weights, momentum, x, y = _train(48, 3)
    data = _scheduled(step, weights, momentum, x, y)
    plan = plan_module(data)
    kept = donation.against(dataclasses.replace(plan, peak_after=10 * plan.peak_before), data)
    assert not kept.changed and not kept.elided and kept.options == plan.options


SMALL = {
    "one reader": lambda p, q: (p - 0.1 * (q @ q.T), (p @ q).sum()),
    "read twice": lambda p, q: (p * 0.9 + q, jnp.tanh(p) @ p.T),
    "two updated": lambda p, q: (p - q @ p.T, q - p @ q.T),
    "swapped": lambda p, q: (q * 2.0, p + 1.0),
    "reversed": lambda p, q: (p[::-1] + q, p.sum()),
    "updated in place": lambda p, q: (p.at[0].set(q[0]), (p @ q).sum()),
    "kept": lambda p, q: (p, q + p.T),
}


@pytest.mark.parametrize("name", SMALL)
def test_what_is_promised_is_compiled(name: str) -> None:
    """XLA's figure is the plan's, also where leaving out copies is all that there is to gain."""
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)

    def run(p, q):  # type: ignore[no-untyped-def]
        return SMALL[name](p, q)

    compiled = hlo_memopt.jit(run, donate_argnums=(0, 1), options=hlo_memopt.Options(strict=True)).lower(x, x).compile()
    plan, temp = hlo_memopt.plans()[0], compiled.memory_analysis().temp_size_in_bytes
    assert abs(plan.peak_after - temp) <= 256
    assert plan.changed or abs(plan.peak_before - temp) <= 256


def _scheduled(step, *args) -> bytes:  # type: ignore[no-untyped-def]
    return compile_caught(step, args, donate_argnums=(0, 1)).module
