"""A small typed view of a module: computations, instructions, shapes, aliasing, schedule.

Plain data read once from the proto; nothing here changes the proto. Ids are XLA's own (unique in a module).
Computations build their instructions on first use, so that the bodies of fusions cost nothing until asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from hlo_memopt.hlo import proto

ShapeIndex = tuple[int, ...]

# xla_data.proto PrimitiveType -> (name, bits)
PRIMITIVE_BITS: dict[int, tuple[str, int]] = {
    0: ("invalid", 0),
    1: ("pred", 8),
    2: ("s8", 8),
    3: ("s16", 16),
    4: ("s32", 32),
    5: ("s64", 64),
    6: ("u8", 8),
    7: ("u16", 16),
    8: ("u32", 32),
    9: ("u64", 64),
    10: ("f16", 16),
    11: ("f32", 32),
    12: ("f64", 64),
    15: ("c64", 64),
    16: ("bf16", 16),
    18: ("c128", 128),
    19: ("f8e5m2", 8),
    20: ("f8e4m3fn", 8),
    21: ("s4", 4),
    22: ("u4", 4),
    23: ("f8e4m3b11fnuz", 8),
    24: ("f8e5m2fnuz", 8),
    25: ("f8e4m3fnuz", 8),
    26: ("s2", 2),
    27: ("u2", 2),
    28: ("f8e4m3", 8),
    29: ("f8e3m4", 8),
    30: ("s1", 1),
    31: ("u1", 1),
    32: ("f4e2m1fn", 4),
    33: ("f8e8m0fnu", 8),
}
TUPLE, OPAQUE, TOKEN, BUFFER = 13, 14, 17, 34


@dataclass(frozen=True, slots=True)
class Layout:
    minor_to_major: tuple[int, ...] = ()
    tiles: tuple[tuple[int, ...], ...] = ()
    element_bits: int = 0
    memory_space: int = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """An array (``dims``, ``layout``) or, when ``tuple_shapes`` is not None, a tuple."""

    element_type: int
    dims: tuple[int, ...] = ()
    layout: Layout | None = None
    tuple_shapes: tuple[Shape, ...] | None = None
    dynamic: bool = False

    @property
    def is_tuple(self) -> bool:
        return self.tuple_shapes is not None

    def at(self, index: ShapeIndex) -> Shape:
        shape = self
        for i in index:
            assert shape.tuple_shapes is not None, "shape index into an array"
            shape = shape.tuple_shapes[i]
        return shape

    def leaves(self, index: ShapeIndex = ()) -> list[tuple[ShapeIndex, Shape]]:
        """Every non-tuple subshape with its index, in order."""
        if self.tuple_shapes is None:
            return [(index, self)]
        return [leaf for i, s in enumerate(self.tuple_shapes) for leaf in s.leaves((*index, i))]

    def subshapes(self, index: ShapeIndex = ()) -> list[tuple[ShapeIndex, Shape]]:
        """Every subshape with its index, the tuples themselves included, outermost first."""
        out = [(index, self)]
        for i, s in enumerate(self.tuple_shapes or ()):
            out += s.subshapes((*index, i))
        return out

    def __str__(self) -> str:
        if self.tuple_shapes is not None:
            return "(" + ", ".join(map(str, self.tuple_shapes)) + ")"
        name = PRIMITIVE_BITS.get(self.element_type, (f"type{self.element_type}", 0))[0]
        name = {OPAQUE: "opaque", TOKEN: "token"}.get(self.element_type, name)
        return f"{name}[{','.join(map(str, self.dims))}]"


class InPlacePair(NamedTuple):
    """Output ``output_index`` of an instruction lies in operand ``operand`` at ``operand_index``."""

    output_index: ShapeIndex
    operand: int
    operand_index: ShapeIndex


class SourceLine(NamedTuple):
    file: str
    line: int


class Alias(NamedTuple):
    """Entry ``output_index`` of the result lies in parameter ``parameter`` at ``parameter_index``."""

    output_index: ShapeIndex
    parameter: int
    parameter_index: ShapeIndex
    must: bool


class Instruction:
    """One HLO instruction. ``operands`` and ``control_predecessors`` are instruction ids."""

    __slots__ = ("_proto", "called", "computation", "control_predecessors", "id", "name", "opcode", "operands", "shape")

    def __init__(self, message: Any, computation: Computation, shape: Shape) -> None:
        self._proto = message
        self.computation = computation
        self.id: int = message.id
        self.name: str = message.name
        self.opcode: str = message.opcode
        self.shape = shape
        self.operands: tuple[int, ...] = tuple(message.operand_ids)
        self.control_predecessors: tuple[int, ...] = tuple(message.control_predecessor_ids)
        self.called: tuple[int, ...] = tuple(message.called_computation_ids)

    parameter_number = property(lambda self: self._proto.parameter_number)
    tuple_index = property(lambda self: self._proto.tuple_index)
    fusion_kind = property(lambda self: self._proto.fusion_kind)
    custom_call_target = property(lambda self: self._proto.custom_call_target)
    channel_id = property(lambda self: self._proto.channel_id)
    is_host_transfer = property(lambda self: self._proto.is_host_transfer)
    has_side_effect = property(lambda self: self._proto.custom_call_has_side_effect)
    backend_config = property(lambda self: self._proto.backend_config)
    dimensions = property(lambda self: tuple(self._proto.dimensions))
    op_name = property(lambda self: self._proto.metadata.op_name)

    @property
    def output_operand_aliasing(self) -> list[InPlacePair]:
        return [
            InPlacePair(tuple(a.output_shape_index), a.operand_index, tuple(a.operand_shape_index))
            for a in self._proto.output_operand_aliasing
        ]

    @property
    def is_root(self) -> bool:
        return self.id == self.computation.root_id

    def __repr__(self) -> str:
        return f"<{self.name} = {self.shape} {self.opcode}>"


class Computation:
    """A computation; ``instructions`` in the order of the proto, which is topological."""

    def __init__(self, message: Any, module: Module) -> None:
        self._proto = message
        self.module = module
        self.id: int = message.id
        self.name: str = message.name
        self.root_id: int = message.root_id
        self.is_fusion: bool = message.is_fusion_computation
        self.execution_thread: str = message.execution_thread

    @cached_property
    def instructions(self) -> list[Instruction]:
        read = self.module._shapes.read
        return [Instruction(m, self, read(m.shape)) for m in self._proto.instructions]

    @cached_property
    def by_id(self) -> dict[int, Instruction]:
        return {i.id: i for i in self.instructions}

    @cached_property
    def parameters(self) -> list[Instruction]:
        found = [i for i in self.instructions if i.opcode == "parameter"]
        return sorted(found, key=lambda i: i.parameter_number)

    @cached_property
    def users(self) -> dict[int, list[Instruction]]:
        """Instruction id -> its distinct users, in order of the proto."""
        out: dict[int, list[Instruction]] = {i.id: [] for i in self.instructions}
        for i in self.instructions:
            for o in dict.fromkeys(i.operands):
                out[o].append(i)
        return out

    @property
    def root(self) -> Instruction:
        return self.by_id[self.root_id]

    def operands_of(self, instruction: Instruction) -> list[Instruction]:
        return [self.by_id[o] for o in instruction.operands]


class _ShapeReader:
    """ShapeProto -> Shape; equal shapes become one object (a module repeats a few hundred of them)."""

    def __init__(self) -> None:
        self._seen: dict[bytes, Shape] = {}

    def read(self, message: Any) -> Shape:
        key = message.SerializeToString()
        shape = self._seen.get(key)
        if shape is None:
            shape = self._seen[key] = self._build(message)
        return shape

    def _build(self, m: Any) -> Shape:
        if m.element_type == TUPLE:
            return Shape(TUPLE, tuple_shapes=tuple(self.read(t) for t in m.tuple_shapes))
        layout = None
        if m.HasField("layout"):
            x = m.layout
            tiles = tuple(tuple(t.dimensions) for t in x.tiles)
            layout = Layout(tuple(x.minor_to_major), tiles, x.element_size_in_bits, x.memory_space)
        return Shape(m.element_type, tuple(m.dimensions), layout, None, any(m.is_dynamic_dimension))


@dataclass
class Module:
    """A module as read. ``schedule``: computation id -> instruction ids; empty if not scheduled."""

    message: Any
    name: str = field(init=False)
    computations: dict[int, Computation] = field(init=False)
    entry: Computation = field(init=False)
    schedule: dict[int, list[int]] = field(init=False)
    aliases: list[Alias] = field(init=False)

    def __post_init__(self) -> None:
        m = self.message
        self._shapes = _ShapeReader()
        self.name = m.name
        self.computations = {c.id: Computation(c, self) for c in m.computations}
        entry = self.computations.get(m.entry_computation_id)
        if entry is None:
            entry = next((c for c in self.computations.values() if c.name == m.entry_computation_name), None)
        if entry is None:
            raise ValueError(f"module {m.name!r} has no entry computation")
        self.entry = entry
        self.schedule = {s.key: list(s.value.instruction_ids) for s in m.schedule.sequences}
        self.aliases = [
            Alias(tuple(e.output_shape_index), e.parameter_number, tuple(e.parameter_shape_index), e.kind == 2)
            for e in m.input_output_alias.entries
            if e.kind != 0
        ]

    @classmethod
    def from_bytes(cls, data: bytes) -> Module:
        """From a serialized HloModuleProto."""
        return cls(proto.parse_module(data))

    @property
    def is_scheduled(self) -> bool:
        return self.entry.id in self.schedule

    @property
    def donors(self) -> list[tuple[int, ShapeIndex]]:
        """Donated parameters that no output is assigned to: (parameter, index)."""
        return [(e.parameter_number, tuple(e.parameter_shape_index)) for e in self.message.buffer_donor.entries]

    @property
    def instruction_count(self) -> int:
        """Instructions outside fusions and scalar helpers: those of the scheduled computations."""
        if self.schedule:
            return sum(len(s) for s in self.schedule.values())
        return sum(len(c._proto.instructions) for c in self.computations.values() if not c.is_fusion)

    def source_line(self, instruction: Instruction) -> SourceLine | None:
        """Where the user wrote it: the metadata's own file and line, else its innermost stack frame."""
        meta = instruction._proto.metadata
        if meta.source_file:
            return SourceLine(meta.source_file, meta.source_line)
        index = self.message.stack_frame_index
        if not 0 < meta.stack_frame_id <= len(index.stack_frames):
            return None
        location = index.stack_frames[meta.stack_frame_id - 1].file_location_id
        if not 0 < location <= len(index.file_locations):
            return None
        where = index.file_locations[location - 1]
        if not 0 < where.file_name_id <= len(index.file_names):
            return None
        return SourceLine(index.file_names[where.file_name_id - 1], where.line)
