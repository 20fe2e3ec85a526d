"""The independent checker: what it lets through, what it catches, and XLA:CPU's verdict on both."""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from check_modules import BRANCH, EFFECTS, IN_PLACE
from mutations import Edit, parse, random_order

from hlo_memopt.check import PlanCheckError, check_offsets, check_rewrite, ordering_edges
from hlo_memopt.hlo import proto

HERE = Path(__file__).resolve().parent
CORPUS = HERE.parents[1] / "shared" / "corpus"
FILES = sorted(CORPUS.glob("*.hlo.pb.gz"))


def rejected(before: bytes, after: bytes, *words: str) -> None:
    with pytest.raises(PlanCheckError) as e:
        check_rewrite(before, after)
    message = str(e.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


@pytest.mark.parametrize("name", IN_PLACE)
def test_reader_behind_writer_is_caught(name: str) -> None:
    text, reader, writer = IN_PLACE[name]
    data = parse(text)
    check_rewrite(data, data)
    bad = Edit(data).move(reader, after=writer).done()
    rejected(data, bad, f"'{reader}'", f"'{writer}'", f"'{Edit(data).home(reader).name}'")
    # the other way round: a reader of the later value must not go before its writer
    rejected(bad, data, f"'{reader}'", f"'{writer}'")
    edges = ordering_edges(data)
    wanted = (Edit(data).instruction(reader).id, Edit(data).instruction(writer).id)
    assert wanted in edges[Edit(data).home(reader).id]
    for seed in range(20):
        check_rewrite(data, random_order(data, random.Random(seed), edges))


@pytest.mark.parametrize("name", IN_PLACE)
def test_edges_and_check_agree(name: str) -> None:
    """An order is accepted exactly when it respects the exported edges."""
    data = parse(IN_PLACE[name][0])
    edges = ordering_edges(data)
    for seed in range(30):
        new = random_order(data, random.Random(seed))
        fits = True
        for s in proto.parse_module(new).schedule.sequences:
            at = {key: n for n, key in enumerate(s.value.instruction_ids)}
            fits &= all(at[x] < at[y] for x, y in edges[s.key])
        try:
            check_rewrite(data, new)
            assert fits
        except PlanCheckError:
            assert not fits


def test_pure_instructions_move_freely() -> None:
    data = parse(EFFECTS)
    check_rewrite(data, Edit(data).move("h", after="p").done())
    branch = parse(BRANCH)
    check_rewrite(branch, Edit(branch).move("r", after="x").done())


@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("b", "g"), ("g", "s"), ("s", "k")])
def test_swapped_effects_are_caught(first: str, second: str) -> None:
    data = parse(EFFECTS)
    rejected(data, Edit(data).move(first, after=second).done(), f"'{first}'", f"'{second}'", "effects")


def test_broken_sequences_are_caught() -> None:
    data = parse(EFFECTS)
    rejected(data, Edit(data).move("h", after="n").done(), "'n' stands before its operand 'h'", "'e'")
    rejected(data, Edit(data).move("n", after="v").done(), "'v' stands before its operand 'n'")
    edit = Edit(data).move("k", after="v")
    rejected(data, edit.done(), "'v' stands before its control predecessor 'k'")
    edit = Edit(data)
    ids = edit.sequence(edit.home("n").id)
    ids[:] = [k for k in ids if k != edit.instruction("n").id]
    rejected(data, edit.done(), "'n' is missing from the schedule", "'e'")
    edit = Edit(data)
    ids = edit.sequence(edit.home("n").id)
    ids.append(ids[-1])
    rejected(data, edit.done(), "'t' twice", "'e'")
    ids[-1] = 999
    rejected(data, edit.done(), "unknown instruction id 999")
    ids[:] = []
    rejected(data, edit.done(), "is missing from the schedule")
    edit = Edit(data)
    del edit.message.schedule.sequences[0]
    rejected(data, edit.done(), "has no sequence")
    edit = Edit(data)
    edit.message.schedule.sequences.add().CopyFrom(edit.message.schedule.sequences[0])
    rejected(data, edit.done(), "two sequences")
    edit = Edit(data)
    edit.message.schedule.sequences.add(key=77)
    rejected(data, edit.done(), "77", "was added to the rewritten schedule")


def changes() -> dict[str, Any]:
    """Damage outside the order: (what to do to the edit, words of the message)."""

    def lose_control(e: Edit) -> None:
        e.instruction("v").control_predecessor_ids[:] = []

    def operand(e: Edit) -> None:
        e.instruction("n").operand_ids[0] = e.instruction("p").id

    def shape(e: Edit) -> None:
        e.instruction("n").shape.dimensions[0] = 9

    def layout(e: Edit) -> None:
        e.instruction("n").shape.layout.memory_space = 1

    def unknown_field(e: Edit) -> None:  # 26 is channel_id: known; 30 (padding_config's neighbour) is not declared
        e.instruction("n").MergeFromString(b"\xf0\x01\x05")

    def called(e: Edit) -> None:
        e.instruction("a").called_computation_ids[0] = e.computation("c").id

    def no_computation(e: Edit) -> None:
        del e.message.computations[1]

    def extra_instruction(e: Edit) -> None:
        e.computation("e").instructions.add(id=12345, name="extra", opcode="iota")

    def no_instruction(e: Edit) -> None:
        del e.computation("sum").instructions[0]

    def twice(e: Edit) -> None:
        c = e.computation("sum")
        c.instructions.add().CopyFrom(c.instructions[0])

    def root(e: Edit) -> None:
        e.computation("c").root_id = e.instruction("cp").id

    def donation(e: Edit) -> None:
        e.message.input_output_alias.entries.add(kind=1, output_shape_index=[0])

    def entry(e: Edit) -> None:
        e.message.entry_computation_id = e.computation("c").id

    def listing(e: Edit) -> None:
        c = e.computation("c")
        i = type(c.instructions[0])()
        i.CopyFrom(c.instructions[0])
        del c.instructions[0]
        c.instructions.add().CopyFrom(i)

    def foreign_control(e: Edit) -> None:
        e.instruction("n").control_predecessor_ids.append(e.instruction("cp").id)

    def cycle(e: Edit) -> None:
        e.instruction("h").control_predecessor_ids.append(e.instruction("v").id)

    return {
        "control": (lose_control, "'v'", "lost its control predecessor 'k'"),
        "operand": (operand, "'n'", "operand_ids"),
        "shape": (shape, "'n'", "shape"),
        "layout": (layout, "'n'", "shape"),
        "unknown": (unknown_field, "'n'", "other fields"),
        "called": (called, "'a'", "called_computation_ids"),
        "computation": (no_computation, "'c' is missing"),
        "extra": (extra_instruction, "'extra' was added", "'e'"),
        "instruction": (no_instruction, "'x' is missing", "'sum'"),
        "twice": (twice, "'sum' lists an instruction twice"),
        "root": (root, "'c' was changed: root_id"),
        "donation": (donation, "input_output_alias"),
        "entry": (entry, "entry_computation_id"),
        "listing": (listing, "'cs' stands before its operand 'cp' in the listing"),
        "foreign control": (foreign_control, "'n'", "outside the computation"),
        "cycle": (cycle, "'h' stands before its control predecessor 'v'"),
    }


@pytest.mark.parametrize("name", changes())
def test_other_changes_are_caught(name: str) -> None:
    data = parse(EFFECTS)
    change, *words = changes()[name]
    edit = Edit(data)
    change(edit)
    rejected(data, edit.done(), *words)


def test_unknown_asynchronous_opcodes_are_refused() -> None:
    edit = Edit(parse(EFFECTS))
    edit.instruction("h").opcode = "all-to-all-start"
    data = edit.done()
    rejected(data, Edit(data).move("h", after="p").done(), "'all-to-all-start'")


def test_what_a_rewrite_may_change() -> None:
    data = parse(EFFECTS)
    edit = Edit(data).move("h", after="p")
    edit.instruction("n").control_predecessor_ids.append(edit.instruction("a").id)
    c = edit.computation("e")
    listed = {i.id: i for i in proto.parse_module(edit.done()).computations[-1].instructions}
    del c.instructions[:]
    for key in edit.sequence(c.id):
        c.instructions.add().CopyFrom(listed[key])
    check_rewrite(data, edit.done())
    with pytest.raises(PlanCheckError):
        check_rewrite(data, b"\xff\xff")


@pytest.mark.skipif(not FILES, reason="no corpus beside the repository")
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name.partition(".")[0])
def test_corpus(path: Path) -> None:
    data = gzip.decompress(path.read_bytes())
    check_rewrite(data, data)
    edges = ordering_edges(data)
    for seed in range(2):
        check_rewrite(data, random_order(data, random.Random(seed), edges))
    free = random_order(data, random.Random(0))
    if any(edges.values()) and path.name in ("cuda_vgg16.hlo.pb.gz", "cuda_unet.hlo.pb.gz"):
        rejected(data, free, "overwrites in place")


@pytest.mark.skipif(not FILES, reason="no corpus beside the repository")
def test_fast_enough() -> None:
    data = gzip.decompress((CORPUS / "cpu_resnet50.hlo.pb.gz").read_bytes())
    new = random_order(data, random.Random(0), ordering_edges(data))
    spent = []
    for _ in range(3):
        start = time.process_time()
        check_rewrite(data, new)
        spent.append(time.process_time() - start)
    assert min(spent) < 0.5  # 0.07 s on an idle machine


def run_judge(*args: str) -> dict[str, Any]:
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(HERE.parent)}
    command = [sys.executable, str(HERE / "mutations.py"), *args]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_xla_returns_wrong_numbers_for_what_is_rejected() -> None:
    result = run_judge("demo")
    assert result["accepted_right"] is True
    assert "overwrites in place" in result["rejected_wrong"]


def test_xla_agrees_with_accepted_orders() -> None:
    count = run_judge("judge", "12")
    assert count["programs"] == 12
    assert count["wrong_accepted"] == 0
    assert count["accepted"] > 60 and count["elided"] > 10
    assert count["wrong_rejected"] > 0


def test_offsets() -> None:
    good = [("a", 0, 64, 0, 3), ("b", 64, 64, 1, 2), ("c", 64, 64, 3, 5), ("d", 0, 128, 6, 6), ("e", 0, 0, 0, 9)]
    check_offsets(good, alignment=64, capacity=128)
    check_offsets([])
    for bad, words in (
        ([*good, ("f", 32, 8, 3, 3)], "share bytes while both are alive at step 3"),
        ([*good, ("f", 127, 1, 2, 2)], "'b'"),
        ([("a", 0, 64, 0, 1), ("b", 0, 64, 1, 2)], "at step 1"),
        ([("a", -64, 8, 0, 1)], "at least 0"),
        ([("a", 8, 8, 0, 1)], "multiple of 64"),
        ([("a", 128, 8, 0, 1)], "capacity"),
        ([("a", 0, 8, 2, 1)], "after its end"),
    ):
        with pytest.raises(PlanCheckError, match=words):
            check_offsets(bad, alignment=1 if "f" in bad[-1] else 64, capacity=128)


def test_offsets_against_brute_force() -> None:
    rng = random.Random(1)
    seen = set()
    for _ in range(400):
        n = rng.randint(1, 12)
        buffers = []
        for k in range(n):
            start = rng.randint(0, 20)
            buffers.append((str(k), rng.randint(0, 60), rng.randint(0, 6), start, start + rng.randint(0, 4)))
        clash = any(
            a[1] < b[1] + b[2] and b[1] < a[1] + a[2] and a[2] and b[2] and a[3] <= b[4] and b[3] <= a[4]
            for i, a in enumerate(buffers)
            for b in buffers[:i]
        )
        seen.add(clash)
        if clash:
            with pytest.raises(PlanCheckError):
                check_offsets(buffers)
        else:
            check_offsets(buffers)
    assert seen == {True, False}
