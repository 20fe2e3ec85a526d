"""Donated arguments kept where XLA forgets them: XLA:CPU in jaxlib 0.10.2.

There ``UpdateHloModuleFromProto`` (xla/service/xla_transform.cc) puts the computations of a returned module into the
one being compiled and calls ``ReplaceEntryComputation``, which empties ``input_output_alias``: outputs no longer lie in
donated arguments. Nothing in the returned proto and no later pass can set it again. So

  * ``carry`` writes the module such that outputs and arguments share buffers by another rule of XLA's: the entry
    computation becomes the body of a ``while`` that runs once and whose carried tuple starts as the arguments and ends
    as the outputs that lie in them. XLA places all values of one element of that tuple in one buffer, that is, in the
    argument's allocation, and compiles every kernel knowing it;
  * `hook.restore` then says in the compiled executable what XLA would have said itself: that these arguments are
    donated (in the module, by which the runtime consumes them) and that their allocations are written (in the buffer
    assignment, by which it copies arguments that may not be). No slice, kernel or thunk is touched.

Before that such an executable would overwrite arguments of the caller's; it must never be run.

An executable that XLA:CPU has deserialized loses its machine code when it is serialized again, which would ruin the
persistent cache: ``LoadedExecutable.serialize`` is wrapped and answers with what was loaded.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from hlo_memopt.check import check_rewrite
from hlo_memopt.elide import needless_copies
from hlo_memopt.hlo import proto
from hlo_memopt.hlo.graph import Module
from hlo_memopt.hlo.wire import bytes_field, fields, int_field
from hlo_memopt.hook.verify import check_carried
from hlo_memopt.liveness.dataflow import Dataflow
from hlo_memopt.pack.assignment import simulate
from hlo_memopt.platforms import platform as platform_named
from hlo_memopt.rewrite import remove_copies

_PRED, _TUPLE = 1, 13  # of PrimitiveType
_TOKEN, _OPAQUE = 17, 14
_PRED_SHAPE = b"\x10\x01\x2a\x03\x80\x01\x01"  # element type PRED, layout {} as XLA writes it
_ONCE = b'{"known_trip_count":{"n":"1"}}'



def prepared(data: bytes, elide_copies: bool = True) -> bytes:
    """What is planned and compiled in place of ``data``: carried, without needless copies, aliasing left out.

    Raises ValueError if the module cannot be carried or does not pass the checks.
    """
    lean = data
    if elide_copies:
        module = Module.from_bytes(data)
        names = needless_copies(module, Dataflow(module, platform_named("cpu")))
        lean = remove_copies(data, names)
        check_rewrite(data, lean)
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
    if better:  # though its order may be the given one: leaving out copies is a change too
        return dataclasses.replace(plan, peak_before=before, changed=True)
    kept = planner.plan_module(data, "cpu", dataclasses.replace(plan.options, reorder=False, elide_copies=False))
    return dataclasses.replace(kept, options=plan.options, plan_seconds=plan.plan_seconds)


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
    if any(not _alike(leaves[n], parameters[p].shape) for n, p in lies_in.items()):
        raise ValueError("an argument and the result that lies in it have different shapes")
    dropped = is_tuple and root.opcode == "tuple" and not _is_used(entry, root.id)
    if dropped and len(set(root.operand_ids)) < len(leaves):
        raise ValueError("an instruction is more than one result")

    # The carried tuple: the arguments, the results that lie in none, and the condition.
    results = [n for n in range(len(leaves)) if n not in lies_in]
    shapes = [proto.serialize(p.shape) for p in parameters] + [proto.serialize(leaves[n]) for n in results]
    shapes.append(_PRED_SHAPE)
    slots = {n: lies_in.get(n, len(parameters) + results.index(n) if n in results else 0) for n in range(len(leaves))}
    carried = int_field(2, _TUPLE) + b"".join(bytes_field(4, s) for s in shapes)
    program = bytes_field(1, carried) + bytes_field(2, carried) + bytes_field(3, b"carried")

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
        first.append(get + (bytes_field(7, proto.serialize(p.metadata)) if p.HasField("metadata") else b""))
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
        bytes_field(1, carried) + bytes_field(2, _PRED_SHAPE) + bytes_field(3, b"carried"),
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
    calls = int_field(38, entry.id) + int_field(38, number)
    loop = outer.add("once", "while", carried, [start], more=calls + bytes_field(43, _ONCE))
    ends = [
        outer.add(f"result.{n}", "get-tuple-element", proto.serialize(leaf), [loop], int_field(13, slots[n]))
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


def _alike(a: Any, b: Any) -> bool:
    """Equal element types, dimensions and layouts."""
    return (a.element_type, list(a.dimensions), list(a.layout.minor_to_major)) == (
        b.element_type,
        list(b.dimensions),
        list(b.layout.minor_to_major),
    )


def _is_used(computation: Any, number: int) -> bool:
    return any(number in i.operand_ids or number in i.control_predecessor_ids for i in computation.instructions)


def _scalar_of(shape: Any) -> bytes:
    scalar = type(shape)(element_type=shape.element_type)
    scalar.layout.tail_padding_alignment_in_elements = 1
    scalar.layout.element_size_in_bits = shape.layout.element_size_in_bits
    return proto.serialize(scalar)


def _program_shape(computation: Any) -> bytes:
    return next(v for n, v, _ in fields(proto.serialize(computation)) if n == 4 and isinstance(v, bytes))


def _literal(value: bool) -> bytes:
    return bytes_field(8, bytes_field(1, _PRED_SHAPE) + bytes_field(2, bytes([value])))


def _get(name: str, number: int, shape: bytes, of: int, index: int) -> bytes:
    return _instruction(name, "get-tuple-element", number, shape, [of], int_field(13, index))


def _instruction(
    name: str, opcode: str, number: int, shape: bytes, operands: list[int] | None = None, more: bytes = b""
) -> bytes:
    parts = [bytes_field(1, name.encode()), bytes_field(2, opcode.encode()), bytes_field(3, shape)]
    parts.append(int_field(35, number))
    return b"".join([*parts, *(int_field(36, o) for o in operands or ()), more])


def _computation(name: str, number: int, root: int, shape: bytes, instructions: list[bytes], thread: str) -> bytes:
    parts = [bytes_field(1, name.encode()), *(bytes_field(2, i) for i in instructions), bytes_field(4, shape)]
    return b"".join([*parts, int_field(5, number), int_field(6, root), bytes_field(8, thread.encode())])


def _id_of(instruction: bytes) -> int:
    return next(int(value) for number, value, _ in fields(instruction) if number == 35)
