"""Values, where they can be seen, and which of them share a buffer by necessity.

The analysis follows XLA's HloDataflowAnalysis (SSA form: a value that a loop or a conditional merges gets a value
of its own) and HloAliasAnalysis (a buffer is a set of values that must lie at one address). It walks the module
once from the entry, callee computations at their call site: after XLA's flattening each has one caller.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hlo_memopt.hlo.graph import Computation, Instruction, Module, Shape, ShapeIndex
from hlo_memopt.liveness.inplace import in_place_pairs
from hlo_memopt.liveness.sizes import shape_bytes
from hlo_memopt.platforms import Platform


class Value:
    """What one instruction writes at one shape index.

    ``positions``: every (instruction, index) at which the value can be seen, the defining one first.
    """

    __slots__ = ("bytes", "id", "index", "instruction", "positions", "replaced_by", "shape")

    def __init__(self, id: int, instruction: Instruction, index: ShapeIndex, shape: Shape, bytes: int) -> None:
        self.id = id
        self.instruction = instruction
        self.index = index
        self.shape = shape
        self.bytes = bytes
        self.positions: list[tuple[Instruction, ShapeIndex]] = []
        self.replaced_by: Value | None = None

    def __repr__(self) -> str:
        return f"{self.instruction.name}{{{','.join(map(str, self.index))}}}"


Tree = dict[ShapeIndex, Value]


class Buffer:
    """Values that lie at one address. ``bytes`` is the largest of theirs."""

    __slots__ = ("bytes", "id", "values")

    def __init__(self, id: int, values: list[Value]) -> None:
        self.id = id
        self.values = values
        self.bytes = max(v.bytes for v in values)

    def __repr__(self) -> str:
        return f"<buffer {self.id}: {', '.join(map(repr, self.values[:4]))}, {self.bytes} bytes>"


def _resolve(value: Value) -> Value:
    while value.replaced_by is not None:
        value = value.replaced_by
    return value


class Dataflow:
    """Values and buffers of the computations that hold buffers of their own (entry, loops, branches, calls).

    Attributes:
      trees: instruction id -> {shape index: value seen there}.
      values: in order of definition.
      buffers, buffer_of: buffer of each value (by ``Value.id``).
      visited: ids of the computations walked, callers first.
      call_site: computation id -> the instruction that calls it.
    """

    def __init__(self, module: Module, platform: Platform) -> None:
        self.module = module
        self.platform = platform
        self.trees: dict[int, Tree] = {}
        self.values: list[Value] = []
        self.visited: list[int] = []
        self.call_site: dict[int, Instruction] = {}
        self.cache: dict[str, Any] = {}  # what later stages derive once from this and nothing else
        self._merged: list[tuple[Value, Value]] = []
        self._sizes: dict[int, int] = {}
        self._walk(module.entry, None)
        self._walked = set(self.visited)
        self._settle()
        self._join_buffers()

    # -- values ---------------------------------------------------------------------------------------------

    def _new(self, instruction: Instruction, index: ShapeIndex, shape: Shape) -> Value:
        size = self._sizes.get(id(shape))
        if size is None:
            size = self._sizes[id(shape)] = shape_bytes(shape, self.platform)
        value = Value(len(self.values), instruction, index, shape, size)
        self.values.append(value)
        return value

    def _fresh(self, instruction: Instruction) -> Tree:
        return {i: self._new(instruction, i, s) for i, s in instruction.shape.subshapes()}

    def _walk(self, computation: Computation, arguments: list[Tree] | None) -> Tree:
        """Values of a computation, given its parameters' trees (None: the entry's are new). Returns the root's."""
        self.visited.append(computation.id)
        trees = self.trees
        for instruction in computation.instructions:
            if instruction.opcode == "parameter" and arguments is not None:
                tree = arguments[instruction.parameter_number]
            else:
                rule = _RULES.get(instruction.opcode)
                tree = rule(self, instruction) if rule is not None else self._fresh(instruction)
            trees[instruction.id] = tree
        return trees[computation.root_id]

    def _operand(self, instruction: Instruction, i: int) -> Tree:
        return self.trees[instruction.operands[i]]

    def _call(self, instruction: Instruction, computation_id: int, arguments: list[Tree]) -> Tree:
        if computation_id in self.call_site:
            raise ValueError(
                f"computation {self.module.computations[computation_id].name!r} is called from more than one place; "
                "XLA flattens calls before it schedules"
            )
        self.call_site[computation_id] = instruction
        return self._walk(self.module.computations[computation_id], arguments)

    # -- instructions that pass values on -------------------------------------------------------------------

    def _tuple(self, instruction: Instruction) -> Tree:
        tree: Tree = {(): self._new(instruction, (), instruction.shape)}
        for n, operand in enumerate(instruction.operands):
            for index, value in self.trees[operand].items():
                tree[(n, *index)] = value
        return tree

    def _element(self, instruction: Instruction) -> Tree:
        return _sub(self._operand(instruction, 0), (instruction.tuple_index,), instruction.shape)

    def _forward(self, instruction: Instruction) -> Tree:
        return self._operand(instruction, 0)

    def _while(self, instruction: Instruction) -> Tree:
        init = self._operand(instruction, 0)
        # XLA's proto lists the body first, then the condition
        body, condition = (self.module.computations[c] for c in instruction.called)
        at_body = self._phi(body.parameters[0], init)
        root = self._call(instruction, body.id, [at_body])
        changing = {i for i in init if _resolve(root[i]) is not _resolve(at_body[i])}
        for i in init:
            if i not in changing:
                at_body[i].replaced_by = _resolve(init[i])
        at_condition = {
            i: self._new(condition.parameters[0], i, v.shape) if i in changing else v for i, v in init.items()
        }
        self._call(instruction, condition.id, [at_condition])
        result = {i: self._new(instruction, i, v.shape) if i in changing else v for i, v in init.items()}
        for i in changing:
            self._merged += [(init[i], at_body[i]), (init[i], root[i]), (init[i], at_condition[i])]
            self._merged.append((init[i], result[i]))
        return result

    def _phi(self, parameter: Instruction, like: Tree) -> Tree:
        return {i: self._new(parameter, i, v.shape) for i, v in like.items()}

    def _conditional(self, instruction: Instruction) -> Tree:
        roots = [
            self._call(instruction, c, [self._operand(instruction, n + 1)]) for n, c in enumerate(instruction.called)
        ]
        tree: Tree = {}
        for index, value in roots[0].items():
            branches = [_resolve(r[index]) for r in roots]
            if all(b is branches[0] for b in branches):
                tree[index] = value
            else:
                tree[index] = self._new(instruction, index, value.shape)
                self._merged += [(tree[index], b) for b in branches]
        return tree

    def _plain_call(self, instruction: Instruction) -> Tree:
        return self._call(instruction, instruction.called[0], [self.trees[o] for o in instruction.operands])

    def _passing_on(self, instruction: Instruction, *parts: tuple[ShapeIndex, Tree]) -> Tree:
        """New values everywhere but under the given prefixes, which show the given trees."""
        known: Tree = {}
        for prefix, tree in parts:
            known.update({(*prefix, *index): value for index, value in tree.items()})
        return {
            i: known[i] if i in known else self._new(instruction, i, s) for i, s in instruction.shape.subshapes()
        }

    def _async_start(self, instruction: Instruction) -> Tree:
        """((operands), results, contexts)"""
        operands = [self.trees[o] for o in instruction.operands]
        parts: list[tuple[ShapeIndex, Tree]] = [((0, n), tree) for n, tree in enumerate(operands)]
        callee = self.module.computations[instruction.called[0]]
        if callee.id in self.module.schedule:
            parts.append(((1,), self._call(instruction, callee.id, operands)))
        return self._passing_on(instruction, *parts)

    def _async_done(self, instruction: Instruction) -> Tree:
        return _sub(self._operand(instruction, 0), (1,), instruction.shape)

    def _copy_start(self, instruction: Instruction) -> Tree:
        """(destination, source, context): the source is the operand."""
        return self._passing_on(instruction, ((1,), self._operand(instruction, 0)))

    def _gather_start(self, instruction: Instruction) -> Tree:
        """(operands, results, ...): the operands are passed on."""
        if len(instruction.operands) == 1 or not instruction.shape.at((0,)).is_tuple:
            return self._passing_on(instruction, ((0,), self._operand(instruction, 0)))
        return self._passing_on(instruction, *(((0, n), self.trees[o]) for n, o in enumerate(instruction.operands)))

    def _first_of_pair(self, instruction: Instruction) -> Tree:
        return _sub(self._operand(instruction, 0), (0,), instruction.shape)

    def _send(self, instruction: Instruction) -> Tree:
        return self._passing_on(instruction, ((0,), self._operand(instruction, 0)))

    def _recv_done(self, instruction: Instruction) -> Tree:
        received = _sub(self._operand(instruction, 0), (0,), instruction.shape.at((0,)))
        return self._passing_on(instruction, ((0,), received))

    # -- afterwards -----------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Drop replaced values and write down every live value's positions."""
        replaced = any(v.replaced_by is not None for v in self.values)
        if replaced:
            done: dict[int, Tree] = {}
            for key, tree in self.trees.items():
                settled = done.get(id(tree))
                if settled is None:
                    settled = done[id(tree)] = {i: _resolve(v) for i, v in tree.items()}
                self.trees[key] = settled
            self._merged = [(_resolve(a), _resolve(b)) for a, b in self._merged]
            self.values = [v for v in self.values if v.replaced_by is None]
        self._number()
        for computation_id in self.visited:
            for instruction in self.module.computations[computation_id].instructions:
                for index, value in self.trees[instruction.id].items():
                    if value.instruction is instruction and value.index == index:
                        value.positions.insert(0, (instruction, index))
                    else:
                        value.positions.append((instruction, index))

    def _number(self) -> None:
        """Number the values as XLA does, which breaks ties by it: by place in the module, merged values last."""
        place = {
            instruction.id: n
            for n, instruction in enumerate(
                i for c in self.module.computations.values() if c.id in self._walked for i in c.instructions
            )
        }
        entry = self.module.entry.id

        def key(value: Value) -> tuple[bool, int]:
            at = value.instruction
            merged = at.opcode in ("while", "conditional") or (at.opcode == "parameter" and at.computation.id != entry)
            return (merged, -1 if merged else place[at.id])

        self.values.sort(key=key)
        for n, value in enumerate(self.values):
            value.id = n

    def _pairs_in_one_buffer(self) -> Iterable[tuple[Value, Value]]:
        yield from self._merged
        for computation_id in self.visited:
            for instruction in self.module.computations[computation_id].instructions:
                if instruction.opcode in _MAY_BE_IN_PLACE:
                    tree = self.trees[instruction.id]
                    for pair in in_place_pairs(instruction):
                        yield tree[pair.output_index], self._operand(instruction, pair.operand)[pair.operand_index]
        root = self.trees[self.module.entry.root_id]
        parameters = {p.parameter_number: p for p in self.module.entry.parameters}
        for alias in self.module.aliases:
            yield root[alias.output_index], self.trees[parameters[alias.parameter].id][alias.parameter_index]

    def _join_buffers(self) -> None:
        leader = list(range(len(self.values)))

        def find(x: int) -> int:
            while leader[x] != x:
                leader[x] = leader[leader[x]]
                x = leader[x]
            return x

        for a, b in self._pairs_in_one_buffer():
            x, y = find(a.id), find(b.id)
            if x != y:
                leader[max(x, y)] = min(x, y)
        members: dict[int, list[Value]] = {}
        for value in self.values:
            members.setdefault(find(value.id), []).append(value)
        self.buffers = [Buffer(n, values) for n, values in enumerate(members.values())]
        self.buffer_of: list[Buffer] = [None] * len(self.values)  # type: ignore[list-item]
        for buffer in self.buffers:
            for value in buffer.values:
                self.buffer_of[value.id] = buffer


_MAY_BE_IN_PLACE = frozenset({
    "fusion", "dynamic-update-slice", "set-dimension-size", "scatter", "all-reduce-start", "custom-call",
    "async-start", "ragged-all-to-all", "collective-permute", "collective-permute-start",
})  # fmt: skip

_RULES = {
    "tuple": Dataflow._tuple,
    "get-tuple-element": Dataflow._element,
    "bitcast": Dataflow._forward,
    "opt-barrier": Dataflow._forward,
    "add-dependency": Dataflow._forward,
    "domain": Dataflow._forward,
    "while": Dataflow._while,
    "conditional": Dataflow._conditional,
    "call": Dataflow._plain_call,
    "async-start": Dataflow._async_start,
    "async-update": Dataflow._forward,
    "async-done": Dataflow._async_done,
    "copy-start": Dataflow._copy_start,
    "copy-done": Dataflow._first_of_pair,
    "all-gather-start": Dataflow._gather_start,
    "all-gather-done": Dataflow._async_done,
    "collective-permute-start": Dataflow._gather_start,
    "collective-permute-done": Dataflow._async_done,
    "all-reduce-done": Dataflow._forward,
    "send": Dataflow._send,
    "recv-done": Dataflow._recv_done,
}


def _sub(tree: Tree, prefix: ShapeIndex, shape: Shape) -> Tree:
    """The part of ``tree`` under ``prefix``, whose shape is ``shape``."""
    if shape.tuple_shapes is None:
        return {(): tree[prefix]}
    return {i: tree[(*prefix, *i)] for i, _ in shape.subshapes()}

