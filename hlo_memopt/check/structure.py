"""Is everything but the order the same? Compares two modules message by message, unknown fields included.

What a rewrite may change is listed here and nowhere else: the schedule, the order in which a computation lists its
instructions, and further control predecessors.
"""

from __future__ import annotations

from typing import Any

from hlo_memopt.check.errors import PlanCheckError

# Fields named when an instruction differs; a difference elsewhere is called "other fields".
_NAMED = (
    "name",
    "opcode",
    "shape",
    "operand_ids",
    "called_computation_ids",
    "output_operand_aliasing",
    "custom_call_target",
    "custom_call_has_side_effect",
    "parameter_number",
    "tuple_index",
    "fusion_kind",
    "backend_config",
    "channel_id",
)


def compare_computations(before: Any, after: Any) -> set[int]:
    """The ids of computations whose listing or control predecessors differ; raises on any other difference."""
    old, new = [c.id for c in before.computations], [c.id for c in after.computations]
    if old != new:
        names = {c.id: c.name for m in (before, after) for c in m.computations}
        lost, found = set(old) - set(new), set(new) - set(old)
        for ids, what in ((lost, "is missing from"), (found, "was added to")):
            if ids:
                raise PlanCheckError(f"computation {names[min(ids)]!r} {what} the rewritten module")
        raise PlanCheckError("the rewritten module lists its computations another number of times or in another order")
    changed = set()
    for c, d in zip(before.computations, after.computations, strict=True):
        if c.SerializeToString() != d.SerializeToString():
            _compare_instructions(c, d)
            changed.add(c.id)
    return changed


def compare_rest(before: Any, after: Any) -> None:
    """Compare what is outside the computations and the schedule. Destroys both messages."""
    for m in (before, after):
        m.ClearField("computations")
        m.ClearField("schedule")
    if before.SerializeToString() == after.SerializeToString():
        return
    fields = _different(before, after, [f.name for f in before.DESCRIPTOR.fields])
    raise PlanCheckError(f"the rewritten module {after.name!r} differs from the original in {fields}")


def compare_schedules(before: Any, after: Any, names: dict[int, str]) -> dict[int, tuple[list[int], list[int]]]:
    """Computation id -> (old order, new order), over one and the same set of computations."""
    old, new = ([(s.key, list(s.value.instruction_ids)) for s in m.schedule.sequences] for m in (before, after))
    was, now = dict(old), dict(new)
    for key in was:
        if key not in now:
            raise PlanCheckError(f"computation {names.get(key, key)!r} has no sequence in the rewritten schedule")
    for key in now:
        if key not in was:
            raise PlanCheckError(f"computation {names.get(key, key)!r} was added to the rewritten schedule")
    if len(new) != len(now):
        raise PlanCheckError("the rewritten schedule holds two sequences for one computation")
    return {key: (was[key], now[key]) for key in was}


def _compare_instructions(before: Any, after: Any) -> None:
    """The same instructions in any order of listing; control predecessors may be added, never dropped."""
    where = f"computation {before.name!r}"
    old = {i.id: i for i in before.instructions}
    new = {i.id: i for i in after.instructions}
    for key, i in old.items():
        if key not in new:
            raise PlanCheckError(f"instruction {i.name!r} is missing from {where}")
    for key, j in new.items():
        if key not in old:
            raise PlanCheckError(f"instruction {j.name!r} was added to {where}")
    if len(after.instructions) != len(new):
        raise PlanCheckError(f"{where} lists an instruction twice")
    for key, i in old.items():
        j = new[key]
        if i.SerializeToString() == j.SerializeToString():
            continue
        mine = list(i.control_predecessor_ids)
        theirs = set(j.control_predecessor_ids)
        for p in mine:
            if p not in theirs:
                name = old[p].name if p in old else p
                raise PlanCheckError(f"instruction {i.name!r} of {where} lost its control predecessor {name!r}")
        _compare_one(i, j, where)
    _compare_shells(before, after, where)


def _compare_one(i: Any, j: Any, where: str) -> None:
    """Two instructions, control predecessors apart."""
    x, y = type(i)(), type(j)()
    x.CopyFrom(i)
    y.CopyFrom(j)
    x.ClearField("control_predecessor_ids")
    y.ClearField("control_predecessor_ids")
    if x.SerializeToString() != y.SerializeToString():
        raise PlanCheckError(f"instruction {i.name!r} of {where} was changed: {_different(x, y, _NAMED)}")


def _compare_shells(before: Any, after: Any, where: str) -> None:
    """What a computation holds besides instructions: name, root, program shape, flags."""
    x, y = type(before)(), type(after)()
    for shell, c in ((x, before), (y, after)):
        shell.CopyFrom(c)
        shell.ClearField("instructions")
    if x.SerializeToString() != y.SerializeToString():
        fields = _different(x, y, [f.name for f in before.DESCRIPTOR.fields])
        raise PlanCheckError(f"{where} was changed: {fields}")


def _different(x: Any, y: Any, fields: Any) -> str:
    found = [f for f in fields if getattr(x, f) != getattr(y, f)]
    return ", ".join(found) or "other fields"
