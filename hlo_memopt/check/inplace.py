"""Which outputs of an instruction XLA puts, by necessity, into one of its operands (facts of XLA's AliasInfo).

Where a backend may follow its own rule (libtpu's is not public) the wider reading is taken: a pair too many can
only make the checker stricter, a pair too few would make it blind.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Index = tuple[int, ...]


class Pair(NamedTuple):
    """Output ``output`` of an instruction lies where operand ``operand`` lies at ``place``."""

    output: Index
    operand: int
    place: Index


TUPLE = 13

# Opcodes that write an operand in place, or can carry such pairs in output_operand_aliasing.
WRITERS = frozenset(
    {
        "all-reduce-start",
        "async-start",
        "collective-permute",
        "collective-permute-start",
        "custom-call",
        "dynamic-update-slice",
        "fusion",
        "ragged-all-to-all",
        "scatter",
        "set-dimension-size",
    }
)

# A fusion holds one of these (or a further fusion) if an output of it lies in one of its parameters.
_FUSED_WRITERS = WRITERS - {"async-start", "all-reduce-start", "collective-permute-start"}

# Instructions that a backend may look through between a fusion's output and the writer behind it. XLA's default is
# bitcast alone; backends may add their own.
_LOOK_THROUGH = frozenset({"bitcast", "bitcast-convert", "domain", "opt-barrier", "reshape"})


class InPlace:
    """The in-place pairs of a module's instructions; bodies of fusions are read only where they hold a writer."""

    def __init__(self, computations: dict[int, Any], opcodes: dict[int, set[str]]) -> None:
        self._computations = computations
        self._opcodes = opcodes
        self._bodies: dict[int, dict[int, Any]] = {}

    def pairs(self, i: Any) -> list[Pair]:
        """The pairs of one instruction."""
        opcode = i.opcode
        if opcode not in WRITERS:
            return []
        if opcode in ("dynamic-update-slice", "set-dimension-size"):
            return [Pair((), 0, ())]
        if opcode == "scatter":
            return _one_each((len(i.operand_ids) - 1) // 2)
        if opcode == "all-reduce-start":
            return _one_each(len(i.operand_ids))
        if opcode == "ragged-all-to-all":
            return [Pair((), 1, ())]
        if opcode == "collective-permute":
            return [Pair((), 1, ())] if len(i.operand_ids) == 4 else []
        if opcode == "collective-permute-start":
            return [Pair((1,), 1, ())] if len(i.operand_ids) == 4 else []
        told = [
            Pair(tuple(a.output_shape_index), a.operand_index, tuple(a.operand_shape_index))
            for a in i.output_operand_aliasing
        ]
        return told + self._fused(i) if opcode == "fusion" else told

    def _fused(self, fusion: Any) -> list[Pair]:
        body = fusion.called_computation_ids[0] if fusion.called_computation_ids else -1
        if self._opcodes.get(body, set()).isdisjoint(_FUSED_WRITERS):
            return []
        computation = self._computations[body]
        found = []
        for output in _leaves(fusion.shape):
            writer, at = self._source(body, computation.root_id, output)
            for pair in self.pairs(writer):
                if pair.output != at or pair.operand >= len(writer.operand_ids):
                    continue
                origin, index = self._source(body, writer.operand_ids[pair.operand], pair.place)
                if origin.opcode == "fusion":
                    for inner in self.pairs(origin):
                        if inner.output == index:
                            origin, index = self._source(body, origin.operand_ids[inner.operand], inner.place)
                            break
                if origin.opcode == "parameter":
                    found.append(Pair(output, origin.parameter_number, index))
        return found

    def _source(self, body: int, key: int, index: Index) -> tuple[Any, Index]:
        """Back through tuples and no-ops to the instruction that makes the value at ``index`` of ``key``."""
        table = self._bodies.get(body)
        if table is None:
            table = self._bodies[body] = {i.id: i for i in self._computations[body].instructions}
        i = table[key]
        while True:
            if i.opcode == "tuple" and index:
                i, index = table[i.operand_ids[index[0]]], index[1:]
            elif i.opcode == "get-tuple-element":
                i, index = table[i.operand_ids[0]], (i.tuple_index, *index)
            elif i.opcode in _LOOK_THROUGH:
                i = table[i.operand_ids[0]]
            else:
                return i, index


def _one_each(count: int) -> list[Pair]:
    if count == 1:
        return [Pair((), 0, ())]
    return [Pair((n,), n, ()) for n in range(count)]


def _leaves(shape: Any, index: Index = ()) -> list[Index]:
    if shape.element_type != TUPLE:
        return [index]
    return [leaf for n, s in enumerate(shape.tuple_shapes) for leaf in _leaves(s, (*index, n))]
