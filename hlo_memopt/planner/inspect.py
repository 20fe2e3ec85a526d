"""Where a scheduled module's memory goes: the peak of its heap, what is alive there, who made it. All predicted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from hlo_memopt.hlo.graph import Instruction, Module
from hlo_memopt.liveness.dataflow import Buffer, Dataflow
from hlo_memopt.liveness.ranges import flatten
from hlo_memopt.pack.assignment import Assignment, Event, simulate
from hlo_memopt.platforms import platform as platform_named

_NO_ORIGIN = frozenset({"parameter", "constant", "tuple"})  # a parameter's op_name is an argument's name
_MLIR_TEXT = "-"  # MLIR's name for a text that it parsed from memory
_MAX_HOPS = 8  # how far to look for the origin of an instruction that XLA added


@dataclasses.dataclass(frozen=True)
class Origin:
    """What the user wrote: JAX's op_name and ``file:line``; empty where XLA kept neither.

    ``near``: XLA added the instruction; this is the nearest one that it computes from (or for) that has an origin.
    """

    op_name: str = ""
    source: str = ""
    near: bool = False


@dataclasses.dataclass(frozen=True)
class Peak:
    """Where the live sum is largest. ``step`` of ``steps`` counts from 1, callees in front of their callers.

    ``calls``: the instructions inside which ``computation`` runs, outermost first.
    """

    step: int
    steps: int
    instruction: str
    opcode: str
    shape: str
    computation: str
    calls: tuple[str, ...]
    origin: Origin


@dataclasses.dataclass(frozen=True)
class LiveBuffer:
    """A buffer of the heap that is alive at the peak. ``first`` to ``last``: steps, from 1, during which it lives.

    ``index``: shape index of the value in its instruction; ``sharing``: further values that lie in it at the peak.
    """

    bytes: int
    offset: int
    instruction: str
    opcode: str
    index: tuple[int, ...]
    shape: str
    computation: str
    first: int
    last: int
    sharing: int
    origin: Origin

    @property
    def steps(self) -> int:
        """For how many steps it lives."""
        return self.last - self.first + 1


@dataclasses.dataclass(frozen=True)
class Share:
    """Bytes alive at the peak that come from one place of the user's program."""

    name: str
    bytes: int
    buffers: int


@dataclasses.dataclass(frozen=True)
class Inspection:
    """Predicted sizes in bytes of a module under its own schedule.

    Attributes:
      temp: the figure XLA calls temp_size_in_bytes: ``heap`` and ``tables`` (of tuples).
      live_peak: largest sum of live buffers in the heap; ``fragmentation``: what the heap needs beyond it.
      parameters, outputs, constants: not in temp; ``aliased``: outputs that lie in donated parameters.
      in_idle: temporaries that XLA puts into allocations of parameters and results while those are idle.
      peak: None if the heap is empty.
      live: every buffer of the heap at the peak, largest first; they add up to ``live_peak``.
      by_scope, by_source: the same by scope of op_name and by source line, largest first.
    """

    module: str
    platform: str
    instructions: int
    computations: int
    temp: int
    heap: int
    tables: int
    live_peak: int
    parameters: int
    outputs: int
    aliased: int
    constants: int
    in_idle: int
    peak: Peak | None
    live: tuple[LiveBuffer, ...]
    by_scope: tuple[Share, ...]
    by_source: tuple[Share, ...]

    @property
    def fragmentation(self) -> int:
        """Bytes of the heap that no buffer uses at the peak."""
        return self.heap - self.live_peak

    def to_json(self, top: int | None = None) -> dict[str, Any]:
        """Plain data; ``top``: how many entries of each list."""
        peak = dataclasses.asdict(self.peak) if self.peak is not None else None
        return {
            "temp_bytes": self.temp,
            "heap_bytes": self.heap,
            "tuple_table_bytes": self.tables,
            "live_peak_bytes": self.live_peak,
            "fragmentation_bytes": self.fragmentation,
            "parameter_bytes": self.parameters,
            "output_bytes": self.outputs,
            "aliased_bytes": self.aliased,
            "constant_bytes": self.constants,
            "in_idle_allocations_bytes": self.in_idle,
            "computations": self.computations,
            "peak": peak,
            "live": [dataclasses.asdict(b) for b in self.live[:top]],
            "by_scope": [dataclasses.asdict(s) for s in self.by_scope[:top]],
            "by_source": [dataclasses.asdict(s) for s in self.by_source[:top]],
        }


def inspect_module(data: bytes, platform: str = "cpu", text_name: str = "-") -> Inspection:
    """Look at a scheduled module (serialized HloModuleProto); ValueError if it has no schedule or cannot be read.

    ``text_name``: what to call the StableHLO text that the module was compiled from; its lines are the sources where it
    had no locations of its own.
    """
    target = platform_named(platform)
    module = Module.from_bytes(data)
    if not module.is_scheduled:
        raise ValueError(f"module {module.name!r} has no schedule")
    dataflow = Dataflow(module, target)
    assignment = simulate(dataflow, module.schedule)
    peak, live = _at_peak(dataflow, assignment, _Origins(module, text_name))
    kinds: dict[str, int] = {}
    for buffer in dataflow.buffers:
        kind = assignment.kind[buffer.id]
        kinds[kind] = kinds.get(kind, 0) + buffer.bytes
    parameters, outputs, aliased = _arguments(dataflow)
    return Inspection(
        module=module.name,
        platform=target.name,
        instructions=module.instruction_count,
        computations=len(module.schedule),
        temp=assignment.temp,
        heap=assignment.heap,
        tables=assignment.tables,
        live_peak=assignment.live_peak,
        parameters=parameters,
        outputs=outputs,
        aliased=aliased,
        constants=kinds.get("constant", 0),
        in_idle=kinds.get("in-allocation", 0),
        peak=peak,
        live=live,
        by_scope=_shares(live, lambda b: scope_of(b.origin.op_name)),
        by_source=_shares(live, lambda b: b.origin.source),
    )


def scope_of(op_name: str) -> str:
    """The part of an op_name that says where in the program: without the outer jit and the operation itself."""
    parts = op_name.split("/")
    if len(parts) > 1 and parts[0].startswith(("jit(", "pjit(")):
        parts = parts[1:]
    return "/".join(parts[:-1]) or "(top level)" if op_name else ""


def _shares(live: tuple[LiveBuffer, ...], name_of: Callable[[LiveBuffer], str]) -> tuple[Share, ...]:
    sums: dict[str, list[int]] = {}
    for buffer in live:
        entry = sums.setdefault(name_of(buffer) or "(unknown)", [0, 0])
        entry[0] += buffer.bytes
        entry[1] += 1
    found = [Share(name, size, count) for name, (size, count) in sums.items()]
    return tuple(sorted(found, key=lambda s: (-s.bytes, s.name)))


def _arguments(dataflow: Dataflow) -> tuple[int, int, int]:
    """Bytes of the entry's parameters, of its results, and of results that lie in parameters."""
    module = dataflow.module
    trees = [dataflow.trees[p.id] for p in module.entry.parameters]
    parameters = sum(v.bytes for tree in trees for v in tree.values())
    root = dataflow.trees[module.entry.root_id]
    outputs = sum(v.bytes for v in root.values())
    aliased = sum(root[a.output_index].bytes for a in module.aliases)
    return parameters, outputs, aliased


# -- the peak -----------------------------------------------------------------------------------------------


def _at_peak(
    dataflow: Dataflow, assignment: Assignment, origins: _Origins
) -> tuple[Peak | None, tuple[LiveBuffer, ...]]:
    if not assignment.live_peak:
        return None, ()
    chunks = _chunks_at_peak(dataflow, assignment)
    sequence, _ = flatten(dataflow, dataflow.module.schedule)
    steps = len(sequence)
    step = min(assignment.peak_step, steps - 1)
    live = [_live_buffer(dataflow, assignment, events, size, steps, origins) for events, size in chunks]
    live.sort(key=lambda b: (-b.bytes, b.first, b.instruction))
    at = sequence[step]
    peak = Peak(
        step + 1,
        steps,
        at.name,
        at.opcode,
        str(at.shape),
        at.computation.name,
        _calls(dataflow, at.computation.id),
        origins.of(at),
    )
    return peak, tuple(live)


def _chunks_at_peak(dataflow: Dataflow, assignment: Assignment) -> list[tuple[list[Event], int]]:
    """(events alive, bytes) of each piece of the heap in use when the live sum is largest for the first time."""
    size: dict[int, int] = {}
    changes: list[tuple[int, int, Event]] = []
    for event in assignment.events:
        size[event.chunk] = max(size.get(event.chunk, 0), dataflow.buffer_of[event.value.id].bytes)
        changes += [(event.start, 1, event), (event.end, -1, event)]
    changes.sort(key=lambda c: c[0])
    alive: dict[int, int] = {}
    total, most, when = 0, -1, 0
    for clock, change, event in changes:
        count = alive[event.chunk] = alive.get(event.chunk, 0) + change
        if change > 0 and count == 1:
            total += size[event.chunk]
        elif change < 0 and not count:
            total -= size[event.chunk]
        if total > most:
            most, when = total, clock
    by_chunk: dict[int, list[Event]] = {}
    for event in assignment.events:
        if event.start <= when < event.end:
            by_chunk.setdefault(event.chunk, []).append(event)
    return [(events, size[chunk]) for chunk, events in by_chunk.items()]


def _live_buffer(
    dataflow: Dataflow, assignment: Assignment, events: list[Event], size: int, steps: int, origins: _Origins
) -> LiveBuffer:
    value = max(events, key=lambda e: (e.value.bytes, -e.start)).value
    buffer: Buffer = dataflow.buffer_of[value.id]
    ranges = assignment.ranges
    starts = [ranges.start[v.id] for v in buffer.values]
    first = min(s for s in starts if s is not None)
    last = max(ranges.end[v.id] for v in buffer.values)
    instruction = value.instruction
    return LiveBuffer(
        size,
        assignment.offsets[value.id],
        instruction.name,
        instruction.opcode,
        value.index,
        str(value.shape),
        instruction.computation.name,
        first + 1,
        min(last, steps - 1) + 1,
        len(events) - 1,
        origins.of(instruction),
    )


def _calls(dataflow: Dataflow, computation_id: int) -> tuple[str, ...]:
    out: list[str] = []
    while computation_id in dataflow.call_site:
        site = dataflow.call_site[computation_id]
        out.append(site.name)
        computation_id = site.computation.id
    return tuple(reversed(out))


class _Origins:
    """op_name and source line of an instruction, of what it fuses, or of the nearest neighbour that has them."""

    def __init__(self, module: Module, text_name: str) -> None:
        self._module = module
        self._text_name = text_name

    def of(self, instruction: Instruction) -> Origin:
        own = self._own(instruction)
        if own is not None:
            return own
        computation = instruction.computation
        return (
            self._nearest(instruction, computation.operands_of)
            or self._nearest(instruction, lambda i: computation.users[i.id])
            or Origin()
        )

    def _nearest(
        self, instruction: Instruction, neighbours: Callable[[Instruction], list[Instruction]]
    ) -> Origin | None:
        seen, front = {instruction.id}, [instruction]
        for _ in range(_MAX_HOPS):
            reached: list[Instruction] = []
            for other in (n for i in front for n in neighbours(i)):
                if other.id in seen or other.opcode in _NO_ORIGIN:
                    continue
                seen.add(other.id)
                found = self._own(other)
                if found is not None:
                    return dataclasses.replace(found, near=True)
                reached.append(other)
            front = reached
        return None

    def _own(self, instruction: Instruction) -> Origin | None:
        for candidate in (instruction, *self._inside(instruction)):
            line = self._module.source_line(candidate)
            if candidate.op_name or line:
                file = self._text_name if line and line.file == _MLIR_TEXT else line and line.file
                return Origin(candidate.op_name, f"{file}:{line.line}" if line else "")
        return None

    def _inside(self, instruction: Instruction) -> list[Instruction]:
        """Instructions of the computation that a fusion runs, its root first."""
        if instruction.opcode != "fusion" or not instruction.called:
            return []
        fused = self._module.computations[instruction.called[0]]
        return [fused.root, *(i for i in reversed(fused.instructions) if i.opcode not in _NO_ORIGIN)]
