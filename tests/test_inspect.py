"""planner.inspect: the peak, what is alive there, who made it."""

from __future__ import annotations

import gzip
import itertools
import pathlib

import jax
import jax.numpy as jnp
import pytest

from hlo_memopt.hlo.read import read_bytes
from hlo_memopt.planner.inspect import inspect_module, scope_of

CORPUS = pathlib.Path(__file__).parents[2] / "shared" / "corpus"

# At c, b (8 KiB) and c (4 KiB) are alive in the heap; a lies in the place of the result, which is idle until then.
STRAIGHT = """HloModule straight, is_scheduled=true

less {
  x = f32[] parameter(0)
  y = f32[] parameter(1)
  ROOT l = pred[] compare(x, y), direction=LT
}

ENTRY e {
  p = f32[1024]{0} parameter(0)
  a = f32[1024]{0} negate(p), metadata={op_name="jit(f)/layer/neg" source_file="model.py" source_line=7}
  b = f32[2048]{0} concatenate(a, p), dimensions={0}, metadata={op_name="jit(f)/cat" source_file="m.py" source_line=8}
  c = f32[1024]{0} sort(a), dimensions={0}, to_apply=less
  ROOT r = f32[3072]{0} concatenate(b, c), dimensions={0}, metadata={op_name="jit(f)/out/concatenate"}
}
"""


def read(text: str) -> bytes:
    return read_bytes(text.encode(), "text").module


def compiled(f, *args) -> bytes:
    executable = jax.jit(f).lower(*args).compile().runtime_executable()
    return executable.hlo_modules()[0].as_serialized_hlo_module_proto()


def loop(x):
    def body(carry, _):
        wide = jnp.sort(jnp.concatenate([carry, carry[::-1], carry * 2]))
        return wide[: carry.shape[0]] + 1, carry.sum()

    return jax.lax.scan(body, x, None, length=5)


def test_known_module():
    found = inspect_module(read(STRAIGHT))
    assert found.module == "straight" and found.platform == "cpu"
    assert found.temp == found.heap == found.live_peak == 8192 + 4096 and found.in_idle == 4096
    assert (found.parameters, found.outputs, found.constants, found.fragmentation) == (4096, 12288, 0, 0)
    peak = found.peak
    assert peak is not None and (peak.instruction, peak.opcode, peak.shape) == ("c", "sort", "f32[1024]")
    assert (peak.step, peak.steps, peak.computation, peak.calls) == (4, 5, "e", ())
    live = [(b.bytes, b.instruction, b.first, b.last, b.steps) for b in found.live]
    assert live == [(8192, "b", 3, 5, 3), (4096, "c", 4, 5, 2)]
    assert {(s.name, s.bytes, s.buffers) for s in found.by_scope} == {("(top level)", 8192, 1), ("layer", 4096, 1)}
    assert {(s.name, s.bytes) for s in found.by_source} == {("m.py:8", 8192), ("model.py:7", 4096)}


def test_what_died_just_before_the_peak_is_not_in_it():
    """b and c at the peak; a, which only b reads, is gone by then."""
    found = inspect_module(
        read("""HloModule m, is_scheduled=true

ENTRY e {
  p = f32[1024]{0} parameter(0)
  a = f32[2048]{0} concatenate(p, p), dimensions={0}
  b = f32[1024]{0} slice(a), slice={[512:1536]}
  c = f32[3072]{0} concatenate(b, b, b), dimensions={0}
  ROOT r = f32[16]{0} slice(c), slice={[0:16]}
}
""")
    )
    assert [(b.instruction, b.bytes) for b in found.live] == [("c", 12288), ("b", 4096)]
    assert found.live_peak == 12288 + 4096 and found.peak is not None and found.peak.instruction == "c"


def test_origin_of_what_xla_added_is_that_of_a_neighbour():
    peak = inspect_module(read(STRAIGHT)).peak
    assert peak is not None and peak.instruction == "c"
    assert peak.origin.near and peak.origin.op_name == "jit(f)/layer/neg" and peak.origin.source == "model.py:7"
    live = {b.instruction: b for b in inspect_module(read(STRAIGHT)).live}
    assert not live["b"].origin.near and live["b"].origin.op_name == "jit(f)/cat"


def test_lines_of_a_text_are_named_after_it():
    found = inspect_module(read(STRAIGHT.replace('"m.py"', '"-"')), text_name="step.mlir")
    assert {s.name for s in found.by_source} == {"step.mlir:8", "model.py:7"}


def test_peak_in_a_loop_names_the_call():
    found = inspect_module(compiled(loop, jnp.arange(4096.0)))
    assert found.peak is not None
    assert len(found.peak.calls) == 1 and found.peak.calls[0].startswith("while")
    assert found.peak.computation not in ("main", "")
    assert pathlib.Path(__file__).name in found.peak.origin.source


@pytest.mark.parametrize("donate", [(), (0,)])
def test_live_buffers_add_up_and_do_not_overlap(donate):
    def f(x, y):
        parts = [jnp.sort(x * n) for n in range(5)]
        return sum(parts[n][n] * parts[n + 1] for n in range(4)) + y, loop(y)

    args = jnp.arange(1000.0), jnp.arange(500.0).repeat(2)
    executable = jax.jit(f, donate_argnums=donate).lower(*args).compile()
    (module,) = executable.runtime_executable().hlo_modules()
    found = inspect_module(module.as_serialized_hlo_module_proto())
    stats = executable.memory_analysis()
    assert found.temp == pytest.approx(stats.temp_size_in_bytes, rel=0.01)
    assert (found.parameters, found.outputs) == (stats.argument_size_in_bytes, stats.output_size_in_bytes)
    assert found.aliased == stats.alias_size_in_bytes == (4000 if donate else 0)
    assert sum(b.bytes for b in found.live) == found.live_peak > 0
    spans = sorted((b.offset, b.offset + b.bytes) for b in found.live)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)) and spans[-1][1] <= found.heap
    assert sum(s.bytes for s in found.by_scope) == sum(s.bytes for s in found.by_source) == found.live_peak
    step = found.peak.step
    assert all(b.first <= step <= b.last for b in found.live)
    assert [b.bytes for b in found.live] == sorted((b.bytes for b in found.live), reverse=True)


def test_nothing_in_the_heap():
    found = inspect_module(compiled(lambda x: x + 1, jnp.ones(8)))
    assert (found.temp, found.peak, found.live, found.by_scope) == (0, None, (), ())


def test_unscheduled_and_unknown_platform():
    with pytest.raises(ValueError, match="no schedule"):
        inspect_module(read(STRAIGHT.replace(", is_scheduled=true", "")))
    with pytest.raises(ValueError, match="unknown platform"):
        inspect_module(read(STRAIGHT), "abacus")


@pytest.mark.parametrize(
    ("op_name", "scope"),
    [
        ("jit(step)/jvp(Net)/Conv_0/conv", "jvp(Net)/Conv_0"),
        ("jit(step)/add", "(top level)"),
        ("add", "(top level)"),
        ("jit(f)", "(top level)"),
        ("", ""),
    ],
)
def test_scope(op_name, scope):
    assert scope_of(op_name) == scope


@pytest.mark.parametrize("name", ["cpu_vgg16", "cuda_mlp", "tpu_gpt2_scan"])
def test_corpus(name):
    path = CORPUS / f"{name}.hlo.pb.gz"
    if not path.exists():
        pytest.skip("no corpus here")
    found = inspect_module(gzip.decompress(path.read_bytes()), name.split("_")[0])
    assert sum(b.bytes for b in found.live) == found.live_peak > 100 << 20
    named = sum(b.bytes for b in found.live if b.origin.op_name)
    assert named >= 0.97 * found.live_peak
