"""What a rewritten module must pass before it leaves us."""

from __future__ import annotations

from typing import Any

from hlo_memopt.hook.registry import logger, registry


def verify_rewrite(original: bytes, rewritten: object) -> None:
    """Raises if ``rewritten`` is not a module that XLA will read, or not one that computes what ``original`` does."""
    if not isinstance(rewritten, bytes) or not rewritten:
        raise ValueError(f"the plan gave {type(rewritten).__name__} in place of a module")

    from hlo_memopt.check import check_rewrite

    check_rewrite(original, rewritten)
    _read_back(rewritten)


def _read_back(rewritten: bytes) -> None:
    """XLA's own parser and its check of the schedule. jaxlib._hlo is private: without it we do with the checker."""
    try:
        from jaxlib._hlo import HloModule

        parse = HloModule.from_serialized_hlo_module_proto
        schedule_of = HloModule.schedule
    except (ImportError, AttributeError) as error:
        if registry.once("no jaxlib._hlo"):
            logger.debug("this jaxlib has no HloModule to read rewritten modules back with: %s", error)
        return
    schedule = schedule_of(parse(rewritten))
    if schedule is None:
        raise ValueError("the rewritten module has no schedule")
    schedule.verify()


def check_carried(lean: bytes, carried: bytes) -> None:
    """Raises ValueError unless the entry computation of ``carried`` runs that of ``lean`` once, as a loop's body."""
    from hlo_memopt.hlo import proto

    before, after = proto.parse_module(lean), proto.parse_module(carried)
    computations = {c.id: c for c in after.computations}
    old = next(c for c in before.computations if c.id == before.entry_computation_id)
    body, entry = computations[old.id], computations[after.entry_computation_id]
    parameters = {i.id: i for i in old.instructions if i.opcode == "parameter"}
    root = next(i for i in old.instructions if i.id == old.root_id)
    inside = {i.id: i for i in body.instructions}
    outside = {i.id: i for i in entry.instructions}
    (loop,) = (i for i in entry.instructions if i.opcode == "while")
    (argument,) = (i.id for i in body.instructions if i.opcode == "parameter")
    start, end = outside[loop.operand_ids[0]], inside[body.root_id]

    def need(holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(f"a carried module {what}")

    condition = computations[loop.called_computation_ids[1]]
    more = next(i for i in condition.instructions if i.id == condition.root_id)
    last = len(start.operand_ids) - 1
    need(loop.called_computation_ids[0] == body.id, "has another body")
    need(more.opcode == "get-tuple-element" and more.tuple_index == last, "has another condition")
    need(_is_truth(outside, start.operand_ids[last], True), "does not begin")
    need(_is_truth(inside, end.operand_ids[last], False), "does not end")

    # The body computes what the entry computation did, in the same order.
    dropped = root.opcode == "tuple" and root.id not in inside
    for i in old.instructions:
        if i.id in parameters:
            get = inside[i.id]
            right = get.opcode == "get-tuple-element" and list(get.operand_ids) == [argument]
            need(right and get.tuple_index == i.parameter_number, "mixes arguments up")
            source = outside[start.operand_ids[i.parameter_number]]
            right = source.opcode == "parameter" and source.parameter_number == i.parameter_number
            need(right and source.shape == i.shape == get.shape, "mixes arguments up")
        else:
            need((dropped and i is root) or inside.get(i.id) == i, "computes something else")
    orders = {s.key: list(s.value.instruction_ids) for s in after.schedule.sequences}
    was = next(list(s.value.instruction_ids) for s in before.schedule.sequences if s.key == old.id)
    known = {i.id for i in old.instructions if i.id in inside and i.id not in parameters}
    need([i for i in orders[body.id] if i in known] == [i for i in was if i in known], "has another order")

    # What the entry computation had as results comes out, and where it lay in arguments, through their slots.
    is_tuple = root.shape.element_type == 13
    lies_in = {(*a.output_shape_index,): a.parameter_number for a in before.input_output_alias.entries}
    result = outside[entry.root_id]
    gets = [outside[o] for o in result.operand_ids] if is_tuple else [result]
    slots = [g.tuple_index for g in gets]
    need(all(g.opcode == "get-tuple-element" and list(g.operand_ids) == [loop.id] for g in gets), "has other results")
    need(len(set(slots)) == len(slots) == (len(root.shape.tuple_shapes) if is_tuple else 1), "has other results")
    for n, slot in enumerate(slots):
        value = end.operand_ids[slot]
        if dropped:
            right = value == root.operand_ids[n]
        elif is_tuple:
            get = inside[value]
            right = get.opcode == "get-tuple-element" and (*get.operand_ids, get.tuple_index) == (root.id, n)
        else:
            right = value == root.id
        need(right, "mixes results up")
        place = lies_in.get((n,) if is_tuple else ())
        need(slot == place or (place is None and len(parameters) <= slot < last), "puts results elsewhere")
    for p in parameters.values():
        passed = end.operand_ids[p.parameter_number] == p.id
        need(passed or p.parameter_number in lies_in.values(), "overwrites an argument")


def _is_truth(table: dict[int, Any], number: int, value: bool) -> bool:
    """Whether an instruction is a copy of the constant ``value``."""
    from hlo_memopt.hlo import proto

    copy = table[number]
    if copy.opcode != "copy" or table[copy.operand_ids[0]].opcode != "constant":
        return False
    return proto.serialize(table[copy.operand_ids[0]]).endswith(b"\x12\x01" + bytes([value]))
