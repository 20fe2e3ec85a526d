"""Allocations that some order leaves idle for a while, and which temporaries may lie in them.

XLA puts a temporary into the allocation of a result or of a donated parameter while that is idle: from the
parameter's last reader to the writer of the result. Where a temporary q is made by such a reader and read by that
writer (XLA's copy of the parameter), q is alive whenever the place is idle: q is the place's companion.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from hlo_memopt.liveness.dataflow import Dataflow, Value
from hlo_memopt.liveness.ranges import flattened_callees
from hlo_memopt.liveness.sharing import can_share
from hlo_memopt.pack.assignment import allocation_order
from hlo_memopt.planner.problems import ComputationProblem, ProblemBuilder
from hlo_memopt.schedule.problem import Problem

_NEVER = -1  # the writer of an allocation that is not written again


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
        nodes = (builder.node(computation.id, v.instruction, node_of) for v in buffer.values if v not in given)
        writers = [w for w in nodes if w is not None]
        if not buffer.bytes or not (given or writers):
            continue
        readers = set().union(*(builder.touching(computation.id, v, node_of) for v in given))
        readers -= {node_of[v.instruction.id] for v in given}
        writer = min(writers, default=_NEVER)
        if given and writer in readers:
            continue  # read until it is overwritten: never idle
        companion = -1
        for j in (j for r in sorted(readers) for j in made_by.get(r, ())):
            b = item.problem.buffers[j]
            follows = writer in b.consumers and b.size <= buffer.bytes
            if follows and (companion < 0 or b.size > item.problem.buffers[companion].size):
                companion = j
        takes = any(_may_take_over(dataflow, item, given, i) for r in readers for i in item.clusters[r])
        found.append(Place(frozenset(readers), writer, buffer.bytes, companion, takes, rank(buffer), buffer.id))
    return found


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
