"""XLA's buffer assignment for a given schedule, simulated: what temp will be, and where each value lies.

Follows ``BufferAssigner`` and ``HeapSimulator::RunComputation``: parameters, constants and results get allocations
of their own, which temporaries may use while they are idle; every other value goes to one heap.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hlo_memopt.hlo.graph import Instruction
from hlo_memopt.liveness.dataflow import Buffer, Dataflow, Value
from hlo_memopt.liveness.ranges import LiveRanges, Schedule, live_ranges, normalize_buffers
from hlo_memopt.liveness.sharing import can_share
from hlo_memopt.pack.xla_heap import Chunk, place


@dataclass
class Event:
    """One live period of a value in the heap, in event times."""

    value: Value
    start: int
    end: int
    chunk: int


@dataclass
class Assignment:
    """Bytes. ``temp`` = ``heap`` + ``tables``; ``live_peak`` is the heap without fragmentation.

    Attributes:
      temp: the figure XLA reports as temp_size_in_bytes.
      heap: size of the heap of temporaries.
      tables: tuple tables that are temporaries.
      live_peak: largest sum of live bytes in the heap, reached at step ``peak_step``.
      live_by_step: bytes alive in the heap at each step.
      offsets: value id -> offset in the heap.
      events: the live periods behind it.
      kind: buffer id -> "parameter", "constant", "live-out", "thread-local", "tuple", "no-table" (a tuple that XLA
        drops), "heap", or "in-allocation" for a temporary that lies in the allocation of an idle parameter or result.
      lies_in: buffer id -> id of the buffer in whose allocation it lies, where that is another one's.
    """

    temp: int
    heap: int
    tables: int
    live_peak: int
    peak_step: int
    live_by_step: list[int]
    offsets: dict[int, int]
    events: list[Event]
    kind: dict[int, str]
    lies_in: dict[int, int]
    ranges: LiveRanges = field(repr=False)


def simulate(dataflow: Dataflow, schedule: Schedule) -> Assignment:
    """What XLA's buffer assignment does with ``schedule`` (computation id -> instruction ids)."""
    ranges = live_ranges(dataflow, schedule)
    normalize_buffers(dataflow, ranges)
    kind, lies_in = _classify(dataflow, ranges)
    tables = table_bytes(dataflow, kind)
    events, live_by_step, chunks = _run_heap(dataflow, ranges, kind)
    heap, offset_of = place(chunks, dataflow.platform.alignment)
    offsets = {e.value.id: offset_of.get(e.chunk, 0) for e in events}
    live_peak = max(live_by_step, default=0)
    step = live_by_step.index(live_peak) if live_by_step else 0
    return Assignment(
        heap + tables, heap, tables, live_peak, step, live_by_step, offsets, events, kind, lies_in, ranges
    )


def table_bytes(dataflow: Dataflow, kind: dict[int, str]) -> int:
    """Bytes of the tuple tables that XLA puts beside the heap into one allocation, each aligned."""
    alignment = dataflow.platform.alignment
    return sum(-(-b.bytes // alignment) * alignment for b in dataflow.buffers if kind[b.id] == "tuple")


# -- which buffers go to the heap ----------------------------------------------------------------------------


def _classify(dataflow: Dataflow, ranges: LiveRanges) -> tuple[dict[int, str], dict[int, int]]:
    entry = dataflow.module.entry
    live_out = {dataflow.buffer_of[v.id].id for v in dataflow.trees[entry.root_id].values()}
    buffers = sorted(dataflow.buffers, key=allocation_order(dataflow))
    aliased = {(a.parameter, a.parameter_index) for a in dataflow.module.aliases}
    kind: dict[int, str] = {}
    lies_in: dict[int, int] = {}
    reusable: list[_Allocation] = []
    by_buffer: dict[int, _Allocation] = {}
    for buffer in buffers:
        fixed = _fixed_kind(buffer, entry.id, ranges)
        if fixed is not None:
            kind[buffer.id] = fixed
            if fixed == "parameter":
                donated = any(
                    v.instruction.opcode == "parameter"
                    and v.instruction.computation.id == entry.id
                    and (v.instruction.parameter_number, v.index) in aliased
                    for v in buffer.values
                )
                if donated:
                    allocation = _Allocation(buffer, ranges)
                    by_buffer[buffer.id] = allocation
                    reusable.append(allocation)
            elif fixed == "tuple" and buffer.id in live_out:
                kind[buffer.id] = "live-out"
            continue
        out = buffer.id in live_out
        target = _reuse(dataflow, buffer, out, reusable, by_buffer, ranges)
        if target is not None:
            target.add(buffer)
            by_buffer[buffer.id] = target
            lies_in[buffer.id] = target.owner
            kind[buffer.id] = "live-out" if out else "in-allocation"
        elif out:
            kind[buffer.id] = "live-out"
            allocation = by_buffer[buffer.id] = _Allocation(buffer, ranges)
            reusable.append(allocation)
        else:
            kind[buffer.id] = "heap"
    return kind, lies_in


def allocation_order(dataflow: Dataflow) -> Callable[[Buffer], tuple[int, bool, int]]:
    """Sort key: XLA assigns buffers from large to small, results first among equals, then as instructions are listed.

    A temporary goes to the last allocation in this order that is large enough and idle.
    """
    live_out = {dataflow.buffer_of[v.id].id for v in dataflow.trees[dataflow.module.entry.root_id].values()}
    place = {
        instruction.id: n
        for n, instruction in enumerate(
            i for c in dataflow.visited for i in dataflow.module.computations[c].instructions
        )
    }
    return lambda b: (-b.bytes, b.id not in live_out, min(place[v.instruction.id] for v in b.values))


def _fixed_kind(buffer: Buffer, entry: int, ranges: LiveRanges) -> str | None:
    for value in buffer.values:
        if value.instruction.opcode == "constant":
            return "constant"
        if value.instruction.opcode == "parameter" and value.instruction.computation.id == entry:
            return "parameter"
    if any(ranges.start[v.id] is None for v in buffer.values):
        return "thread-local"
    if any(v.shape.is_tuple for v in buffer.values):
        return "no-table" if _only_barriers(buffer) else "tuple"
    return None


def _only_barriers(buffer: Buffer) -> bool:
    """Whether a tuple only goes through optimization barriers, which XLA drops with it after our hook."""
    passing = [where for v in buffer.values for where, _ in v.positions]
    barriers = [w for w in passing if w.opcode == "opt-barrier"]
    return bool(barriers) and all(
        w.opcode in ("tuple", "opt-barrier")
        and not w.is_root
        and all(u.opcode in ("opt-barrier", "get-tuple-element") for u in w.computation.users[w.id])
        for w in passing
    )


class _Allocation:
    """An allocation of a result or a donated parameter, in which temporaries may lie while it is idle."""

    def __init__(self, buffer: Buffer, ranges: LiveRanges) -> None:
        self.owner = buffer.id
        self.bytes = buffer.bytes
        self.ranges = ranges
        self.busy: list[tuple[int, int, Value]] = []
        self.add(buffer)

    def add(self, buffer: Buffer) -> None:
        for value in buffer.values:
            start = self.ranges.start[value.id]
            assert start is not None
            self.busy.append((start, self.ranges.end[value.id], value))
        self.busy.sort(key=lambda b: b[:2])
        ends = [0]
        for _, end, _ in self.busy:
            ends.append(max(ends[-1], end))
        self.idle = [(a, b) for a, (b, _, _) in zip(ends, self.busy, strict=False) if b > a]
        if ends[-1] < self.ranges.steps:
            self.idle.append((ends[-1], self.ranges.steps))
        self.longest = max((b - a for a, b in self.idle), default=-1)


def _reuse(
    dataflow: Dataflow,
    buffer: Buffer,
    live_out: bool,
    allocations: list[_Allocation],
    by_buffer: dict[int, _Allocation],
    ranges: LiveRanges,
) -> _Allocation | None:
    """The allocation that XLA would put ``buffer`` into: an operand's, else the smallest that is idle."""
    spans = [(ranges.start[v.id], ranges.end[v.id], v) for v in buffer.values]
    longest = max(end - start for start, end, _ in spans)  # type: ignore[operator]

    def fits(allocation: _Allocation) -> bool:
        if longest > allocation.longest:
            return False
        if allocation.bytes < buffer.bytes or (live_out and allocation.bytes != buffer.bytes):
            return False
        for start, end, _ in spans:
            if not any(a <= start and end <= b for a, b in allocation.idle):  # type: ignore[operator]
                return False
        return not any(
            _interferes(dataflow, ranges, value, other) for _, _, value in spans for _, _, other in allocation.busy
        )

    if not allocations:
        return None
    for value in buffer.values:
        if not value.index:
            for operand in value.instruction.operands:
                seen = dataflow.trees[operand].get(())
                allocation = by_buffer.get(dataflow.buffer_of[seen.id].id) if seen is not None else None
                if allocation is not None and fits(allocation):
                    return allocation
    start, end, _ = spans[0]
    for allocation in reversed(allocations):
        if longest <= allocation.longest:
            for a, b in allocation.idle:
                if a <= start and end <= b:  # type: ignore[operator]
                    if fits(allocation):
                        return allocation
                    break
    return None


def _interferes(dataflow: Dataflow, ranges: LiveRanges, new: Value, old: Value) -> bool:
    a_start, a_end = ranges.start[new.id], ranges.end[new.id]
    b_start, b_end = ranges.start[old.id], ranges.end[old.id]
    assert a_start is not None and b_start is not None
    if a_start <= b_end and b_start <= a_end:
        if a_end == b_start:
            if not _takes_over(dataflow, ranges, new, old):
                return True
        elif b_end == a_start:
            if not _takes_over(dataflow, ranges, old, new):
                return True
        else:
            return True
    if new.instruction.opcode == "copy":
        operand = new.instruction.operands[0]
        return any(where.id == operand for where, _ in old.positions)
    return False


def _takes_over(dataflow: Dataflow, ranges: LiveRanges, operand: Value, user: Value) -> bool:
    """Whether ``user`` may be written over ``operand``, which dies there (BufferAssigner::LiveRangeInterferes)."""
    seen = operand.positions if dataflow.platform.takes_over_anywhere else [ranges.end_position[operand.id]]
    return user.instruction.opcode != "copy" and any(
        where.id in user.instruction.operands
        and where.computation is user.instruction.computation
        and can_share(where, index, user.instruction, user.index)
        for where, index in seen
    )


# -- the heap ------------------------------------------------------------------------------------------------


def _run_heap(
    dataflow: Dataflow, ranges: LiveRanges, kind: dict[int, str]
) -> tuple[list[Event], list[int], list[Chunk]]:
    values = [v for v in dataflow.values if kind[dataflow.buffer_of[v.id].id] == "heap"]
    values.sort(key=lambda v: (ranges.start[v.id], ranges.end[v.id], v.id))
    defined: dict[int, list[Value]] = {}
    freed: dict[int, list[Value]] = {}
    for value in values:
        start = ranges.start[value.id]
        assert start is not None
        defined.setdefault(start, []).append(value)
        freed.setdefault(ranges.end[value.id], []).append(value)
    in_heap = {v.id for v in values}
    clock = 0
    events: dict[int, Event] = {}
    order: list[Event] = []
    chunk_of_buffer: dict[int, int] = {}
    live: dict[int, int] = {}  # chunk -> live values in it
    bytes_of: list[int] = []
    total = 0
    by_step: list[int] = []
    for step in range(ranges.steps + 1):
        highest = total
        for value in defined.get(step, ()):
            buffer = dataflow.buffer_of[value.id]
            chunk = chunk_of_buffer.get(buffer.id)
            if chunk is None and len(buffer.values) == 1:
                operand = _dying_operand(dataflow, ranges, value, step, freed, in_heap)
                if operand is not None:
                    chunk = events[operand.id].chunk
                    events[operand.id].end = clock
                    clock += 1
                    freed[step].remove(operand)
                    live[chunk] -= 1
                    if not live[chunk]:
                        total -= bytes_of[chunk]
            if chunk is None:
                chunk = len(bytes_of)
                bytes_of.append(buffer.bytes)
                live[chunk] = 0
                chunk_of_buffer[buffer.id] = chunk
            bytes_of[chunk] = max(bytes_of[chunk], buffer.bytes)
            event = Event(value, clock, -1, chunk)
            clock += 1
            events[value.id] = event
            order.append(event)
            if not live[chunk]:
                total += bytes_of[chunk]
            live[chunk] += 1
            highest = max(highest, total)
        by_step.append(highest)
        for value in freed.get(step, ()):
            event = events[value.id]
            event.end = clock
            clock += 1
            live[event.chunk] -= 1
            if not live[event.chunk]:
                total -= bytes_of[event.chunk]
    intervals: dict[int, list[tuple[int, int]]] = {}
    first: dict[int, int] = {}
    for event in order:
        intervals.setdefault(event.chunk, []).append((event.start, event.end))
        first.setdefault(event.chunk, event.value.id)
    chunks = [Chunk(first[c], bytes_of[c], tuple(spans)) for c, spans in intervals.items()]
    for event in order:
        event.chunk = first[event.chunk]
    return order, by_step, chunks


def _dying_operand(
    dataflow: Dataflow, ranges: LiveRanges, value: Value, step: int, freed: dict[int, list[Value]], in_heap: set[int]
) -> Value | None:
    """The operand whose bytes ``value`` takes over: alone in its buffer, in the heap, dead after this step."""
    user: Instruction = value.instruction
    if user.opcode == "copy":
        return None
    for operand in user.operands:
        seen = dataflow.trees[operand].get(())
        if seen is None or seen.id not in in_heap or len(dataflow.buffer_of[seen.id].values) > 1:
            continue
        if ranges.end[seen.id] != step or seen not in freed.get(step, ()):
            continue
        source = seen.instruction
        direct = source.computation is user.computation and source.id in user.operands
        if direct and can_share(source, seen.index, user, value.index):
            return seen
    return None
