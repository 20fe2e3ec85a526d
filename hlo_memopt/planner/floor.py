"""A floor for temp under every order: minimum cuts on a problem in which nothing is counted that XLA might save.

Beside the heap XLA has places that cost no temp: the allocations of results and of donated parameters while they
are idle, one temporary at a time in each. The floor grants that saving wherever it could be had:

 - An allocation of a donated parameter is idle from the parameter's last reader to the writer of the result. Where a
   temporary q is made by such a reader and read by the writer (XLA's copy of the parameter), q is alive whenever
   the allocation is idle: the saving is taken off q's bytes, exactly where the cut pays for q.
 - Any other allocation that may be idle while v runs lowers v's bound by the largest temporary that fits it.

Inside called computations operands may die early: what a call brings up is counted without them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Set
from dataclasses import dataclass

import numpy as np

from hlo_memopt.hlo.graph import Instruction
from hlo_memopt.liveness.dataflow import Buffer, Dataflow, Value
from hlo_memopt.liveness.inplace import in_place_pairs
from hlo_memopt.liveness.ranges import Schedule, flattened_callees
from hlo_memopt.pack.assignment import table_bytes
from hlo_memopt.planner.problems import ComputationProblem, ProblemBuilder
from hlo_memopt.schedule.cuts import CutFinder
from hlo_memopt.schedule.flat import Flat
from hlo_memopt.schedule.problem import Buffer as ProblemBuffer

_SIZES = 6  # sizes of idle allocations that are tried as thresholds
_RETRIES = 4
_NEAR = 8  # nodes before and behind a binding one that are looked at
_NEVER = -1  # the writer of an allocation that is not written again


@dataclass(frozen=True)
class _Idle:
    """An allocation that may hold a temporary: after ``readers`` have run and before ``writer`` has."""

    readers: frozenset[int]
    writer: int
    saving: int  # the largest temporary that fits
    second: int  # the second largest; its companion cannot lie in it
    holds: int  # its own bytes


def lower_bound(
    dataflow: Dataflow, schedule: Schedule, kind: dict[int, str], cuts: int, binding: Set[int] = frozenset()
) -> int:
    """Bytes that the temp of no order falls below.

    Args:
      schedule: a good order; the cuts look where its peak is.
      kind: of each buffer, see `pack.assignment.Assignment`.
      cuts: how many minimum cuts a computation may cost, about.
      binding: instructions whose cuts are likely to bind.
    """
    builder = ProblemBuilder(dataflow, schedule, lambda b: kind[b.id] in ("heap", "in-allocation"))
    floors: dict[int, int] = {}
    for computation_id in builder.computations():
        item = builder.build(computation_id, {})
        idle = _idle_allocations(dataflow, builder, item, kind)
        floors[computation_id] = _floor_of(dataflow, item, idle, floors, cuts, binding, builder)
    return floors[dataflow.module.entry.id] + table_bytes(dataflow, kind)


def _floor_of(
    dataflow: Dataflow,
    item: ComputationProblem,
    idle: list[_Idle],
    floors: dict[int, int],
    cuts: int,
    binding: Set[int],
    builder: ProblemBuilder,
) -> int:
    problem = item.problem
    nested = [max((floors.get(c, 0) for c in _callees(item, cluster)), default=0) for cluster in item.clusters]
    if not problem.buffers:
        return max(nested, default=0)
    flat = Flat.of(problem)
    calls = {v: max(0, n - _may_die_inside(dataflow, item, builder, v)) for v, n in enumerate(nested) if n}
    wanted = [v for v, cluster in enumerate(item.clusters) if not binding.isdisjoint(cluster)]
    companions = []
    for place in idle:
        q = _always_alive(problem.buffers, flat.size, place)
        if q is not None and flat.size[q] == place.saving:
            place = dataclasses.replace(place, saving=place.second)
        companions.append((place, q))
    best = 0
    for smallest in _thresholds(idle):
        size = np.where(flat.size > smallest, flat.size, 0)
        rest: list[_Idle] = []
        uncounted: list[int] = []
        for place, q in companions:
            if q is not None and flat.size[q] <= smallest:
                uncounted.append(q)
            if place.saving <= smallest:
                if q is None:
                    rest.append(dataclasses.replace(place, saving=0))
                continue  # it holds only temporaries that are not counted
            if q is None or size[q] < place.saving:
                rest.append(place)
            else:
                size[q] -= place.saving
        counted = dataclasses.replace(flat, size=size)
        own = counted.own_bytes()
        for v, inside in calls.items():
            own[v] = max(int(own[v]), inside if not smallest else 0)
        held = [(int(flat.size[q]), problem.buffers[q]) for q in dict.fromkeys(uncounted)]
        bound, node = _best_cut(counted, own, rest, held, wanted, cuts if not smallest else _RETRIES)
        if bound > best:
            best = bound
            wanted = [node, *(v for v in wanted if v != node)]
    return best


def _thresholds(idle: list[_Idle]) -> list[int]:
    """Count temporaries above so many bytes: above 0, and above the largest few sizes that idle allocations can hold.

    Each gives a true floor: what is not counted needs no saving.
    """
    return [0, *sorted({place.saving for place in idle}, reverse=True)[:_SIZES]]


def _best_cut(
    flat: Flat, own: np.ndarray, idle: list[_Idle], held: list[tuple[int, ProblemBuffer]], wanted: list[int], cuts: int
) -> tuple[int, int]:
    """The largest bound over the wanted nodes, their neighbours, and the nodes at the peaks of the given order.

    ``held``: uncounted temporaries that companion an idle allocation. Of those that are alive while v runs, one of
    the largest one's size or more is in the heap: it may lie in an idle allocation only while that one's own companion
    is alive, and that companion may lie in another's, but the first of them lies in none.
    """
    profile = flat.profile(np.arange(flat.n))
    near = [w for v in wanted for w in range(max(0, v - _NEAR), min(flat.n, v + _NEAR + 1))]
    near.sort(key=lambda v: -profile[v])
    highest = np.argsort(-profile, kind="stable")[: 4 * cuts].tolist()
    largest = max((size for size, _ in held), default=0)
    if not flat.size.any() and not held:
        return int(own.max(initial=0)), -1
    finder = CutFinder(flat, own)
    bound, binding, spent = 0, -1, 0
    for v in dict.fromkeys([*wanted, *near[:cuts], *highest]):
        if spent >= 2 * cuts or profile[v] + largest <= bound:
            continue
        extra = 0
        if idle or held:
            before, after = _reach(flat.edge_to, flat.edge_from, v), _reach(flat.edge_from, flat.edge_to, v)
            possible = [p for p in idle if p.writer not in before and not p.readers & after]
            alive = (s for s, b in held if b.producer in before - {v} and not after.isdisjoint(b.consumers))
            if not any(p.holds >= largest for p in possible):
                extra = max(alive, default=0)
            extra -= sum(p.saving for p in possible)
        if profile[v] + extra > bound:
            spent += 1
            found = finder.cut(v).bound + extra
            if found > bound:
                bound, binding = found, v
    return bound, binding


def _reach(tails: np.ndarray, heads: np.ndarray, start: int) -> set[int]:
    """Nodes that can be reached from ``start`` (itself included) along tail -> head."""
    order = np.argsort(tails, kind="stable")
    tails, heads = tails[order], heads[order]
    seen, stack = {start}, [start]
    while stack:
        v = stack.pop()
        lo, hi = np.searchsorted(tails, [v, v + 1])
        for w in heads[lo:hi].tolist():
            if w not in seen:
                seen.add(w)
                stack.append(w)
    return seen


def _callees(item: ComputationProblem, cluster: list[int]) -> list[int]:
    by_id = item.computation.by_id
    return [c for i in cluster for c in flattened_callees(by_id[i])]


def _idle_allocations(
    dataflow: Dataflow, builder: ProblemBuilder, item: ComputationProblem, kind: dict[int, str]
) -> list[_Idle]:
    """Allocations of results and donated parameters that some order of this computation leaves idle for a while.

    In the entry: before a result is written, after a donated parameter was last read. In a loop or a branch: between
    the last reader of the value that came in and the writer of the one that goes out.
    """
    computation = item.computation
    is_entry = computation.id == dataflow.module.entry.id
    aliased = {(a.parameter, a.parameter_index) for a in dataflow.module.aliases}
    temporaries = np.sort([b.bytes for b in dataflow.buffers if kind[b.id] in ("heap", "in-allocation")])
    node_of = {i: v for v, cluster in enumerate(item.clusters) for i in cluster}
    found: list[_Idle] = []
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
        fitting = int(np.searchsorted(temporaries, buffer.bytes, side="right"))
        if not fitting or not (given or writers):
            continue
        readers = set().union(*(builder.touching(computation.id, v, node_of) for v in given))
        readers -= {node_of[v.instruction.id] for v in given}
        writer = min(writers, default=_NEVER)
        if given and writer in readers:
            continue  # read until it is overwritten: never idle
        second = int(temporaries[fitting - 2]) if fitting > 1 else 0
        found.append(_Idle(frozenset(readers), writer, int(temporaries[fitting - 1]), second, buffer.bytes))
    return found


def _always_alive(buffers, size: np.ndarray, place: _Idle) -> int | None:  # type: ignore[no-untyped-def]
    """A temporary that is alive whenever ``place`` is idle and still large enough to take its saving."""
    for j, b in enumerate(buffers):
        if b.producer in place.readers and place.writer in b.consumers and size[j] >= place.saving:
            return j
    return None


def _may_die_inside(dataflow: Dataflow, item: ComputationProblem, builder: ProblemBuilder, v: int) -> int:
    """Bytes of buffers that a call reads and that need not be alive at the peak inside."""
    total = 0
    for j, b in enumerate(item.problem.buffers):
        if v in b.consumers and not _held_throughout(dataflow, item, builder.owned(item.computation.id)[j], v):
            total += b.size
    return total


def _held_throughout(dataflow: Dataflow, item: ComputationProblem, buffer: Buffer, v: int) -> bool:
    """Whether some value of the buffer is alive at every step of the loop that node ``v`` runs."""
    by_id = item.computation.by_id
    loop = next((by_id[i] for i in item.clusters[v] if by_id[i].opcode == "while"), None)
    if loop is None:
        return False
    body = dataflow.module.computations[loop.called[0]]
    at_start, at_end = dataflow.trees[body.parameters[0].id], dataflow.trees[body.root_id]
    for index, value in dataflow.trees[loop.id].items():
        if dataflow.buffer_of[value.id] is buffer:
            first, last = at_start[index], at_end[index]
            if first is last or _updated_in_place(dataflow, first, last):
                return True
    return False


def _updated_in_place(dataflow: Dataflow, first: Value, last: Value) -> bool:
    """Whether ``last`` is ``first`` after in-place updates only."""
    value = last
    while value is not first:
        source: Instruction = value.instruction
        pair = next((p for p in in_place_pairs(source) if p.output_index == value.index), None)
        if pair is None or source.opcode == "parameter":
            return False
        value = dataflow.trees[source.operands[pair.operand]][pair.operand_index]
    return True
