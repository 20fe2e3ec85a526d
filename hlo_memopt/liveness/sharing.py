"""Whether an instruction may write its result over an operand that dies there.

The rules are those of ``HloDataflowAnalysis::CanShareOperandBufferWithUser`` in XLA, without the hints that a
backend adds (the CPU backend adds none).
"""

from __future__ import annotations

from hlo_memopt.hlo.graph import Computation, Instruction, ShapeIndex
from hlo_memopt.liveness.inplace import in_place_pairs

# HloInstruction::IsElementwise
ELEMENTWISE = frozenset({
    "abs", "acos", "acosh", "add", "and", "asin", "asinh", "atan2", "atanh", "bitcast-convert", "cbrt", "ceil",
    "clamp", "clz", "compare", "complex", "convert", "copy", "copy-start", "copy-done", "cosine", "cosh",
    "count-leading-zeros", "divide", "erf", "exponential", "exponential-minus-one", "floor", "imag", "is-finite",
    "log", "log-plus-one", "logistic", "map", "maximum", "minimum", "multiply", "negate", "not", "or",
    "opt-barrier", "popcnt", "power", "real", "reduce-precision", "remainder", "round-nearest-afz",
    "round-nearest-even", "rsqrt", "select", "shift-left", "shift-right-arithmetic", "shift-right-logical", "sign",
    "sine", "sinh", "sqrt", "stochastic-convert", "subtract", "tan", "tanh", "xor", "rng",
    "constant", "iota",
})  # fmt: skip


def elementwise_on(instruction: Instruction, operand: int) -> bool:
    """Whether each output element depends on that operand only through the element at its own place."""
    if instruction.opcode == "dynamic-update-slice":
        return operand == 0
    if instruction.opcode == "fusion":
        return _elementwise_fusion(instruction, operand)
    return instruction.opcode in ELEMENTWISE


def _elementwise_fusion(fusion: Instruction, operand: int) -> bool:
    body = fusion.computation.module.computations[fusion.called[0]]
    return _uses_elementwise(body, body.parameters[operand], allow_tuple=False)


def _uses_elementwise(body: Computation, parameter: Instruction, allow_tuple: bool) -> bool:
    """Every transitive use of the parameter inside a fusion is elementwise."""
    seen = {parameter.id}
    stack = [parameter]
    while stack:
        current = stack.pop()
        for user in body.users[current.id]:
            if not (allow_tuple and user.opcode == "tuple"):
                for n, o in enumerate(user.operands):
                    if o == current.id and not elementwise_on(user, n):
                        return False
            if user.id not in seen:
                seen.add(user.id)
                stack.append(user)
    return True


def can_share(operand: Instruction, operand_index: ShapeIndex, user: Instruction, user_index: ShapeIndex) -> bool:
    """Whether ``user`` at ``user_index`` may take over ``operand``'s buffer at ``operand_index``.

    ``operand`` must be an operand of ``user``.
    """
    if operand.opcode == "constant":
        return False
    if (
        user.opcode == "custom-call"
        and user_index == (1,)
        and user.custom_call_target in ("__cublas$lt$matmul", "__cublas$lt$matmul$f8")
    ):
        return False
    if operand.shape.at(operand_index) != user.shape.at(user_index):
        return False
    numbers = [n for n, o in enumerate(user.operands) if o == operand.id]
    op = user.opcode
    if any(
        p.output_index == user_index and p.operand in numbers and p.operand_index == operand_index
        for p in in_place_pairs(user)
    ):
        return True
    if op == "fusion":
        body = user.computation.module.computations[user.called[0]]
        parameter = body.parameters[numbers[0]]
        if user.fusion_kind in ("kLoop", "kInput"):
            return _uses_elementwise(body, parameter, allow_tuple=True)
        if user.fusion_kind == "kOutput" and body.root.opcode == "add":
            return _adds_to_product(body, parameter)
    if op in ("while", "conditional"):
        return True
    if op in ("dynamic-update-slice", "scatter", "triangular-solve", "set-dimension-size"):
        return numbers == [1 if op == "triangular-solve" else 0]
    if op == "sort":
        if len(operand.computation.users[operand.id]) != 1:
            return False
        return len(user.operands) == 1 or numbers == [user_index[0]]
    if op == "call":
        return False  # its parameter is a position of the same value, which then has more than one buffer use
    return elementwise_on(user, numbers[0])


def _adds_to_product(body: Computation, parameter: Instruction) -> bool:
    """Output fusion ``add(dot or convolution, parameter)``: the parameter's only use is that add."""
    root = body.root
    sides = body.operands_of(root)
    product = next((n for n, s in enumerate(sides) if s.opcode in ("dot", "convolution")), None)
    if product is None:
        return False
    users = body.users[parameter.id]
    uses = [n for n, o in enumerate(root.operands) if o == parameter.id]
    return len(users) == 1 and users[0] is root and uses == [1 - product]
