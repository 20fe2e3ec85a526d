"""A schedule put into a HloModuleProto: as its schedule, or as control dependencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hlo_memopt.hlo import proto


def put_schedule(data: bytes, schedule: Mapping[str, Sequence[str]]) -> bytes:
    """Serialized module with the given order of instructions (by name) in each named computation.

    Raises ValueError if a computation or an instruction is not in the module, or one is missing from its sequence.
    """
    message = proto.parse_module(data)
    computations = {c.name: c for c in message.computations}
    entries = {s.key: s.value for s in message.schedule.sequences}
    for name, order in schedule.items():
        ids = _ids(computations, name, order)
        computation = computations[name]
        if computation.id in entries:
            sequence = entries[computation.id]
            del sequence.instruction_ids[:]
        else:
            sequence = message.schedule.sequences.add(key=computation.id).value
        sequence.instruction_ids.extend(ids)
    return proto.serialize(message)


def add_control_dependencies(data: bytes, schedule: Mapping[str, Sequence[str]]) -> bytes:
    """The same order as a chain of control dependencies, for a compiler that schedules again.

    Each instruction waits for the one before it. Parameters and constants are left out: they run nowhere. The
    instructions are listed in the new order, since XLA wants predecessors before their successors in the proto.
    """
    message = proto.parse_module(data)
    computations = {c.name: c for c in message.computations}
    for name, order in schedule.items():
        ids = _ids(computations, name, order)
        computation = computations[name]
        by_id = {i.id: i for i in computation.instructions}
        previous = None
        for instruction_id in ids:
            instruction = by_id[instruction_id]
            if instruction.opcode in ("parameter", "constant"):
                continue
            known = (*instruction.control_predecessor_ids, *instruction.operand_ids)
            if previous is not None and previous not in known:
                instruction.control_predecessor_ids.append(previous)
            previous = instruction_id
        listed = [by_id[i] for i in ids]
        copies = [type(i).FromString(i.SerializeToString()) for i in listed]
        del computation.instructions[:]
        computation.instructions.extend(copies)
    return proto.serialize(message)


def _ids(computations: Mapping[str, Any], name: str, order: Sequence[str]) -> list[int]:
    computation = computations.get(name)
    if computation is None:
        raise ValueError(f"the plan names computation {name!r}, which this module does not have")
    by_name = {i.name: i.id for i in computation.instructions}
    missing = [i for i in order if i not in by_name]
    if missing or len(set(order)) != len(order) or len(order) != len(by_name):
        what = f"instruction {missing[0]!r} is unknown" if missing else "its instructions are not each there once"
        raise ValueError(f"the plan does not fit computation {name!r}: {what}")
    return [by_name[i] for i in order]
