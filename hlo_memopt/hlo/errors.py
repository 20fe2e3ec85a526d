"""`InputError`, and the check of a module's proto that runs before any of XLA's code sees it.

XLA's readers answer most broken protos with a status, but some (a call of an unknown computation, an alias at an index
that does not exist) with a CHECK, which ends the process. `check_module` finds those first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

MAX_MESSAGE = 300
_TUPLE = 13


class InputError(ValueError):
    """An input or output that cannot be used: ``file``, ``problem`` (what is wrong), ``advice`` (what to do)."""

    def __init__(self, file: str, problem: str, advice: str) -> None:
        self.file = file
        self.problem = one_line(problem)
        self.advice = one_line(advice)
        super().__init__(file, problem, advice)

    def __str__(self) -> str:
        return f"{self.file}: {self.problem}; {self.advice}"


def one_line(text: str, limit: int = MAX_MESSAGE) -> str:
    """``text`` with all white space folded, unprintable characters escaped, cut to ``limit``."""
    text = " ".join(str(text).split())
    text = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def parser_message(error: BaseException) -> str:
    """The first message of one of XLA's or MLIR's parsers, without status code, boilerplate, excerpt, stack trace."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if "error: " in line and "cannot parse as an instruction name" not in line]
    message = (told or lines or [type(error).__name__])[0]
    message = re.sub(r"^((Bad StatusOr access|[A-Z]+(_[A-Z]+)*): )+", "", message)
    message = re.sub(r'^(was parsing |error: |"?-"?:)*(\d+:\d+): (error: )?', r"line \2: ", message)
    message = re.sub(r"^line 0:0: |^error: ", "", message)
    return one_line(re.sub(r" \(external/\S*\)", "", message), 200)


def _duplicate(values: Iterable[Any]) -> Any | None:
    seen = set()
    for v in values:
        if v in seen:
            return v
        seen.add(v)
    return None


def check_module(message: Any) -> str | None:
    """What is wrong with a HloModuleProto message, or None: ids, operands, calls, schedule, aliases."""
    computations = list(message.computations)
    if not computations:
        return "it holds no computations"
    by_id = {c.id: c for c in computations}
    if len(by_id) != len(computations):
        return f"two computations have the id {_duplicate(c.id for c in computations)}"
    entry = by_id.get(message.entry_computation_id)
    if entry is None:
        name = message.entry_computation_name
        entry = next((c for c in computations if c.name == name), None)
        if entry is None or message.entry_computation_id:
            return f"its entry computation ({name or message.entry_computation_id}) is not among its computations"
    members: dict[int, set[int]] = {}
    order: dict[int, int] = {}
    for position, c in enumerate(computations):
        problem = _check_computation(c, by_id, order, members)
        if problem:
            return problem
        order[c.id] = position
    return _check_schedule(message, by_id, members) or _check_entry(message, entry)


def _check_computation(
    c: Any, by_id: dict[int, Any], before: dict[int, int], members: dict[int, set[int]]
) -> str | None:
    instructions = list(c.instructions)
    where = f"computation {c.name!r}"
    if not c.name:
        return f"the computation with id {c.id} has no name"
    if not instructions:
        return f"{where} has no instructions"
    ids = {i.id for i in instructions}
    if len(ids) != len(instructions):
        return f"two instructions of {where} have the id {_duplicate(i.id for i in instructions)}"
    members[c.id] = ids
    if c.root_id not in ids:
        return f"the root id {c.root_id} of {where} is none of its instructions"
    done: set[int] = set()
    for i in instructions:
        if not i.name or not i.opcode:
            return f"an instruction of {where} has no {'opcode' if i.name else 'name'}"
        for kind, others in (("operand", i.operand_ids), ("control predecessor", i.control_predecessor_ids)):
            for o in others:
                if o not in done:
                    return f"{i.name} in {where} has {kind} id {o}, " + (
                        "which comes only after it" if o in ids else "which does not exist"
                    )
        for called in i.called_computation_ids:
            if called not in before:
                return f"{i.name} in {where} calls computation id {called}, " + (
                    "which comes only after it" if called in by_id else "which does not exist"
                )
        done.add(i.id)
    return None


def _check_schedule(message: Any, by_id: dict[int, Any], members: dict[int, set[int]]) -> str | None:
    for entry in message.schedule.sequences:
        c = by_id.get(entry.key)
        if c is None:
            return f"its schedule names computation id {entry.key}, which does not exist"
        sequence = entry.value.instruction_ids
        where = f"the schedule of computation {c.name!r}"
        unknown = next((s for s in sequence if s not in members[c.id]), None)
        if unknown is not None:
            return f"{where} names instruction id {unknown}, which does not exist there"
        twice = _duplicate(sequence)
        if twice is not None:
            return f"{where} runs instruction id {twice} twice"
        if not sequence and c.is_fusion_computation:
            continue  # XLA:TPU lists fusions with empty sequences
        if len(sequence) != len(members[c.id]):
            return f"{where} leaves out {len(members[c.id]) - len(sequence)} of {len(members[c.id])} instructions"
        needs = {i.id: [*i.operand_ids, *i.control_predecessor_ids] for i in c.instructions}
        done: set[int] = set()
        for s in sequence:
            if not done.issuperset(needs[s]):
                return f"{where} runs instruction id {s} before what it depends on"
            done.add(s)
    return None


def _check_entry(message: Any, entry: Any) -> str | None:
    parameters = {i.parameter_number: i for i in entry.instructions if i.opcode == "parameter"}
    if sorted(parameters) != list(range(len(parameters))):
        return "its entry parameters are not numbered 0, 1, 2, ..."
    root = next(i for i in entry.instructions if i.id == entry.root_id)
    for e in message.input_output_alias.entries:
        if not _has_index(root.shape, e.output_shape_index):
            return f"its aliasing names output index {list(e.output_shape_index)}, which does not exist"
    for e in (*message.input_output_alias.entries, *message.buffer_donor.entries):
        parameter = parameters.get(e.parameter_number)
        if parameter is None or not _has_index(parameter.shape, e.parameter_shape_index):
            index = f"{e.parameter_number}, index {list(e.parameter_shape_index)}"
            return f"its aliasing names parameter {index}, which does not exist"
    return None


def _has_index(shape: Any, index: Iterable[int]) -> bool:
    for i in index:
        if shape.element_type != _TUPLE or not 0 <= i < len(shape.tuple_shapes):
            return False
        shape = shape.tuple_shapes[i]
    return True
