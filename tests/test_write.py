"""Text and proto output, the CPU compiles, and that nothing is written half."""

from __future__ import annotations

import gzip
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from hlo_memopt.hlo import compile as hlo_compile
from hlo_memopt.hlo import proto, read, write
from hlo_memopt.hlo.errors import InputError
from hlo_memopt.hlo.graph import Module

CORPUS = Path(__file__).parent.parent.parent / "shared" / "corpus"


def order(data: bytes) -> dict[str, list[str]]:
    """Computation name -> instruction names in schedule order."""
    module = Module.from_bytes(data)
    sequences = {module.computations[c]: ids for c, ids in module.schedule.items()}
    return {c.name: [c.by_id[i].name for i in ids] for c, ids in sequences.items() if ids}


@pytest.fixture(scope="module")
def lowered() -> Any:
    import jax
    import jax.numpy as jnp

    def step(w: Any, x: Any) -> Any:
        big = jnp.asarray([[float(i * j) for i in range(16)] for j in range(16)])  # a constant that text may elide
        h = jnp.tanh(x @ w) @ big
        return w - jnp.sin(h.T @ h), jnp.sort(h).sum()

    shape = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    return jax.jit(step, donate_argnums=0).lower(shape, shape)


@pytest.fixture(scope="module")
def compiled(lowered: Any) -> Any:
    return lowered.compile()


@pytest.fixture(scope="module")
def data(compiled: Any) -> bytes:
    return compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()


def reordered(data: bytes) -> bytes:
    """The same module in another valid order: each instruction as late as the old order, reversed, allows."""
    message = proto.parse_module(data)
    entry = next(c for c in message.computations if c.id == message.entry_computation_id)
    sequence = next(s.value for s in message.schedule.sequences if s.key == entry.id)
    old = list(sequence.instruction_ids)
    needs = {i.id: {*i.operand_ids, *i.control_predecessor_ids} for i in entry.instructions}
    new: list[int] = []
    while len(new) < len(old):
        new.append(next(i for i in reversed(old) if i not in new and needs[i] <= set(new)))
    assert new != old
    sequence.instruction_ids[:] = new
    return proto.serialize(message)


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write.write_atomically(b"abc", str(pipe))
        assert os.read(reader, 10) == b"abc" and not pipe.is_file()
    finally:
        os.close(reader)


def test_text_keeps_schedule_aliases_and_constants(data: bytes, tmp_path: Path) -> None:
    from jaxlib import _hlo

    changed = reordered(data)
    assert order(changed) != order(data)
    for module in (data, changed):
        text = write.to_text(module)
        assert "is_scheduled=true" in text.split("\n", 1)[0] and "225" in text and "..." not in text
        again = _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()
        assert order(again) == order(module)
        assert Module.from_bytes(again).aliases == Module.from_bytes(data).aliases != []
        write.write_module(module, tmp_path / "m.hlo")
        assert order(read.read_module(tmp_path / "m.hlo")) == order(module)


def test_partitions_in_the_text(data: bytes) -> None:
    text = write.to_text(data, num_partitions=8, num_replicas=2)
    got = read.read_bytes(text.encode(), "x", isolated=False)
    assert (got.num_partitions, got.num_replicas) == (8, 2)


def test_proto_files(data: bytes, tmp_path: Path) -> None:
    write.write_module(data, tmp_path / "m.pb")
    assert (tmp_path / "m.pb").read_bytes() == data
    write.write_module(data, str(tmp_path / "a.pb.gz"))
    write.write_module(data, str(tmp_path / "b.hlo.pb.gz"))
    packed = (tmp_path / "a.pb.gz").read_bytes()
    assert gzip.decompress(packed) == data
    assert packed == (tmp_path / "b.hlo.pb.gz").read_bytes()  # no name and no time inside
    assert packed[4:8] == bytes(4)


def test_corpus_round_trips_as_text(tmp_path: Path) -> None:
    files = sorted(CORPUS.glob("*_mlp*.gz")) + sorted(CORPUS.glob("*gpt2_scan*.gz"))
    if not files:
        pytest.skip("no ../shared/corpus here")
    for file in files:
        module = read.read_bytes(file.read_bytes(), file.name, isolated=False).module
        text = write.to_text(module, isolated=False).encode()
        before, after = order(module), order(read.read_bytes(text, "x", isolated=False).module)
        renamed = {n for n in before if n.startswith("async_computation")}  # wrappers of asynchronous operations
        assert {n: s for n, s in after.items() if n in before} == {n: before[n] for n in before if n not in renamed}
        assert len(after) == len(before), file.name


def test_a_text_that_loses_the_schedule_is_refused(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxlib import _hlo

    other = _hlo.HloModule.from_serialized_hlo_module_proto(reordered(data))
    message = proto.parse_module(data)
    monkeypatch.setattr(write, "_load", lambda _: (message, other))
    with pytest.raises(InputError, match=r"does not survive as HLO text \(the schedule of main.* changes\)"):
        write.to_text(data, isolated=False)


def test_refusals(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "d.pb").mkdir()
    cases = {
        "m.json": r"m.json: has a suffix that names no format; end the name in .txt",
        "m": "has a suffix",
        "none/m.pb": "cannot be written .*; create its folder first",
        "d.pb": "is a directory",
    }
    for name, match in cases.items():
        with pytest.raises(InputError, match=match):
            write.write_module(data, tmp_path / name)
    with pytest.raises(InputError, match="no HloModuleProto that XLA accepts"):
        write.write_module(b"\x0a\x01m", tmp_path / "m.txt")
    assert [p.name for p in tmp_path.iterdir()] == ["d.pb"]


def test_nothing_is_written_half(data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, link = tmp_path / "m.pb", tmp_path / "link.pb"
    target.write_bytes(b"old")
    target.chmod(0o640)
    link.symlink_to(target)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(InputError, match="No space left on device"):
            write.write_module(data, target)
    assert target.read_bytes() == b"old" and sorted(p.name for p in tmp_path.iterdir()) == ["link.pb", "m.pb"]
    write.write_module(data, link)
    assert link.is_symlink() and target.read_bytes() == data
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    write.write_module(data, tmp_path / "new.pb")
    plain = tmp_path / "plain"
    plain.write_bytes(b"")
    assert (tmp_path / "new.pb").stat().st_mode == plain.stat().st_mode


def test_compile_gives_what_jax_gives(lowered: Any, compiled: Any, data: bytes) -> None:
    expected = compiled.memory_analysis()
    stablehlo = read.read_bytes(lowered.as_text().encode(), "m", isolated=False)
    text = read.read_bytes(lowered.as_text("hlo").encode(), "m", isolated=False)
    for source in (stablehlo, text, text.module):
        got = hlo_compile.compile_for_cpu(source)
        assert got.temp_bytes == expected.temp_size_in_bytes > 0
        assert got.alias_bytes == expected.alias_size_in_bytes == 16 * 16 * 4
        assert got.argument_bytes == expected.argument_size_in_bytes
        assert got.output_bytes == expected.output_size_in_bytes
        module = Module.from_bytes(got.module)
        assert module.is_scheduled and module.name == "jit_step"
        assert sorted(i.opcode for i in module.entry.instructions) == sorted(
            i.opcode for i in Module.from_bytes(data).entry.instructions
        )


def test_donors_reach_the_compiler() -> None:
    """A donated buffer that no output was assigned to yet: XLA pairs it with the result of its shape."""
    entry = "ENTRY e {\n  p = f32[64]{0} parameter(0)\n  ROOT s = f32[64]{0} sine(p)\n}\n"
    text = "HloModule m, buffer_donor={ (0, {}) }\n" + entry
    got = hlo_compile.compile_for_cpu(read.read_bytes(text.encode(), "m", isolated=False))
    assert got.alias_bytes == 256
    plain = text.replace("buffer_donor={ (0, {}) }", "replica_count=1")
    assert hlo_compile.compile_for_cpu(read.read_bytes(plain.encode(), "m", isolated=False)).alias_bytes == 0


def test_too_many_partitions() -> None:
    parameter = "f32[8]{0} parameter(0), sharding={devices=[4096]<=[4096]}"
    text = "HloModule m, num_partitions=4096\nENTRY e {\n  ROOT p = " + parameter + "\n}\n"
    source = read.read_bytes(text.encode(), "m", isolated=False)
    for given in (source, source.module):  # the number from the text, and from the sharding
        with pytest.raises(InputError, match=r"partitioned for 4096 devices.*device_count=4096"):
            hlo_compile.compile_for_cpu(given)


def test_scheduled_modules_are_not_optimized_again(data: bytes) -> None:
    with pytest.raises(InputError, match="is scheduled already"):
        hlo_compile.compile_for_cpu(data)
    with pytest.raises(InputError, match="broken module proto"):
        hlo_compile.compile_for_cpu(b"")


def test_scheduled_module_is_measured_in_its_order(data: bytes, compiled: Any) -> None:
    import jax

    if jax.__version_info__ < (0, 12):
        with pytest.raises(InputError, match=r"lost its input/output aliases.*upgrade jax"):
            hlo_compile.compile_scheduled_for_cpu(data)
        message = proto.parse_module(data)
        message.ClearField("input_output_alias")
        data = proto.serialize(message)
    else:
        got = hlo_compile.compile_scheduled_for_cpu(data)
        assert got.temp_bytes == compiled.memory_analysis().temp_size_in_bytes
        assert got.alias_bytes == compiled.memory_analysis().alias_size_in_bytes
    changed = reordered(data)
    got = hlo_compile.compile_scheduled_for_cpu(changed)
    assert order(got.module) == order(changed) and Module.from_bytes(got.module).name == "jit_step"
    with pytest.raises(InputError, match="is not scheduled"):
        message = proto.parse_module(data)
        message.ClearField("schedule")
        hlo_compile.compile_scheduled_for_cpu(proto.serialize(message))


def test_scheduled_corpus_module_by_xla() -> None:
    import jax

    if not CORPUS.exists() or jax.__version_info__ < (0, 12):
        pytest.skip("no ../shared/corpus here, or a jaxlib that drops aliases")
    truth = json.loads((CORPUS / "truth.json").read_text())["cpu_mlp.hlo.pb.gz"]
    got = hlo_compile.compile_scheduled_for_cpu(gzip.decompress((CORPUS / "cpu_mlp.hlo.pb.gz").read_bytes()))
    assert round(got.temp_bytes / 2**20, 1) == truth["temp_mib"]
    assert round(got.alias_bytes / 2**20, 1) == truth["alias_mib"]
    for name in ("cuda_mlp", "tpu_mlp"):
        with pytest.raises(InputError, match="is not of XLA:CPU"):
            hlo_compile.compile_scheduled_for_cpu(gzip.decompress((CORPUS / f"{name}.hlo.pb.gz").read_bytes()))
