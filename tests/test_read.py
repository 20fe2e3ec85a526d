"""Every format gives the same module; everything else gives one clear error and never ends the process."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import random
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from hlo_memopt.hlo import proto, read
from hlo_memopt.hlo.errors import InputError, check_module, one_line
from hlo_memopt.hlo.graph import Module

CORPUS = Path(__file__).parent.parent.parent / "shared" / "corpus"


def opcodes(data: bytes) -> list[str]:
    return sorted(i.opcode for i in Module.from_bytes(data).entry.instructions)


@pytest.fixture(scope="module")
def program() -> dict[str, Any]:
    """One small training step, in every form that JAX gives out."""
    import jax
    import jax.numpy as jnp
    from jax import export

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            h, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=3)
            return (h**2).sum()

        return w - jax.grad(loss)(w), jax.lax.top_k(x, 2)[0]  # top_k: a CHLO operation

    jitted = jax.jit(step, donate_argnums=0)
    shapes = (jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((4, 8), jnp.float32))
    lowered = jitted.lower(*shapes)
    compiled = lowered.compile()
    dims = export.symbolic_shape("b, 8")
    symbolic = (shapes[0], jax.ShapeDtypeStruct(dims, jnp.float32))
    return {
        "mlir": lowered.as_text(),
        "bytecode": export.export(jitted)(*shapes).mlir_module_serialized,
        "symbolic": export.export(jitted)(*symbolic).mlir_module_serialized,
        "before": lowered.as_text("hlo"),
        "after": compiled.as_text(),
        "proto": compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto(),
    }


def in_field_1(data: bytes) -> bytes:
    n, length = len(data), b""
    while n >= 128:
        length, n = length + bytes([n & 127 | 128]), n >> 7
    return b"\x0a" + length + bytes([n]) + data


def test_hlo_formats_agree(program: dict[str, Any], tmp_path: Path) -> None:
    data = program["proto"]
    hlo_proto = in_field_1(data) + b"\x1a\x02\x08\x01"  # and a buffer assignment
    cases = {
        "a.png": (program["after"].encode(), read.HLO_TEXT),  # the suffix says nothing
        "b": (gzip.compress(program["after"].encode()), read.HLO_TEXT),
        "c.pb": (data, read.MODULE_PROTO),
        "d.pb": (gzip.compress(data), read.MODULE_PROTO),
        "e.txt": (hlo_proto, read.HLO_PROTO),
        "f.gz": (gzip.compress(in_field_1(hlo_proto)), read.HLO_PROTO),  # a HloSnapshot
    }
    for file, (content, kind) in cases.items():
        path = tmp_path / file
        path.write_bytes(content)
        got = read.read_input(path)
        assert (got.kind, got.scheduled, got.name, got.source) == (kind, True, "jit_step", str(path)), file
        module = Module.from_bytes(got.module)
        assert [i.name for i in module.entry.instructions] == [
            i.name for i in Module.from_bytes(data).entry.instructions
        ]
        assert [a.parameter for a in module.aliases] == [0] and module.is_scheduled
    assert read.read_module(tmp_path / "e.txt") == data


def test_stablehlo_text_and_bytecode(program: dict[str, Any]) -> None:
    text = read.read_bytes(program["mlir"].encode(), "x")
    code = read.read_bytes(program["bytecode"], "y")
    assert (text.kind, code.kind) == (read.STABLEHLO_TEXT, read.STABLEHLO_BYTECODE)
    before = read.read_bytes(program["before"].encode(), "z", isolated=False)
    assert before.kind == read.HLO_TEXT and not before.scheduled
    for got in (text, code):
        assert not got.scheduled and got.name == "jit_step" and got.stablehlo and not check_module_of(got.module)
        assert opcodes(got.module) == opcodes(before.module)
        assert [a.parameter for a in Module.from_bytes(got.module).aliases] == [0]


def check_module_of(data: bytes) -> str | None:
    return check_module(proto.parse_module(data))


def test_stdin(program: dict[str, Any]) -> None:
    got = read.read_input("-", stdin=io.BytesIO(program["proto"]))
    assert got.module == program["proto"] and got.source == "<stdin>"
    with pytest.raises(InputError, match="<stdin>: is empty; give"):
        read.read_input("-", stdin=b"")


def test_partitions_come_from_the_texts() -> None:
    text = "HloModule m, num_partitions=4\n\nENTRY e {\n  ROOT p = f32[3]{0} parameter(0)\n}\n"
    assert read.read_bytes(text.encode(), "x", isolated=False).num_partitions == 4
    mlir = (
        "module @m attributes {mhlo.num_partitions = 2 : i32} {\n"
        "func.func public @main(%a: tensor<3xf32>) -> tensor<3xf32> { return %a : tensor<3xf32> }\n}"
    )
    assert read.read_bytes(mlir.encode(), "x", isolated=False).num_partitions == 2


def test_dump_directory(tmp_path: Path) -> None:
    """As XLA writes it, text and proto, with several modules."""
    code = (
        "import jax, jax.numpy as jnp\n"
        "jax.jit(lambda x: jnp.sin(x) @ x).lower(jnp.ones((4, 4))).compile()\n"
        "def big(x):\n    for _ in range(5):\n        x = jnp.sort(jnp.tanh(x @ x))\n    return x\n"
        "jax.jit(big).lower(jnp.ones((4, 4))).compile()\n"
    )
    flags = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text --xla_dump_hlo_as_proto"
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    )
    got = read.read_input(tmp_path)
    assert (got.kind, got.name, got.scheduled) == (read.DUMP_DIR, "jit_big", True)
    assert got.source == str(tmp_path) and got.file.endswith(".hlo.pb") and "after_optimizations" in got.file
    assert got.note is not None and "others: jit__lambda (" in got.note
    protos = list(tmp_path.glob("*.hlo.pb"))
    assert len(protos) >= 4
    for file in protos:
        file.unlink()
    text = read.read_input(tmp_path)
    assert text.file.endswith("after_optimizations.txt") and opcodes(text.module) == opcodes(got.module)
    assert read.read_input(tmp_path, module="_lambda").name == "jit__lambda"
    with pytest.raises(InputError, match=r"holds no module that matches 'nope'; choose one of jit_big, "):
        read.read_input(tmp_path, module="nope")
    with pytest.raises(InputError, match="no regular expression"):
        read.read_input(tmp_path, module="(")


def test_dump_directory_without_modules(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is empty; run the program with XLA_FLAGS=--xla_dump_to=DIR"):
        read.read_input(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(InputError, match=r"holds no \*after_optimizations"):
        read.read_input(tmp_path)
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "module_0001.jit_f.cpu_after_optimizations.txt").write_text("")
    with pytest.raises(InputError, match="its folder 'inner' does; give"):
        read.read_input(tmp_path)
    with pytest.raises(InputError, match=r"holds no readable module: .*is empty"):
        read.read_input(tmp_path / "inner")


def _zip() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as z:
        z.writestr("a", "b")
    return out.getvalue()


FOREIGN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "empty in gzip": (gzip.compress(b""), "is empty inside"),
    "blank": (b" \n\n", "only white space"),
    "png": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "is a PNG image"),
    "zip": (_zip(), "is a zip archive"),
    "elf": (b"\x7fELF\x02\x01\x01\0", "is an ELF binary"),
    "pickle": (pickle.dumps({"a": list(range(100))}), "is binary data, but no HloModuleProto"),
    "json": (json.dumps({"a": [1, 2]}).encode(), "is JSON"),
    "python": (Path(__file__).read_bytes(), "is text, but no module"),
    "jaxpr": (b"{ lambda ; a:f32[3]. let b:f32[3] = sin a in (b,) }", r"is a jaxpr, .*as_text\(\)"),
    "saved model": (b"\x08\x01\x12\x05serve", "is a TensorFlow SavedModel"),
    "random": (random.Random(0).randbytes(5000), "is binary data, but no HloModuleProto"),
    "report": (b"BufferAssignment:\nallocation 0: size 4\n", "give the .*after_optimizations.txt beside it"),
    "log first": (b"I0000 hello\nHloModule m\n", "other text before the HloModule of line 2"),
    "no header": (b"ENTRY e {\n  ROOT p = f32[3] parameter(0)\n}\n", "without its first line"),
    "utf-16 noise": (b"\xff\xfe\x00\xd8\x00\xd8", "is binary data"),
    "deep": (b"HloModule m\nENTRY e {\n p = " + b"(" * 5000 + b"f32[]" + b")" * 5000, "nests 5000 brackets"),
    "deep mlir": (b"module {" * 5000, "nests 5000 brackets"),
    "twice gzipped": (gzip.compress(gzip.compress(b"HloModule m")), "gzip inside gzip"),
    "trailing": (gzip.compress(b"HloModule m") + b"tail", "other bytes follow"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_files(name: str) -> None:
    content, match = FOREIGN[name]
    with pytest.raises(InputError, match=match) as caught:
        read.read_bytes(content, "FILE")
    error = caught.value
    assert str(error) == f"FILE: {error.problem}; {error.advice}" and "\n" not in str(error)
    assert error.problem and error.advice and len(str(error)) < 600
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_paths_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="no such file or directory; check the path"):
        read.read_input(tmp_path / "none.txt")
    with pytest.raises(InputError, match="is a device"):
        read.read_input("/dev/zero")
    with pytest.raises(InputError, match=r"null byte|null character"):
        read.read_input("a\0b")
    file = tmp_path / "secret.txt"
    file.write_text("HloModule m")

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(InputError, match=r"secret.txt: permission denied; make it readable"):
        read.read_input(file)


def test_cut_and_broken_texts(program: dict[str, Any]) -> None:
    text = program["after"]
    cases = {
        text[: len(text) // 2]: "without its ENTRY computation|ends early, in ",
        text[: text.rindex(" tuple(") + 10]: r"ends early, in '.*': .* line \d+:\d+: ",
        text[: text.index("ENTRY ")]: "without its ENTRY computation",
        text.replace(" tanh(", " tahn("): r"does not accept: line \d+:\d+: expects opcode but sees: tahn",
        "HloModule m\nENTRY e {\n ROOT a = f32[3] add(b, c)\n}\n": "line 3:22: instruction does not exist: b",
        program["mlir"][: len(program["mlir"]) // 2]: r"StableHLO that MLIR cannot read: line \d+:\d+: ",
        program["mlir"].replace("stablehlo.tanh", "stablehlo.tahn"): "'stablehlo.tahn' is unknown",
        "module {\n  func.func @f() { return }\n}\n": "requires module with `main` function",
    }
    for broken, match in cases.items():
        with pytest.raises(InputError, match=match):
            read.read_bytes(broken.encode(), "FILE", isolated=False)


def test_cut_binaries(program: dict[str, Any]) -> None:
    data = program["proto"]
    for size in (5, 30, 200, len(data) // 2, len(data) - 40):
        with pytest.raises(InputError, match="is truncated: its proto ends early"):
            read.read_bytes(data[:size], "FILE")
        with pytest.raises(InputError, match="is truncated: its proto ends early"):
            read.read_bytes(in_field_1(data)[: size + 4], "FILE")
    packed = gzip.compress(data)
    with pytest.raises(InputError, match="is truncated: its gzip data ends early"):
        read.read_bytes(packed[: len(packed) // 2], "FILE")
    with pytest.raises(InputError, match="gzip data cannot be unpacked"):
        read.read_bytes(packed[:200] + bytes(8) + packed[208:], "FILE")


def test_symbolic_shapes_and_cut_bytecode(program: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"cannot translate to HLO: .*with concrete shapes"):
        read.read_bytes(program["symbolic"], "FILE", isolated=False)
    with pytest.raises(InputError, match="StableHLO"):
        read.read_bytes(program["bytecode"][:1000], "FILE")


def _edit(program: dict[str, Any], edit: Any) -> bytes:
    message = proto.parse_module(program["proto"])
    entry = next(c for c in message.computations if c.id == message.entry_computation_id)
    edit(message, entry)
    return proto.serialize(message)


EDITS: dict[str, tuple[Any, str]] = {
    "no entry": (lambda m, e: setattr(m, "entry_computation_id", 10**6), "its entry computation .* is not among"),
    "operand": (lambda m, e: e.instructions[-1].operand_ids.append(12345), "operand id 12345, which does not exist"),
    "order": (lambda m, e: e.instructions[1].operand_ids.append(e.root_id), "which comes only after it"),
    "control": (lambda m, e: e.instructions[-1].control_predecessor_ids.append(7), "control predecessor id 7"),
    "call": (lambda m, e: e.instructions[-1].called_computation_ids.append(-5), "calls computation id -5"),
    "root": (lambda m, e: setattr(e, "root_id", 3), "root id 3 of computation"),
    "twice": (
        lambda m, e: setattr(e.instructions[1], "id", e.instructions[0].id),
        "two instructions of .* have the id",
    ),
    "computation twice": (lambda m, e: setattr(m.computations[0], "id", e.id), "two computations have the id"),
    "schedule": (lambda m, e: sequence(m).append(4242), "names instruction id 4242"),
    "schedule twice": (lambda m, e: sequence(m).append(sequence(m)[0]), "twice"),
    "schedule short": (lambda m, e: sequence(m).pop(), "leaves out 1 of"),
    "schedule order": (lambda m, e: sequence(m).insert(0, sequence(m).pop()), "before what it depends on"),
    "schedule key": (lambda m, e: setattr(m.schedule.sequences[0], "key", 31337), "computation id 31337"),
    "alias": (lambda m, e: m.input_output_alias.entries[0].output_shape_index.append(9), "names output index"),
    "donor": (lambda m, e: setattr(m.buffer_donor.entries.add(), "parameter_number", 99), "names parameter 99"),
    "no name": (lambda m, e: setattr(e.instructions[0], "name", ""), "has no name"),
}


def sequence(message: Any) -> Any:
    entry = message.entry_computation_id
    return next(s.value.instruction_ids for s in message.schedule.sequences if s.key == entry)


@pytest.mark.parametrize("name", EDITS)
def test_broken_protos(program: dict[str, Any], name: str) -> None:
    edit, match = EDITS[name]
    with pytest.raises(InputError, match=f"is a broken module proto: .*{match}"):
        read.read_bytes(_edit(program, edit), "FILE")


def test_what_ends_xla_does_not_end_us(program: dict[str, Any]) -> None:
    """Each of these fails a CHECK in XLA's reader, which aborts the process it runs in."""

    def to_partition_id(m: Any, e: Any) -> None:
        constants = [i for c in m.computations for i in c.instructions if i.opcode == "constant"]
        constants[0].opcode = "partition-id"

    def unknown_opcode(m: Any, e: Any) -> None:
        e.instructions[-1].opcode = "from-the-future"

    with pytest.raises(InputError, match=r"module proto that breaks XLA's parser: .*partition-id must have a shape"):
        read.read_bytes(_edit(program, to_partition_id), "FILE")
    with pytest.raises(InputError, match=r"does not accept: .*from-the-future.*upgrade jaxlib"):
        read.read_bytes(_edit(program, unknown_opcode), "FILE")
    text = b"HloModule m\nENTRY e {\n  ROOT p = s32[] partition-id()\n}\n"
    with pytest.raises(InputError, match=r"HLO text that breaks XLA's parser: .*partition-id must have a shape"):
        read.read_bytes(text, "FILE")


_FUZZ = """
import random, sys
from hlo_memopt.hlo import read
from hlo_memopt.hlo.errors import InputError
data = sys.stdin.buffer.read()
bad = 0
for seed in range(24):
    r, b = random.Random(seed), bytearray(data)
    for _ in range(r.choice([1, 1, 3])):
        i, kind = r.randrange(len(b)), r.randrange(4)
        if kind == 0: b[i] ^= 1 << r.randrange(8)
        elif kind == 1: b[i] = r.randrange(256)
        elif kind == 2: del b[i : i + r.randrange(1, 20)]
        else: b[i:i] = b[: r.randrange(1, 40)]
    try:
        read.read_bytes(bytes(b), "F")
    except InputError:
        bad += 1
print(bad)
"""


@pytest.mark.parametrize("form", ["proto", "after"])
def test_flipped_and_lost_bytes(program: dict[str, Any], form: str) -> None:
    data = program[form] if form == "proto" else program[form].encode()
    done = subprocess.run([sys.executable, "-c", _FUZZ], input=data, capture_output=True, timeout=100)
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    assert int(done.stdout) > 8


def test_the_corpus_reads() -> None:
    files = sorted(CORPUS.glob("*mlp*.gz")) + sorted(CORPUS.glob("tpu_gpt2_scan*.gz"))
    if not files:
        pytest.skip("no ../shared/corpus here")
    for file in files:
        got = read.read_input(file)
        assert got.scheduled and got.kind == read.MODULE_PROTO
        assert got.module == gzip.decompress(file.read_bytes())


def test_one_line() -> None:
    assert one_line("a\n b\tc\x00" + "d" * 20, 12) == "a b c\\x00..."
