"""Donated arguments kept where XLA forgets them: XLA:CPU in jaxlib 0.10.2.

There ``UpdateHloModuleFromProto`` (xla/service/xla_transform.cc) puts the computations of a returned module into the
one being compiled and calls ``ReplaceEntryComputation``, which empties ``input_output_alias``: outputs no longer lie in
donated arguments. Nothing in the returned proto and no later pass can set it again. So

  * ``carry`` writes the module such that outputs and arguments share buffers by another rule of XLA's: the entry
    computation becomes the body of a ``while`` that runs once and whose carried tuple starts as the arguments and ends
    as the outputs that lie in them. XLA places all values of one element of that tuple in one buffer, that is, in the
    argument's allocation, and compiles every kernel knowing it;
  * ``restore`` then says in the compiled executable what XLA would have said itself: that these arguments are
    donated (in the module, by which the runtime consumes them) and that their allocations are written (in the buffer
    assignment, by which it copies arguments that may not be). No slice, kernel or thunk is touched.

Before ``restore`` such an executable would overwrite arguments of the caller's; it must never be run.

An executable that XLA:CPU has deserialized loses its machine code when it is serialized again, which would ruin the
persistent cache: ``LoadedExecutable.serialize`` is wrapped and answers with what was loaded.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from hlo_memopt.hlo import proto
from hlo_memopt.hlo.graph import Instruction, Module
from hlo_memopt.hook.registry import module_name
from hlo_memopt.hook.verify import check_carried, check_copies
from hlo_memopt.liveness.dataflow import Dataflow, Value
from hlo_memopt.liveness.sharing import can_share
from hlo_memopt.pack.assignment import simulate
from hlo_memopt.platforms import platform as platform_named

_PRED, _TUPLE = 1, 13  # of PrimitiveType
_TOKEN, _OPAQUE = 17, 14
_PRED_SHAPE = b"\x10\x01\x2a\x03\x80\x01\x01"  # element type PRED, layout {} as XLA writes it
_ONCE = b'{"known_trip_count":{"n":"1"}}'

_lock = threading.Lock()
_loaded: dict[bytes, bytes] = {}  # what XLA serializes of a restored executable (hash) -> what was loaded, packed


# The module.


def prepared(data: bytes, elide_copies: bool = True) -> bytes:
    """What is planned and compiled in place of ``data``: carried, without needless copies, aliasing left out.

    Raises ValueError if the module cannot be carried or does not pass the checks.
    """
    lean = without_copies(data) if elide_copies else data
    check_copies(data, lean)
    carried = carry(lean)
    check_carried(lean, carried)
    return carried


def against(plan: Any, data: bytes) -> Any:
    """A plan of the prepared module as a plan of ``data``, whose temp it has to beat; else the plan to change nothing.

    Names and offsets are those of the prepared module: the plan applies to that, not to ``data``.
    """
    from hlo_memopt.planner import plan as planner

    module = Module.from_bytes(data)
    target = platform_named("cpu")
    before = simulate(Dataflow(module, target), module.schedule).temp
    better = plan.peak_after < before * (1 - target.model_error)
    if better:
        return dataclasses.replace(plan, peak_before=before)
    kept = planner.plan_module(data, "cpu", dataclasses.replace(plan.options, reorder=False))
    return dataclasses.replace(kept, options=plan.options, plan_seconds=plan.plan_seconds)


def without_copies(data: bytes) -> bytes:
    """A scheduled module in which donated arguments are read themselves in place of copies of them, where that is safe.

    XLA copies a donated argument if its result could be written before the last read; it does so before there is a
    schedule. Where the given schedule reads first, the copy is for nothing. XLA makes up for that by using the
    argument's allocation, idle then, for other things: what it cannot do with a carried module.
    """
    module = proto.parse_module(data)
    graph = Module.from_bytes(data)
    entry = next(c for c in module.computations if c.id == module.entry_computation_id)
    (sequence,) = (s.value for s in module.schedule.sequences if s.key == entry.id)
    position = {number: n for n, number in enumerate(sequence.instruction_ids)}
    dataflow = Dataflow(graph, platform_named("cpu"))
    buffers = {(v.instruction.id, v.index): buffer for buffer in dataflow.buffers for v in buffer.values}
    by_id = graph.entry.by_id
    waiting = {w for i in entry.instructions for w in i.control_predecessor_ids}
    donated = {a.parameter_number for a in module.input_output_alias.entries}
    gone: dict[int, int] = {}
    for copy in entry.instructions:
        if copy.opcode != "copy" or copy.control_predecessor_ids or copy.id in waiting or copy.id == entry.root_id:
            continue
        source = by_id[copy.operand_ids[0]]
        if source.opcode != "parameter" or source.parameter_number not in donated:
            continue
        if by_id[copy.id].shape != source.shape or len(buffers[copy.id, ()].values) != 1:
            continue
        users = graph.entry.users[copy.id]
        written = [v for v in buffers[source.id, ()].values if v.instruction.id != source.id]
        if any(v.instruction.computation.id != entry.id for v in written):
            continue
        if all(_may_read(user, by_id[copy.id], written, position) for user in users):
            gone[copy.id] = source.id
    kept = [type(i).FromString(proto.serialize(i)) for i in entry.instructions if i.id not in gone]
    for i in kept:
        operands = [gone.get(o, o) for o in i.operand_ids]
        del i.operand_ids[:]
        i.operand_ids.extend(operands)
    del entry.instructions[:]
    entry.instructions.extend(kept)
    order = [i for i in sequence.instruction_ids if i not in gone]
    del sequence.instruction_ids[:]
    sequence.instruction_ids.extend(order)
    return proto.serialize(module)


# These hand their operand on, or to another computation, or read it later than they stand.
_HANDING_ON = frozenset(
    {"add-dependency", "bitcast", "call", "conditional", "domain", "get-tuple-element", "opt-barrier", "tuple", "while"}
)


def _may_read(user: Instruction, copy: Instruction, written: list[Value], position: dict[int, int]) -> bool:
    """Whether ``user`` may read the argument itself: before anything is written there, or where it writes itself."""
    if user.opcode in _HANDING_ON or user.opcode.endswith(("-start", "-update", "-done")):
        return False
    for value in written:
        writer = value.instruction
        if writer.id == user.id:
            if not can_share(copy, (), user, value.index):
                return False
        elif position[writer.id] < position[user.id]:
            return False
    return True


def carry(data: bytes) -> bytes:
    """A scheduled module with its entry computation as a loop's body that runs once. Raises ValueError if it cannot be.

    Aliasing is left out of the proto: XLA 0.10.2 does not look there, and our model is not to either.
    """
    module = proto.parse_module(data)
    entry = next(c for c in module.computations if c.id == module.entry_computation_id)
    order = next(s.value.instruction_ids for s in module.schedule.sequences if s.key == entry.id)
    by_id = {i.id: i for i in entry.instructions}
    parameters = sorted((i for i in entry.instructions if i.opcode == "parameter"), key=lambda i: i.parameter_number)
    if [p.parameter_number for p in parameters] != list(range(len(parameters))):
        raise ValueError("parameters are not numbered one after the other")
    root = by_id[entry.root_id]
    is_tuple = root.shape.element_type == _TUPLE
    leaves = list(root.shape.tuple_shapes) if is_tuple else [root.shape]
    if any(s.element_type in (_TUPLE, _TOKEN, _OPAQUE) for s in [*leaves, *(p.shape for p in parameters)]):
        raise ValueError("arguments or results are not all arrays")
    lies_in = _aliases(module, is_tuple, len(leaves), len(parameters))
    dropped = is_tuple and root.opcode == "tuple" and not _is_used(entry, root.id)
    if dropped and len(set(root.operand_ids)) < len(leaves):
        raise ValueError("an instruction is more than one result")

    # The carried tuple: the arguments, the results that lie in none, and the condition.
    results = [n for n in range(len(leaves)) if n not in lies_in]
    shapes = [proto.serialize(p.shape) for p in parameters] + [proto.serialize(leaves[n]) for n in results]
    shapes.append(_PRED_SHAPE)
    slots = {n: lies_in.get(n, len(parameters) + results.index(n) if n in results else 0) for n in range(len(leaves))}
    carried = _int(2, _TUPLE) + b"".join(_bytes(4, s) for s in shapes)
    program = _bytes(1, carried) + _bytes(2, carried) + _bytes(3, b"carried")

    # The body: the entry computation, under its own id.
    ids = iter(range(max(by_id) + 1, max(by_id) + 2 * len(shapes) + 9))
    argument, no, false, new_root = (next(ids) for _ in range(4))
    name = f"{entry.name}.memopt"
    first = [_instruction(f"{name}.carried", "parameter", argument, carried)]
    ends = [p.id for p in parameters] + [0] * (len(results) + 1)
    last = []
    for n in range(len(leaves)):
        if dropped:
            ends[slots[n]] = root.operand_ids[n]
        elif is_tuple:
            ends[slots[n]] = next(ids)
            shape = proto.serialize(leaves[n])
            last.append(_get(f"{name}.result.{n}", ends[slots[n]], shape, root.id, n))
        else:
            ends[slots[n]] = root.id
    ends[-1] = false
    last.append(_instruction(f"{name}.no", "constant", no, _PRED_SHAPE, more=_literal(False)))
    last.append(_instruction(f"{name}.end", "copy", false, _PRED_SHAPE, [no]))
    last.append(_instruction(f"{name}.next", "tuple", new_root, carried, ends))
    for p in parameters:
        get = _get(p.name, p.id, proto.serialize(p.shape), argument, p.parameter_number)
        first.append(get + (_bytes(7, proto.serialize(p.metadata)) if p.HasField("metadata") else b""))
    inside = [i for i in entry.instructions if i.opcode != "parameter" and not (dropped and i.id == root.id)]
    body = _computation(
        name, entry.id, new_root, program, [*first, *map(proto.serialize, inside), *last], entry.execution_thread
    )
    kept = {i.id for i in inside}
    body_order = [argument, *(p.id for p in parameters), *(i for i in order if i in kept)]
    body_order += [_id_of(i) for i in last]

    # The condition and the new entry computation.
    number = max(c.id for c in module.computations) + 1
    test_argument, test_root = number << 32, number << 32 | 1
    condition = _computation(
        f"{name}.condition",
        number,
        test_root,
        _bytes(1, carried) + _bytes(2, _PRED_SHAPE) + _bytes(3, b"carried"),
        [
            _instruction(f"{name}.condition.carried", "parameter", test_argument, carried),
            _get(f"{name}.condition.more", test_root, _PRED_SHAPE, test_argument, len(shapes) - 1),
        ],
        entry.execution_thread,
    )
    outer = _Outer(number + 1)
    starts = []
    for p in parameters:
        outer.ids.append(next(outer.fresh))
        starts.append(outer.ids[-1])
        copy = type(p).FromString(proto.serialize(p))
        copy.id, copy.name = outer.ids[-1], f"{p.name}.memopt"
        del copy.control_predecessor_ids[:]
        outer.instructions.append(proto.serialize(copy))
    yes = outer.add("yes", "constant", _PRED_SHAPE, more=_literal(True))
    for n in results:
        scalar = _scalar_of(leaves[n])
        start = outer.add(f"zero.{n}", "convert", scalar, [yes])
        if leaves[n].dimensions:
            start = outer.add(f"start.{n}", "broadcast", proto.serialize(leaves[n]), [start])
        starts.append(start)
    starts.append(outer.add("begin", "copy", _PRED_SHAPE, [yes]))
    start = outer.add("start", "tuple", carried, starts)
    calls = _int(38, entry.id) + _int(38, number)
    loop = outer.add("once", "while", carried, [start], more=calls + _bytes(43, _ONCE))
    ends = [
        outer.add(f"result.{n}", "get-tuple-element", proto.serialize(leaf), [loop], _int(13, slots[n]))
        for n, leaf in enumerate(leaves)
    ]
    result = outer.add("results", "tuple", proto.serialize(root.shape), ends) if is_tuple else ends[0]
    main = _computation(
        entry.name, number + 1, result, _program_shape(entry), outer.instructions, entry.execution_thread
    )

    computation = type(entry).FromString
    others = [c for c in module.computations if c.id != entry.id]
    made = [computation(proto.serialize(c)) for c in others]
    made += [computation(c) for c in (body, condition, main)]
    sequences = {s.key: list(s.value.instruction_ids) for s in module.schedule.sequences}
    sequences[entry.id] = body_order
    sequences[number] = [test_argument, test_root]
    sequences[number + 1] = outer.ids
    del module.computations[:]
    module.computations.extend(made)
    module.entry_computation_id = number + 1
    module.ClearField("schedule")
    module.ClearField("input_output_alias")
    for key, ids_ in sequences.items():
        module.schedule.sequences.add(key=key).value.instruction_ids.extend(ids_)
    return proto.serialize(module)


class _Outer:
    """The new entry computation in the making."""

    def __init__(self, number: int) -> None:
        self.fresh = iter(range(number << 32, (number + 1) << 32))
        self.ids: list[int] = []
        self.instructions: list[bytes] = []

    def add(self, name: str, opcode: str, shape: bytes, operands: list[int] | None = None, more: bytes = b"") -> int:
        number = next(self.fresh)
        self.ids.append(number)
        self.instructions.append(_instruction(f"memopt.{name}", opcode, number, shape, operands, more))
        return number


def _aliases(module: Any, is_tuple: bool, leaves: int, parameters: int) -> dict[int, int]:
    """Number of a result -> number of the argument that it lies in."""
    found: dict[int, int] = {}
    if module.buffer_donor.entries:
        raise ValueError("arguments are donated to no result")
    for entry in module.input_output_alias.entries:
        path = list(entry.output_shape_index)
        if len(path) != int(is_tuple) or list(entry.parameter_shape_index):
            raise ValueError("a donated argument is a part of a tuple")
        result = path[0] if path else 0
        if result in found or entry.parameter_number in found.values():
            raise ValueError("an argument is donated twice")
        if not (0 <= result < leaves and 0 <= entry.parameter_number < parameters):
            raise ValueError("a donated argument is not there")
        found[result] = entry.parameter_number
    return found


def _is_used(computation: Any, number: int) -> bool:
    return any(number in i.operand_ids or number in i.control_predecessor_ids for i in computation.instructions)


def _scalar_of(shape: Any) -> bytes:
    scalar = type(shape)(element_type=shape.element_type)
    scalar.layout.tail_padding_alignment_in_elements = 1
    scalar.layout.element_size_in_bits = shape.layout.element_size_in_bits
    return proto.serialize(scalar)


def _program_shape(computation: Any) -> bytes:
    return next(v for n, v, _ in _fields(proto.serialize(computation)) if n == 4 and isinstance(v, bytes))


def _literal(value: bool) -> bytes:
    return _bytes(8, _bytes(1, _PRED_SHAPE) + _bytes(2, bytes([value])))


def _get(name: str, number: int, shape: bytes, of: int, index: int) -> bytes:
    return _instruction(name, "get-tuple-element", number, shape, [of], _int(13, index))


def _instruction(
    name: str, opcode: str, number: int, shape: bytes, operands: list[int] | None = None, more: bytes = b""
) -> bytes:
    parts = [_bytes(1, name.encode()), _bytes(2, opcode.encode()), _bytes(3, shape), _int(35, number)]
    return b"".join([*parts, *(_int(36, o) for o in operands or ()), more])


def _computation(name: str, number: int, root: int, shape: bytes, instructions: list[bytes], thread: str) -> bytes:
    parts = [_bytes(1, name.encode()), *(_bytes(2, i) for i in instructions), _bytes(4, shape)]
    return b"".join([*parts, _int(5, number), _int(6, root), _bytes(8, thread.encode())])


def _id_of(instruction: bytes) -> int:
    return next(int(value) for number, value, _ in _fields(instruction) if number == 35)


# The executable.


def restore(executable: Any, aliases: Any, load: Callable[[bytes], Any]) -> Any:
    """The executable of a carried module with donation declared; ``aliases`` is the HloInputOutputAliasProto.

    Raises ValueError if XLA did not compile the module as ``carry`` means it to. ``load`` makes an executable.
    """
    data = restored(executable.serialize(), aliases)
    again = load(data)
    _remember(again, data)
    return again


def restored(data: bytes, aliases: Any) -> bytes:
    """A serialized executable with donation declared.

    A header with its length before it; then field 1, CompilationResultProto: 1 {1 module}, 2 buffer assignment.
    """
    length, at = _varint(data, 0)
    header, rest = data[: at + length], data[at + length :]
    donated = {e.parameter_number for e in aliases.entries}

    def edit_module(module: bytes) -> bytes:
        present = [proto.parse_module(raw).input_output_alias for n, _, raw in _fields(module) if n == 8]
        if any(p.entries for p in present) or not module_name(module):
            raise ValueError("the executable's module is not as known")
        return module + _bytes(8, proto.serialize(aliases))

    def edit_allocation(allocation: bytes) -> bytes:
        # 5 is the entry computation's parameter, 6 its number, 7 is live out, 10 path, 13 is aliased with an output
        values = {n: v for n, v, _ in _fields(allocation) if n in (5, 6, 7, 10, 13)}
        if not values.get(5):
            return allocation
        if values.get(10) or values.get(13):
            raise ValueError("an argument's allocation is not as known")
        number = int(values.get(6, 0))
        if bool(values.get(7)) != (number in donated):
            raise ValueError(f"XLA did not place the results that lie in arguments as planned (argument {number})")
        found.append(number)
        return allocation + _int(13, 1) if number in donated else allocation

    found: list[int] = []
    edit_result = _editing(
        {
            1: _editing({1: edit_module}),
            2: _editing({3: edit_allocation}, many=True),
        }
    )
    made = header + _editing({1: edit_result})(rest)
    if len(found) != len(set(found)) or not donated <= set(found):
        raise ValueError("arguments have not one allocation each")
    return made


def _editing(edits: dict[int, Callable[[bytes], bytes]], many: bool = False) -> Callable[[bytes], bytes]:
    """A function that edits some fields of a serialized message, each of them there once if not ``many``."""

    def edit(data: bytes) -> bytes:
        parts = []
        seen = []
        for number, value, raw in _fields(data):
            if number in edits:
                if not isinstance(value, bytes):
                    raise ValueError("the executable is not as known")
                seen.append(number)
                raw = _bytes(number, edits[number](value))
            parts.append(raw)
        if set(seen) != set(edits) or (not many and len(seen) != len(edits)):
            raise ValueError("the executable is not as known")
        return b"".join(parts)

    return edit


def _remember(executable: Any, data: bytes) -> None:
    """Have ``executable.serialize()`` answer with ``data``."""
    kind = type(executable)
    with _lock:
        if not hasattr(kind.serialize, "hlo_memopt"):
            kind.serialize = _serializing(kind.serialize)
            client = type(executable.client)
            client.serialize_executable = _serializing(client.serialize_executable)
        original = kind.serialize.hlo_memopt
    digest = hashlib.sha256(original(executable)).digest()
    with _lock:
        _loaded[digest] = zlib.compress(data, 1)


def _serializing(original: Callable[..., bytes]) -> Callable[..., bytes]:
    @functools.wraps(original, assigned=("__name__", "__doc__"), updated=())
    def serialize(*args: Any) -> bytes:
        data = original(*args)
        if not _loaded:
            return data
        packed = _loaded.get(hashlib.sha256(data).digest())
        return data if packed is None else zlib.decompress(packed)

    serialize.hlo_memopt = original  # type: ignore[attr-defined]
    return serialize


# Protocol buffers' wire format.


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data):
            raise ValueError("truncated")
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            return value, at


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes, bytes]]:
    """Number, value and all bytes of each field."""
    at = 0
    while at < len(data):
        start = at
        tag, at = _varint(data, at)
        value: int | bytes
        if tag & 7 == 0:
            value, at = _varint(data, at)
        else:
            if tag & 7 == 2:
                size, at = _varint(data, at)
            elif tag & 7 in (1, 5):
                size = 8 if tag & 7 == 1 else 4
            else:
                raise ValueError("not a message")
            value = data[at : at + size]
            at += size
            if at > len(data):
                raise ValueError("truncated")
        yield tag >> 3, value, data[start:at]


def _number(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _int(field: int, value: int) -> bytes:
    return _number(field << 3) + _number(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _number(field << 3 | 2) + _number(len(value)) + value
