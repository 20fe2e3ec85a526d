"""Live ranges on the flattened schedule, as XLA's HloLiveRange computes them.

The schedules of called computations stand in front of their caller (condition before body), so that one axis of
steps serves the whole module. A range is [start, end], both included.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from hlo_memopt.hlo.graph import Computation, Instruction, ShapeIndex
from hlo_memopt.liveness.dataflow import Dataflow, Value

Schedule = dict[int, list[int]]  # computation id -> instruction ids in order

_FORWARD_TUPLE_TOP = frozenset({"get-tuple-element", "copy"})


@dataclass
class LiveRanges:
    """``start``, ``end`` by value id (None where XLA does not track it); ``end_position``: where it is last seen.

    ``time``: instruction id -> step; ``span``: computation id -> (first step, step behind the last).
    """

    start: list[int | None]
    end: list[int]
    end_position: list[tuple[Instruction, ShapeIndex]]
    time: dict[int, int]
    span: dict[int, tuple[int, int]]
    steps: int


def readers(dataflow: Dataflow, where: Instruction, index: ShapeIndex) -> list[Instruction]:
    """Users of ``where`` that may read the value at ``index`` of it; the others only pass it on."""
    known: dict[int, tuple[list[Instruction], list[Instruction]]] = dataflow.cache.setdefault("readers", {})
    found = known.get(where.id)
    if found is None:
        top = [u for u in where.computation.users[where.id] if u.opcode != "tuple"]
        found = known[where.id] = (top, [u for u in top if u.opcode not in _FORWARD_TUPLE_TOP])
    return found[bool(index)]


def flatten(dataflow: Dataflow, schedule: Schedule) -> tuple[list[Instruction], dict[int, tuple[int, int]]]:
    """The whole module's instructions in one sequence, and the span of each computation in it."""
    module = dataflow.module
    sequence: list[Instruction] = []
    span: dict[int, tuple[int, int]] = {}

    def visit(computation: Computation) -> None:
        start = len(sequence)
        by_id = computation.by_id
        for instruction_id in schedule[computation.id]:
            instruction = by_id[instruction_id]
            called = flattened_callees(instruction)
            for callee in called:
                if callee in schedule and callee not in span:
                    visit(module.computations[callee])
            sequence.append(instruction)
        span[computation.id] = (start, len(sequence))

    visit(module.entry)
    return sequence, span


def flattened_callees(instruction: Instruction) -> tuple[int, ...]:
    """Callees whose buffers are counted at this instruction, in the order in which XLA flattens them."""
    op = instruction.opcode
    if op == "while":
        body, condition = instruction.called
        return (condition, body)
    if op in ("call", "conditional", "async-start"):
        return instruction.called
    return ()


def live_ranges(dataflow: Dataflow, schedule: Schedule) -> LiveRanges:
    """Ranges of every value under ``schedule`` (before values of one buffer are made disjoint)."""
    module = dataflow.module
    sequence, span = flatten(dataflow, schedule)
    time = {instruction.id: t for t, instruction in enumerate(sequence)}
    steps = len(sequence)
    in_async = _async_windows(dataflow, time, span)
    aliased = {(a.parameter, a.parameter_index) for a in module.aliases}
    entry = module.entry.id
    start: list[int | None] = []
    ends: list[int] = []
    end_positions: list[tuple[Instruction, ShapeIndex]] = []
    for value, touched in zip(dataflow.values, _touched(dataflow, span), strict=True):
        instruction = value.instruction
        home = instruction.computation.id
        if home not in span:
            start.append(None)
            ends.append(-1)
            end_positions.append(value.positions[0])
            continue
        first = span[home][0] if instruction.opcode == "parameter" else time[instruction.id]
        end, at = -1, 0
        for n, where, is_root in touched.seen:
            t = span[where][1] if is_root else time[where]
            if t > end:
                end, at = t, n
        if home in in_async:
            window = in_async[home]
            first, end = min(first, window[0]), max(end, window[1])
        if (
            instruction.opcode == "parameter"
            and home == entry
            and (instruction.parameter_number, value.index) not in aliased
        ):
            end = steps
        else:
            for user in touched.used:
                end = max(end, time[user])
        start.append(first)
        ends.append(end)
        end_positions.append(value.positions[at])
    return LiveRanges(start, ends, end_positions, time, span, steps)


class _Touched(NamedTuple):
    """Where a value's range may end. ``seen``: (number of the position, instruction or, for a root, computation,
    whether it is a root); ``used``: instructions."""

    seen: list[tuple[int, int, bool]]
    used: list[int]


def _touched(dataflow: Dataflow, span: dict[int, tuple[int, int]]) -> list[_Touched]:
    """By value. The same for every schedule of the module, so it is made once."""
    known: list[_Touched] | None = dataflow.cache.get("touched")
    if known is None:
        known = dataflow.cache["touched"] = [_touch(dataflow, v, span) for v in dataflow.values]
    return known


def _touch(dataflow: Dataflow, value: Value, span: dict[int, tuple[int, int]]) -> _Touched:
    seen: list[tuple[int, int, bool]] = []
    used: dict[int, None] = {}
    for n, (where, index) in enumerate(value.positions):
        home = where.computation.id
        if home in span:
            seen.append((n, home, True) if where.is_root else (n, where.id, False))
        for user in readers(dataflow, where, index):
            if user.opcode == "call" and user.called[0] in span:
                continue
            if user.opcode == "while" and user.called[0] in span:
                user = dataflow.module.computations[user.called[0]].parameters[0]
            if user.computation.id in span:
                used[user.id] = None
    return _Touched(seen, list(used))


def _async_windows(
    dataflow: Dataflow, time: dict[int, int], span: dict[int, tuple[int, int]]
) -> dict[int, tuple[int, int]]:
    """Computations that run inside an async pair -> the steps during which their buffers must stand."""
    windows: dict[int, tuple[int, int]] = {}
    for computation_id in dataflow.visited:
        site = dataflow.call_site.get(computation_id)
        if site is None or computation_id not in span:
            continue
        if site.opcode == "async-start":
            begin, finish = span[site.computation.id][0], span[computation_id][1]
            chain = site
            while True:
                users = [u for u in chain.computation.users[chain.id] if u.opcode in ("async-update", "async-done")]
                if not users:
                    break
                chain = users[0]
            finish = max(finish, time.get(chain.id, finish))
            windows[computation_id] = (begin, finish)
        elif site.computation.id in windows:
            windows[computation_id] = windows[site.computation.id]
    return windows


def normalize_buffers(dataflow: Dataflow, ranges: LiveRanges) -> None:
    """Make the ranges of values that lie in one buffer disjoint (HloLiveRange::NormalizeAliasedBuffers)."""
    for buffer in dataflow.buffers:
        tracked = [v for v in buffer.values if ranges.start[v.id] is not None]
        if len(tracked) < 2:
            continue
        tracked.sort(key=lambda v: (ranges.start[v.id], ranges.end[v.id], v.id))
        for a, b in pairwise(tracked):
            b_start = ranges.start[b.id]
            assert b_start is not None
            ranges.end[b.id] = max(ranges.end[a.id], ranges.end[b.id])
            ranges.end[a.id] = min(ranges.end[a.id], b_start)
