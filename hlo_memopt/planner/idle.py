"""Allocations that some order leaves idle for a while, and which temporaries may lie in them.

XLA puts a temporary into the allocation of a result or of a donated parameter while that is idle: from the
parameter's last reader to the writer of the result, and in between if what lies there is written more than once.
Where a temporary q is made by such a reader and read by that writer (XLA's copy of the parameter), q is alive whenever
the place is idle: q is the place's companion.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from hlo_memopt.liveness.dataflow import Buffer, Dataflow, Value
from hlo_memopt.liveness.ranges import flattened_callees
from hlo_memopt.liveness.sharing import can_share
from hlo_memopt.pack.assignment import allocation_order
from hlo_memopt.planner.problems import ComputationProblem, ProblemBuilder
from hlo_memopt.schedule.problem import Problem

_NEVER = -1  # no writer: what is there from the start, and what is not written again


@dataclass(frozen=True)
class Place:
    """An allocation that may hold a temporary: after ``readers`` have run and before ``writer`` has (nodes).

    Attributes:
      bytes: its size.
      companion: buffer of the problem that is alive whenever the place is idle; -1: none.
      overwritten: whether a reader may have its result where the parameter lies: written over it, or, in a
        computation that the reader calls, after its last use.
    """

    readers: frozenset[int]
    writer: int
    bytes: int
    companion: int
    overwritten: bool
    rank: tuple[int, bool, int]
    buffer: int


def idle_places(
    dataflow: Dataflow, builder: ProblemBuilder, item: ComputationProblem, kind: dict[int, str]
) -> list[Place]:
    """Allocations of results and donated parameters that some order of this computation leaves idle for a while.

    In the entry: before a result is written, after a donated parameter was last read. In a loop or a branch: between
    the last reader of the value that came in and the writer of the one that goes out. ``kind``: of each buffer, see
    `pack.assignment.Assignment`.
    """
    computation = item.computation
    is_entry = computation.id == dataflow.module.entry.id
    aliased = {(a.parameter, a.parameter_index) for a in dataflow.module.aliases}
    node_of = {i: v for v, cluster in enumerate(item.clusters) for i in cluster}
    made_by: dict[int, list[int]] = {}
    for j, b in enumerate(item.problem.buffers):
        made_by.setdefault(b.producer, []).append(j)
    found: list[Place] = []
    rank = allocation_order(dataflow)
    for buffer in dataflow.buffers:
        if kind[buffer.id] not in ("parameter", "live-out") or any(v.shape.is_tuple for v in buffer.values):
            continue
        given = [
            v for v in buffer.values if v.instruction.opcode == "parameter" and v.instruction.computation is computation
        ]
        if is_entry and not all((v.instruction.parameter_number, v.index) in aliased for v in given):
            continue
        timeline = _timeline(builder, item, buffer, given, node_of)
        if not buffer.bytes or not timeline:
            continue
        before: _Stage | None = None
        for stage in timeline:
            gap = _gap(dataflow, item, buffer, before, stage.writer, made_by)
            if gap is not None:
                found.append(Place(*gap, rank(buffer), buffer.id))
            before = stage
        if before is not None and not before.to_the_end:
            gap = _gap(dataflow, item, buffer, before, _NEVER, made_by)
            if gap is not None:
                found.append(Place(*gap, rank(buffer), buffer.id))
    return found


@dataclass
class _Stage:
    """Values of one buffer that one node writes (`_NEVER`: there from the start), and the nodes that touch them."""

    writer: int
    values: list[Value]
    touching: set[int]
    to_the_end: bool


def _timeline(
    builder: ProblemBuilder, item: ComputationProblem, buffer: Buffer, given: list[Value], node_of: dict[int, int]
) -> list[_Stage]:
    """What lies in a buffer, in turn. Whoever touches one stage runs before the writer of the next."""
    stages: dict[int, _Stage] = {}
    computation = item.computation
    for value in buffer.values:
        if value in given:
            writer = _NEVER
        else:
            node = builder.node(computation.id, value.instruction, node_of)
            if node is None:
                continue
            writer = node
        stage = stages.setdefault(writer, _Stage(writer, [], set(), False))
        stage.values.append(value)
        stage.touching |= builder.touching(computation.id, value, node_of)
        stage.to_the_end |= any(w.is_root and w.computation is computation for w, _ in value.positions)
    if _NEVER in stages:
        stages[_NEVER].touching -= {node_of[v.instruction.id] for v in given}
    return [stages[w] for w in sorted(stages)]  # node numbers follow the given order


def _gap(
    dataflow: Dataflow,
    item: ComputationProblem,
    buffer: Buffer,
    before: _Stage | None,
    writer: int,
    made_by: dict[int, list[int]],
) -> tuple[frozenset[int], int, int, int, bool] | None:
    """(readers, writer, bytes, companion, overwritten) of the time between two stages; None if there is none."""
    readers: set[int] = set()
    if before is None:
        if writer == _NEVER:
            return None
    else:
        readers = before.touching | ({before.writer} if before.writer >= 0 else set())
        if writer in readers:
            return None  # read until it is overwritten
    companion = -1
    for j in (j for r in sorted(readers) for j in made_by.get(r, ())):
        b = item.problem.buffers[j]
        follows = writer in b.consumers and b.size <= buffer.bytes
        if follows and (companion < 0 or b.size > item.problem.buffers[companion].size):
            companion = j
    values = [] if before is None else before.values
    overwritten = any(_may_take_over(dataflow, item, values, i) for r in readers for i in item.clusters[r])
    return frozenset(readers), writer, buffer.bytes, companion, overwritten


def _may_take_over(dataflow: Dataflow, item: ComputationProblem, given: list[Value], instruction_id: int) -> bool:
    """Whether an instruction may write a result over one of the values that came in."""
    user = item.computation.by_id[instruction_id]
    if user.opcode == "copy":
        return False
    if flattened_callees(user):
        return True
    for operand in user.operands:
        for index, value in dataflow.trees[operand].items():
            if value in given and any(
                can_share(item.computation.by_id[operand], index, user, at) for at, _ in user.shape.leaves()
            ):
                return True
    return False


class Fits:
    """Which buffers of a problem may lie in which places, whatever the order. Sets of places are ints, a bit each.

    Attributes:
      before: by node, the places that have a reader among its strict descendants.
      after: by node, the places whose writer is a strict ancestor.
      of_buffer: by buffer, the places in which some order may put it.
    """

    def __init__(self, problem: Problem, places: list[Place]) -> None:
        n = problem.n
        self.places = places
        reads, writes = [0] * n, [0] * n
        with_writer = 0
        for i, place in enumerate(places):
            for r in place.readers:
                reads[r] |= 1 << i
            if place.writer >= 0:
                writes[place.writer] |= 1 << i
                with_writer |= 1 << i
        self.before, self.after = [0] * n, [0] * n
        for v in range(n):  # the given order 0, 1, 2, ... is topological
            for p in problem.preds[v]:
                self.after[v] |= self.after[p] | writes[p]
        for v in reversed(range(n)):
            for s in problem.succs[v]:
                self.before[v] |= self.before[s] | reads[s]
        by_size = sorted(range(len(places)), key=lambda i: places[i].bytes)
        sizes = [places[i].bytes for i in by_size]
        room = [0] * (len(places) + 1)  # room[k]: the places from the k-th smallest on
        for k in reversed(range(len(places))):
            room[k] = room[k + 1] | 1 << by_size[k]
        kept = sum(1 << i for i, place in enumerate(places) if not place.overwritten)
        with_reader = sum(1 << i for i, place in enumerate(places) if place.readers)
        self.of_buffer: list[int] = []
        for b in problem.buffers:
            fits = room[bisect_left(sizes, b.size)]
            if b.producer >= 0:
                # made before, or while, the parameter is read (unless that reader may write over it)
                fits &= ~self.before[b.producer] & ~(reads[b.producer] & kept)
            else:
                fits &= ~with_reader
            for c in b.consumers:
                fits &= ~self.after[c]
            if b.live_out:
                fits &= ~with_writer
            self.of_buffer.append(fits)

    def idle_at(self, v: int) -> int:
        """Places that some order leaves idle while node ``v`` runs (before it has written, after it has read)."""
        return ~(self.before[v] | self.after[v]) & ((1 << len(self.places)) - 1)
