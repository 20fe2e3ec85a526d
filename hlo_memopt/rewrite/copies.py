"""Copies taken out of a HloModuleProto: their readers read what was copied."""

from __future__ import annotations

from collections.abc import Collection

from hlo_memopt.hlo import proto


def remove_copies(data: bytes, names: Collection[str]) -> bytes:
    """Serialized module without the named copies of its entry computation, in its instructions and its schedule.

    Raises ValueError if one of them is not there, or is not a copy.
    """
    module = proto.parse_module(data)
    entry = next(c for c in module.computations if c.id == module.entry_computation_id)
    found = {i.name: i for i in entry.instructions if i.opcode == "copy"}
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"the plan leaves out the copy {missing[0]!r}, which this module does not have")
    gone = {found[name].id: found[name].operand_ids[0] for name in names}
    kept = [type(i).FromString(proto.serialize(i)) for i in entry.instructions if i.id not in gone]
    for i in kept:
        operands = [gone.get(o, o) for o in i.operand_ids]
        del i.operand_ids[:]
        i.operand_ids.extend(operands)
    del entry.instructions[:]
    entry.instructions.extend(kept)
    for sequence in module.schedule.sequences:
        if sequence.key == entry.id:
            order = [i for i in sequence.value.instruction_ids if i not in gone]
            del sequence.value.instruction_ids[:]
            sequence.value.instruction_ids.extend(order)
    return proto.serialize(module)
