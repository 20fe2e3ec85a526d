"""How many independent instructions an order leaves side by side on the CPU, as predicted. See bench/README.md.

    python -m bench.parallelism --corpus FOLDER [--effort E] [--out T.md]
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench import worker
from hlo_memopt.hlo.graph import Instruction, Module
from hlo_memopt.liveness.dataflow import Dataflow, Value
from hlo_memopt.liveness.ranges import Schedule, flattened_callees
from hlo_memopt.options import Options
from hlo_memopt.pack.assignment import Assignment, simulate
from hlo_memopt.planner import plan_module
from hlo_memopt.platforms import platform as platform_named

# no code is emitted for these
FREE = frozenset({"after-all", "bitcast", "constant", "get-tuple-element", "opt-barrier", "parameter", "tuple"})


class Range(NamedTuple):
    """Bytes [low, high) of an allocation."""

    allocation: str
    low: int
    high: int


class Step(NamedTuple):
    """What an instruction touches, and its work: ``size``, bytes read and written; ``number`` of instructions run."""

    reads: list[Range]
    writes: list[Range]
    size: int
    number: int


class Width(NamedTuple):
    """Work over critical path: how much runs side by side on average with threads enough.

    ``by_size``: the work of an instruction is what it reads and writes; ``by_number``: all are alike.
    """

    by_size: float
    by_number: float


def critical_path(steps: Sequence[Step], work: Sequence[int]) -> int:
    """The most work on a path of steps of which each waits for the one before.

    A step waits for an earlier one if one of them writes bytes that the other touches.
    """
    borders: dict[str, set[int]] = {}
    for step in steps:
        for r in (*step.reads, *step.writes):
            borders.setdefault(r.allocation, set()).update((r.low, r.high))
    points = {a: np.array(sorted(p)) for a, p in borders.items()}
    # by stretch of an allocation: when its last write is done, and all that touched it
    written = {a: np.zeros(len(p), dtype=np.int64) for a, p in points.items()}
    touched = {a: np.zeros(len(p), dtype=np.int64) for a, p in points.items()}
    longest = 0
    for step, own in zip(steps, work, strict=True):
        reads, writes = (
            [(r.allocation, slice(*np.searchsorted(points[r.allocation], (r.low, r.high)))) for r in ranges]
            for ranges in (step.reads, step.writes)
        )
        seen = [written[a][s] for a, s in reads] + [touched[a][s] for a, s in writes]
        done = own + max((int(np.max(x)) for x in seen if x.size), default=0)
        for a, s in reads + writes:
            np.maximum(touched[a][s], done, out=touched[a][s])
        for a, s in writes:
            written[a][s] = done
        longest = max(longest, done)
    return longest


def width(steps: Sequence[Step]) -> Width:
    """1 if all steps wait for each other, or if there are none."""

    def mean(work: list[int]) -> float:
        return sum(work) / max(critical_path(steps, work), 1) if sum(work) else 1.0

    return Width(mean([s.size for s in steps]), mean([s.number for s in steps]))


def entry_steps(dataflow: Dataflow, schedule: Schedule, place: Callable[[Value], Range]) -> list[Step]:
    """The entry computation's instructions in order; one that calls computations does all that these do."""
    module = dataflow.module

    def touched(instruction: Instruction) -> tuple[list[Value], list[Value]]:
        reads = {v.id: v for o in instruction.operands for v in dataflow.trees[o].values()}
        made = [v for v in dataflow.trees[instruction.id].values() if v.instruction is instruction]
        return _arrays(reads.values()), _arrays(made)

    def step(instruction: Instruction) -> Step:
        reads, writes = touched(instruction)
        size = sum(v.bytes for v in reads) + sum(v.bytes for v in writes)
        outer = Step([place(v) for v in reads], [place(v) for v in writes], size, 1)
        callees = [c for c in flattened_callees(instruction) if c in schedule]
        if not callees:
            return outer
        called = [inside(c) for c in callees]
        times = _trips(instruction) if instruction.opcode == "while" else 1
        most = max if instruction.opcode == "conditional" else sum
        return Step(
            [r for s in (outer, *called) for r in s.reads],
            [r for s in (outer, *called) for r in s.writes],
            times * most(s.size for s in called),
            times * most(s.number for s in called),
        )

    def inside(computation_id: int) -> Step:
        steps = in_order(computation_id)
        return Step(
            [r for s in steps for r in s.reads],
            [r for s in steps for r in s.writes],
            sum(s.size for s in steps),
            sum(s.number for s in steps),
        )

    def in_order(computation_id: int) -> list[Step]:
        by_id = module.computations[computation_id].by_id
        return [step(by_id[i]) for i in schedule[computation_id] if by_id[i].opcode not in FREE]

    return in_order(module.entry.id)


def _arrays(values: Iterable[Value]) -> list[Value]:
    return [v for v in values if v.bytes and not v.shape.is_tuple]


def _trips(loop: Instruction) -> int:
    """How often a loop runs, 1 if XLA does not say."""
    config = loop.backend_config
    try:
        return int(json.loads(config)["known_trip_count"]["n"])
    except (ValueError, KeyError, TypeError):
        return 1


def assigned(dataflow: Dataflow, assignment: Assignment) -> Callable[[Value], Range]:
    """Where each value lies by the simulated assignment."""

    def place(value: Value) -> Range:
        buffer = dataflow.buffer_of[value.id]
        if assignment.kind[buffer.id] == "heap":
            offset = assignment.offsets[value.id]
            return Range("heap", offset, offset + value.bytes)
        return Range(str(assignment.lies_in.get(buffer.id, buffer.id)), 0, value.bytes)

    return place


def unshared(dataflow: Dataflow) -> Callable[[Value], Range]:
    """Each buffer in memory of its own: only what the program itself demands is left to wait for."""
    return lambda value: Range(str(dataflow.buffer_of[value.id].id), 0, value.bytes)


def measure(data: bytes, effort: str) -> tuple[int, Width, Width, Width]:
    """Instructions that run; widths: of the module, of ours, and of the module if no two buffers share bytes."""

    def steps(module: Module, share: bool) -> list[Step]:
        dataflow = Dataflow(module, platform_named("cpu"))
        place = assigned(dataflow, simulate(dataflow, module.schedule)) if share else unshared(dataflow)
        return entry_steps(dataflow, module.schedule, place)

    plan = plan_module(data, "cpu", Options(effort=effort))  # type: ignore[arg-type]
    plain, ours = Module.from_bytes(data), Module.from_bytes(plan.apply(data))
    shared = steps(plain, True)
    return len(shared), width(shared), width(steps(ours, True)), width(steps(plain, False))


def main() -> None:
    """The CPU modules of a corpus, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", required=True, help="folder with cpu_name.hlo.pb.gz files")
    parser.add_argument("--effort", default="default", choices=("fast", "default", "max"))
    parser.add_argument("--out")
    options = parser.parse_args()
    by_size: list[list[str]] = []
    by_number: list[list[str]] = []
    for path in sorted(Path(options.corpus).glob("cpu_*.hlo.pb.gz")):
        worker.progress(path.name)
        count, plain, ours, free = measure(gzip.decompress(path.read_bytes()), options.effort)
        name = path.name.split(".")[0].removeprefix("cpu_")
        for rows, k in ((by_size, 0), (by_number, 1)):
            widths = [f"{w[k]:.2f}" for w in (plain, ours)]
            rows.append([name, f"{count:,}", *widths, f"{ours[k] / plain[k]:.2f}", f"{free[k]:.2f}"])
    head = ["module", "instructions", "width plain", "width ours", "ours / plain", "no sharing"]
    tables = ["Work in bytes read and written", worker.markdown(head, by_size)]
    tables += ["Every instruction alike", worker.markdown(head, by_number)]
    worker.write("\n\n".join(tables), Path(options.out) if options.out else None)


if __name__ == "__main__":
    main()
