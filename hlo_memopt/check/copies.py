"""May copies of donated arguments be left out? Their readers then read the argument itself."""

from __future__ import annotations

from typing import Any

from hlo_memopt.check.alias import WRITE, AliasSets
from hlo_memopt.check.errors import PlanCheckError
from hlo_memopt.check.inplace import TUPLE

# Their result is their operand's array, or they hand it to another computation: a read that is not seen here.
_HIDDEN_READERS = frozenset({
    "add-dependency", "bitcast", "call", "conditional", "domain", "get-tuple-element", "opt-barrier", "send", "tuple",
    "while",
})  # fmt: skip
# An element of the result depends on the operands' elements at its own place alone.
_ELEMENTWISE = frozenset(
    {
        "abs", "acos", "acosh", "add", "and", "asin", "asinh", "atan2", "atanh", "bitcast-convert", "cbrt", "ceil",
        "clamp", "clz", "compare", "complex", "convert", "copy", "cosine", "cosh", "count-leading-zeros", "divide",
        "erf", "exponential", "exponential-minus-one", "floor", "imag", "is-finite", "log", "log-plus-one", "logistic",
        "maximum", "minimum", "multiply", "negate", "not", "or", "popcnt", "power", "real", "reduce-precision",
        "remainder", "round-nearest-afz", "round-nearest-even", "rsqrt", "select", "shift-left",
        "shift-right-arithmetic", "shift-right-logical", "sign", "sine", "sinh", "sqrt", "subtract", "tan", "tanh",
        "xor",
    }
)  # fmt: skip


def missing_copies(before: Any, after: Any) -> dict[int, int]:
    """Copies of the entry computation that are not in the rewritten one: id -> what each copies."""
    old = next((c for c in before.computations if c.id == before.entry_computation_id), None)
    new = next((c for c in after.computations if c.id == before.entry_computation_id), None)
    if old is None or new is None:
        return {}
    left = {i.id for i in new.instructions}
    return {i.id: i.operand_ids[0] for i in old.instructions if i.opcode == "copy" and i.id not in left}


def with_copies(before: Any, after: Any, gone: dict[int, int]) -> Any:
    """``before`` with the schedule of ``after``, each missing copy directly before its first reader."""
    full = clone(before)
    entry = next(c for c in full.computations if c.id == full.entry_computation_id)
    read_by: dict[int, list[int]] = {}
    for i in entry.instructions:
        for o in dict.fromkeys(i.operand_ids):
            if o in gone:
                read_by.setdefault(i.id, []).append(o)
    new = {s.key: list(s.value.instruction_ids) for s in after.schedule.sequences}
    for s in full.schedule.sequences:
        if s.key not in new:
            raise PlanCheckError(f"computation id {s.key} has no sequence in the rewritten schedule")
        order = new[s.key]
        if s.key == entry.id:
            done: set[int] = set()
            spread: list[int] = []
            for i in order:
                here = [c for c in read_by.get(i, ()) if c not in done]
                done.update(here)
                spread += [*here, i]
            order = [*spread, *(c for c in gone if c not in done)]
        del s.value.instruction_ids[:]
        s.value.instruction_ids.extend(order)
    return full


def without_copies(full: Any, gone: dict[int, int]) -> Any:
    """``full`` less those copies: what their readers read is what was copied.

    What `rewrite.remove_copies` does, done here again: the check must not rest on what it checks.
    """
    lean = clone(full)
    entry = next(c for c in lean.computations if c.id == lean.entry_computation_id)
    kept = [type(i).FromString(i.SerializeToString()) for i in entry.instructions if i.id not in gone]
    for i in kept:
        operands = [gone.get(o, o) for o in i.operand_ids]
        del i.operand_ids[:]
        i.operand_ids.extend(operands)
    del entry.instructions[:]
    entry.instructions.extend(kept)
    for s in lean.schedule.sequences:
        if s.key == entry.id:
            order = [i for i in s.value.instruction_ids if i not in gone]
            del s.value.instruction_ids[:]
            s.value.instruction_ids.extend(order)
    return lean


def check_copies(full: Any, gone: dict[int, int]) -> None:
    """Raise unless, under ``full``'s schedule, the readers of these copies may read what was copied.

    That is a donated argument of the same shape, which they read before anything is written to its buffer; the writer
    itself may be one of them if it touches each element at its own place alone.
    """
    computations = {c.id: c for c in full.computations}
    opcodes = {c.id: {i.opcode for i in c.instructions} for c in full.computations}
    entry = computations[full.entry_computation_id]
    table = {i.id: i for i in entry.instructions}
    order = next(list(s.value.instruction_ids) for s in full.schedule.sequences if s.key == entry.id)
    position = {number: n for n, number in enumerate(order)}
    aliases = AliasSets(full, computations, opcodes)
    events = list(aliases.events(entry.id))
    writers: dict[int, list[int]] = {}  # by buffer
    source_of: dict[int, set[int]] = {}  # by copy: the buffer that it reads
    for s, i, bits in events:
        if bits & WRITE:
            writers.setdefault(s, []).append(i)
            if i in gone:
                raise PlanCheckError(f"{table[i].name!r} is left out and shares its buffer with something else")
        elif i in gone:
            source_of.setdefault(i, set()).add(s)
    for copy, argument in gone.items():
        name, source = table[copy].name, table[argument]
        if source.opcode != "parameter" or source.shape != table[copy].shape or source.shape.element_type == TUPLE:
            raise PlanCheckError(f"{name!r} is left out and is not a mere copy of an argument")
        if table[copy].control_predecessor_ids or copy == entry.root_id:
            raise PlanCheckError(f"{name!r} is left out and is needed for more than its value")
        written = [(w, s) for s in source_of.get(copy, ()) for w in writers.get(s, ()) if w != argument]
        for i in entry.instructions:
            if copy in i.control_predecessor_ids:
                raise PlanCheckError(f"{i.name!r} waits for {name!r}, which is left out")
            if copy not in i.operand_ids:
                continue
            if i.opcode in _HIDDEN_READERS or i.opcode.endswith(("-start", "-update", "-done")):
                raise PlanCheckError(f"{i.name!r} hands {name!r} on, which is left out")
            for w, s in written:
                if w == i.id:
                    leaves = [_leaf(i.shape, index) for index in aliases.lying_in(w, s)]
                    same = leaves and all(leaf == source.shape for leaf in leaves)
                    if not (same and _elementwise(i, copy, source.shape, computations)):
                        raise PlanCheckError(f"{i.name!r} reads {source.name!r} elsewhere than where it overwrites it")
                elif position[w] < position[i.id]:
                    raise PlanCheckError(f"{i.name!r} reads {source.name!r} after {table[w].name!r} overwrote it")


def _leaf(shape: Any, index: tuple[int, ...]) -> Any:
    for n in index:
        shape = shape.tuple_shapes[n]
    return shape


def _elementwise(user: Any, operand: int, shape: Any, computations: dict[int, Any]) -> bool:
    """Whether ``user`` reads an operand of this shape only at the place of the element that it writes."""
    if user.opcode in _ELEMENTWISE:
        return _like(user.shape, shape)
    if user.opcode != "fusion":
        return False
    numbers = {n for n, o in enumerate(user.operand_ids) if o == operand}
    body = computations[user.called_computation_ids[0]]
    reached = {i.id for i in body.instructions if i.opcode == "parameter" and i.parameter_number in numbers}
    pending = list(reached)
    while pending:
        source = pending.pop()
        for i in body.instructions:
            if source not in i.operand_ids:
                continue
            if i.opcode == "tuple":
                if i.id != body.root_id:
                    return False
            elif not _elementwise(i, source, shape, computations):
                return False
            if i.id not in reached:
                reached.add(i.id)
                pending.append(i.id)
    return True


def _like(shape: Any, other: Any) -> bool:
    return shape.element_type != TUPLE and list(shape.dimensions) == list(other.dimensions)


def clone(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())
