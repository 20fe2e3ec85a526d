"""Which outputs XLA forces into the buffer of an operand.

The rules are those of ``AliasInfo::GetInPlaceInputOutputPairs`` in XLA (xla/hlo/analysis/alias_info.cc):
in-place updates, fusions whose root is one, and declared output_operand_aliasing.
"""

from __future__ import annotations

from hlo_memopt.hlo.graph import Computation, InPlacePair, Instruction, ShapeIndex

_FIRST_OPERAND = frozenset({"dynamic-update-slice", "set-dimension-size"})
_ALL_OPERANDS = frozenset({"all-reduce-start"})
_DECLARED = frozenset({"custom-call", "async-start"})
# no-ops between a fusion's parameter and its in-place root
_TRANSPARENT = frozenset({"bitcast"})


def in_place_pairs(instruction: Instruction) -> list[InPlacePair]:
    """Output/operand pairs of ``instruction`` that must lie in one buffer."""
    op = instruction.opcode
    if op == "fusion":
        return [*_fusion_pairs(instruction), *instruction.output_operand_aliasing]
    if op in _FIRST_OPERAND:
        return [InPlacePair((), 0, ())]
    if op == "scatter":
        count = (len(instruction.operands) - 1) // 2
        return _pairwise(count)
    if op in _ALL_OPERANDS:
        if b"nvshmem" in instruction.backend_config.lower():
            return []
        return _pairwise(len(instruction.operands))
    if op in _DECLARED:
        return instruction.output_operand_aliasing
    if op == "ragged-all-to-all":
        return [InPlacePair((), 1, ())]
    if op in ("collective-permute", "collective-permute-start") and len(instruction.operands) == 4:
        prefix: ShapeIndex = (1,) if op.endswith("start") else ()
        target = instruction.computation.by_id[instruction.operands[1]].shape
        elements = range(len(target.tuple_shapes)) if target.tuple_shapes is not None else ()
        return [InPlacePair(prefix, 1, ()), *(InPlacePair((*prefix, i), 1, (i,)) for i in elements)]
    return []


def _pairwise(count: int) -> list[InPlacePair]:
    if count == 1:
        return [InPlacePair((), 0, ())]
    return [InPlacePair((i,), i, ()) for i in range(count)]


def _fusion_pairs(fusion: Instruction) -> list[InPlacePair]:
    """A fusion output that comes out of an in-place update of a parameter lies in that operand's buffer."""
    body = fusion.computation.module.computations[fusion.called[0]]
    out = []
    for index, _ in fusion.shape.leaves():
        source, at = _follow(body, body.root, index)
        for pair in in_place_pairs(source):
            if pair.output_index != at or source.opcode == "parameter":
                continue
            inner, inner_index = _follow(body, body.by_id[source.operands[pair.operand]], pair.operand_index)
            if inner.opcode == "fusion":
                inner, inner_index = _through_nested(body, inner, inner_index)
            if inner.opcode == "parameter":
                out.append(InPlacePair(index, inner.parameter_number, inner_index))
            break
    return out


def _through_nested(body: Computation, inner: Instruction, index: ShapeIndex) -> tuple[Instruction, ShapeIndex]:
    for pair in in_place_pairs(inner):
        if pair.output_index == index:
            return _follow(body, body.by_id[inner.operands[pair.operand]], pair.operand_index)
    return inner, index


def _follow(body: Computation, instruction: Instruction, index: ShapeIndex) -> tuple[Instruction, ShapeIndex]:
    """Back through tuple, get-tuple-element and no-ops to where a value comes from."""
    while True:
        op = instruction.opcode
        if op == "tuple" and index:
            instruction, index = body.by_id[instruction.operands[index[0]]], index[1:]
        elif op == "get-tuple-element":
            index = (instruction.tuple_index, *index)
            instruction = body.by_id[instruction.operands[0]]
        elif op in _TRANSPARENT and not index:
            instruction = body.by_id[instruction.operands[0]]
        else:
            return instruction, index
