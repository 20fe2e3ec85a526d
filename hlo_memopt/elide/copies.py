"""Copies of donated arguments that nobody needs: their readers may read the argument itself.

XLA copies a donated argument if its result could be written before the last read; it does so before there is a
schedule. Where the given schedule reads first, the copy is for nothing, and stays so in every order that keeps the
readers of an argument before its writer, as all of ours do.
"""

from __future__ import annotations

from hlo_memopt.hlo.graph import Instruction, Module
from hlo_memopt.liveness.dataflow import Dataflow, Value
from hlo_memopt.liveness.sharing import ELEMENTWISE, can_share

# Elementwise for XLA, but not for our checker, or not always
_ODD = frozenset({"copy-done", "copy-start", "dynamic-update-slice", "map", "opt-barrier", "rng", "stochastic-convert"})
# These hand their operand on, or to another computation, or read it later than they stand.
_HANDING_ON = frozenset({
    "add-dependency", "bitcast", "call", "conditional", "domain", "get-tuple-element", "opt-barrier", "send", "tuple",
    "while",
})  # fmt: skip


def needless_copies(module: Module, dataflow: Dataflow) -> list[str]:
    """Names of the copies, in the entry computation, that can be left out of a scheduled module.

    Leaving them out is `rewrite.remove_copies`; that it is safe is proven by `check.check_rewrite`.
    """
    entry = module.entry
    position = {number: n for n, number in enumerate(module.schedule[entry.id])}
    buffers = {(v.instruction.id, v.index): buffer for buffer in dataflow.buffers for v in buffer.values}
    waiting = {w for i in entry.instructions for w in i.control_predecessors}
    donated = {a.parameter for a in module.aliases}
    gone = []
    for copy in entry.instructions:
        if copy.opcode != "copy" or copy.control_predecessors or copy.id in waiting or copy.is_root:
            continue
        source = entry.by_id[copy.operands[0]]
        if source.opcode != "parameter" or source.parameter_number not in donated or source.shape != copy.shape:
            continue
        if copy.shape.is_tuple or not entry.users[copy.id] or len(buffers[copy.id, ()].values) != 1:
            continue
        written = [v for v in buffers[source.id, ()].values if v.instruction.id != source.id]
        if any(v.instruction.computation.id != entry.id for v in written):
            continue
        if all(_may_read(user, copy, written, position) for user in entry.users[copy.id]):
            gone.append(copy.name)
    return gone


def _may_read(user: Instruction, copy: Instruction, written: list[Value], position: dict[int, int]) -> bool:
    """Whether ``user`` may read the argument itself: before anything is written there, or where it writes itself."""
    if user.opcode in _HANDING_ON or user.opcode.endswith(("-start", "-update", "-done")):
        return False
    for value in written:
        writer = value.instruction
        if writer.id == user.id:
            if not (_plainly_elementwise(user) and can_share(copy, (), user, value.index)):
                return False
        elif position[writer.id] < position[user.id]:
            return False
    return True


def _plainly_elementwise(user: Instruction) -> bool:
    if user.opcode != "fusion":
        return user.opcode in ELEMENTWISE - _ODD
    body = user.computation.module.computations[user.called[0]]
    return all(i.opcode not in _ODD and (i.opcode != "fusion" or _plainly_elementwise(i)) for i in body.instructions)
