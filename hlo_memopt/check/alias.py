"""The checker's own alias analysis: which values share one buffer by necessity, and who reads and writes them.

Every array of every instruction is a node; an instruction that only forwards (tuple, get-tuple-element, bitcast, a
"-done", a while's result, ...) shows its operand's nodes. Nodes that XLA must put into one buffer are joined: in-place
pairs, a while's init, parameters and body root, a branch's root and its conditional, a callee's parameters and root
and its call, a donated parameter and the output written into it. A set of joined nodes is one buffer; `events`
tells which instructions of a computation read or write it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hlo_memopt.check.errors import PlanCheckError
from hlo_memopt.check.inplace import TUPLE, WRITERS, InPlace

READ, WRITE = 1, 2

# An array is an int, a tuple of shapes a (nested) tuple. Node 0 stands for all tokens: they have no buffer.
Nodes = Any
_TOKEN_TYPE = 17

# These touch no array themselves.
_FORWARD = frozenset({"add-dependency", "bitcast", "domain", "get-tuple-element", "opt-barrier", "tuple"})
# Output index 0 of these is their operand (or the tuple of their operands), alive until the matching done.
_STARTS = frozenset({"all-gather-start", "collective-permute-start", "send"})
# (opcode -> the part of the operand that it hands on)
_DONES: dict[str, tuple[int, ...]] = {
    "all-gather-done": (1,),
    "all-reduce-done": (),
    "async-done": (1,),
    "async-update": (),
    "collective-permute-done": (1,),
    "copy-done": (0,),
}
_SPECIAL = (
    _FORWARD
    | _STARTS
    | set(_DONES)
    | {"async-start", "call", "conditional", "copy", "copy-start", "parameter", "recv-done", "while"}
)
_PAIRED = ("-start", "-update", "-done")
_KNOWN_PAIRED = _STARTS | set(_DONES) | {"all-reduce-start", "async-start", "copy-start", "recv-done", "send-done"}
_CALLERS = frozenset({"async-start", "call", "conditional", "while"})


class AliasSets:
    """The must-alias sets of one module."""

    def __init__(self, module: Any, computations: dict[int, Any], opcodes: dict[int, set[str]]) -> None:
        self._computations = computations
        self._inplace = InPlace(computations, opcodes)
        self._parent: list[int] = [0]
        self._nodes: dict[int, Nodes] = {}  # instruction -> its nodes
        self._parameters: dict[int, dict[int, Nodes]] = {}  # computation -> parameter number -> nodes
        self._touched: dict[int, dict[int, int]] = {}
        self._shared: set[int] | None = None
        strange = {o for found in opcodes.values() for o in found if o.endswith(_PAIRED)} - _KNOWN_PAIRED
        if strange:  # which of its buffers live on between its halves is not known
            raise PlanCheckError(f"the checker does not know the asynchronous opcode {min(strange)!r}")
        entry = module.entry_computation_id
        for c in module.computations:
            if not c.is_fusion_computation:
                self._visit(c.id)
        self._join_donated(module, entry)

    def events(self, computation: int) -> Iterator[tuple[int, int, int]]:
        """(set, instruction, READ | WRITE bits) over the instructions as listed; sets of one node are left out."""
        self._visit(computation)
        yield from self._events(computation)

    def lying_in(self, instruction: int, s: int) -> list[tuple[int, ...]]:
        """Where in an instruction's result the arrays of a set are: shape indices."""

        def leaves(nodes: Nodes, index: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
            if isinstance(nodes, tuple):
                for n, part in enumerate(nodes):
                    yield from leaves(part, (*index, n))
            elif nodes and self._find(nodes) == s:
                yield index

        return list(leaves(self._nodes[instruction], ()))

    # -- union-find -------------------------------------------------------------------------------------------------

    def _find(self, n: int) -> int:
        parent = self._parent
        while parent[n] != n:
            parent[n] = n = parent[parent[n]]
        return n

    def _join(self, x: Nodes, y: Nodes) -> None:
        """One buffer for each array of two equal structures; arrays without a partner are left alone."""
        if isinstance(x, tuple) and isinstance(y, tuple):
            for a, b in zip(x, y, strict=False):
                self._join(a, b)
        elif isinstance(x, int) and isinstance(y, int) and x and y:
            a, b = self._find(x), self._find(y)
            if a != b:
                self._parent[b] = a

    def _fresh(self, shape: Any) -> Nodes:
        kind = shape.element_type
        if kind == TUPLE:
            return tuple(self._fresh(s) for s in shape.tuple_shapes)
        if kind == _TOKEN_TYPE:
            return 0
        self._parent.append(len(self._parent))
        return len(self._parent) - 1

    # -- building ---------------------------------------------------------------------------------------------------

    def _visit(self, computation: int) -> None:
        if computation in self._parameters:
            return
        self._parameters[computation] = parameters = {}
        self._shared = None
        nodes, special = self._nodes, _SPECIAL
        for i in self._computations[computation].instructions:
            opcode = i.opcode
            if opcode not in special:
                nodes[i.id] = self._fresh(i.shape)
            elif opcode == "parameter":
                nodes[i.id] = parameters[i.parameter_number] = self._fresh(i.shape)
            else:
                nodes[i.id] = self._forwarded(i, opcode)
            if opcode in WRITERS:
                for pair in self._inplace.pairs(i):
                    source = _at(nodes[i.operand_ids[pair.operand]], pair.place)
                    self._join(_at(nodes[i.id], pair.output), source)

    def _forwarded(self, i: Any, opcode: str) -> Nodes:
        operands = [self._nodes[o] for o in i.operand_ids]
        if opcode == "tuple":
            return tuple(operands)
        if opcode == "get-tuple-element":
            return operands[0][i.tuple_index]
        if opcode in _FORWARD:
            return operands[0]
        if opcode == "copy":  # of a tuple: its arrays are handed on
            return operands[0] if isinstance(operands[0], tuple) else self._fresh(i.shape)
        if opcode in _DONES:
            return _at(operands[0], _DONES[opcode])
        if opcode == "recv-done":
            return (operands[0][0], 0)
        if opcode == "while":
            return self._while(i, operands[0])
        if opcode == "conditional":
            return self._conditional(i, operands)
        if opcode == "call":
            return self._called(i.called_computation_ids[0], operands)
        made = self._fresh(i.shape)
        if opcode == "copy-start":
            return (made[0], operands[0], *made[2:])
        if opcode == "async-start":
            return (tuple(operands), self._called(i.called_computation_ids[0], operands), *made[2:])
        several = isinstance(made[0], tuple) and not isinstance(operands[0], tuple)
        return (tuple(operands) if several else operands[0], *made[1:])

    def _called(self, callee: int, operands: list[Nodes]) -> Nodes:
        self._visit(callee)
        for number, nodes in self._parameters[callee].items():
            if number < len(operands):
                self._join(nodes, operands[number])
        return self._nodes[self._computations[callee].root_id]

    def _while(self, i: Any, init: Nodes) -> Nodes:
        if len(i.called_computation_ids) != 2:
            raise PlanCheckError(f"while {i.name!r} does not call a body and a condition")
        body, condition = i.called_computation_ids
        self._called(condition, [init])
        self._join(self._called(body, [init]), init)
        return init

    def _conditional(self, i: Any, operands: list[Nodes]) -> Nodes:
        made = self._fresh(i.shape)
        for branch, operand in zip(i.called_computation_ids, operands[1:], strict=True):
            self._join(made, self._called(branch, [operand]))
        return made

    def _join_donated(self, module: Any, entry: int) -> None:
        root = self._nodes[self._computations[entry].root_id]
        for alias in module.input_output_alias.entries:
            if alias.kind:
                source = _at(self._parameters[entry][alias.parameter_number], tuple(alias.parameter_shape_index))
                self._join(source, _at(root, tuple(alias.output_shape_index)))

    # -- reading ----------------------------------------------------------------------------------------------------

    def _shared_sets(self) -> set[int]:
        """Sets of at least two nodes."""
        if self._shared is None:
            self._shared = {self._find(n) for n, p in enumerate(self._parent) if n != p}
        return self._shared

    def _sets(self, nodes: Nodes) -> Iterator[int]:
        """The shared sets of these nodes."""
        if isinstance(nodes, tuple):
            for n in nodes:
                yield from self._sets(n)
        else:
            found = self._find(nodes)
            if found in self._shared_sets():
                yield found

    def _events(self, computation: int) -> Iterator[tuple[int, int, int]]:
        nodes = self._nodes
        for i in self._computations[computation].instructions:
            opcode = i.opcode
            if opcode in _FORWARD or opcode == "parameter":
                continue
            touched: dict[int, int] = {}
            for operand in dict.fromkeys(i.operand_ids):
                for s in self._sets(nodes[operand]):
                    touched[s] = READ
            if opcode in _CALLERS:
                for callee in i.called_computation_ids:
                    for s, bits in self._seen_from_outside(callee).items():
                        touched[s] = touched.get(s, 0) | bits
            if opcode not in ("call", "while"):  # these write what their callees write
                for s in self._written(i, opcode):
                    touched[s] = touched.get(s, 0) | WRITE
            for s, bits in touched.items():
                yield s, i.id, bits

    def _written(self, i: Any, opcode: str) -> Iterator[int]:
        made = self._nodes[i.id]
        if opcode in _STARTS or opcode == "async-start":
            yield from self._sets(made[1:])  # index 0 is the operand, only read
        elif opcode == "async-update":
            yield from self._sets(made[1])
        elif opcode == "copy-start":
            yield from self._sets((made[0], *made[2:]))
        elif opcode != "copy" or isinstance(made, int):
            yield from self._sets(made)

    def _seen_from_outside(self, computation: int) -> dict[int, int]:
        """What a computation does to the sets that its parameters and its root belong to."""
        known = self._touched.get(computation)
        if known is None:
            root = self._nodes[self._computations[computation].root_id]
            visible = set(self._sets((*self._parameters[computation].values(), root)))
            known = self._touched[computation] = {}
            for s, _, bits in self._events(computation):
                if s in visible:
                    known[s] = known.get(s, 0) | bits
        return known


def _at(nodes: Nodes, index: tuple[int, ...]) -> Nodes:
    for k in index:
        nodes = nodes[k]
    return nodes
