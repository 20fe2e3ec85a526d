"""StableHLO, text or bytecode (portable artifacts too), -> HloModuleProto by jaxlib's own parser and converter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hlo_memopt.hlo.errors import InputError, parser_message
from hlo_memopt.hlo.isolated import Parsed


@contextmanager
def mlir_module(data: bytes, file: str) -> Iterator[Any]:
    """``data`` parsed, with JAX's dialects, inside their context."""
    from jax.interpreters import mlir
    from jaxlib import _jax
    from jaxlib.mlir import ir

    with mlir.make_ir_context() as context, ir.Location.unknown():
        try:
            if b"StableHLO_v" in data[:32]:  # a portable artifact, as jax.export writes it
                module = _jax.mlir.deserialize_portable_artifact(data, context)
            else:
                module = ir.Module.parse(data)
        except Exception as error:
            binary = data.startswith(b"ML\xefR")
            advice = (
                "write it again, or upgrade jaxlib if a newer one wrote it" if binary else "correct or dump it again"
            )
            raise InputError(file, f"is StableHLO that MLIR cannot read: {parser_message(error)}", advice) from None
        yield module


def _number(module: Any, key: str) -> int:
    from jaxlib.mlir import ir

    attributes = module.operation.attributes
    try:
        return max(1, int(ir.IntegerAttr(attributes[key]).value)) if key in attributes else 1
    except ValueError:
        return 1


def convert(data: bytes, file: str) -> Parsed:
    """StableHLO -> HLO, unscheduled. Raises `InputError`."""
    from jax.interpreters import mlir
    from jaxlib import _hlo, _jax

    with mlir_module(data, file) as module:
        partitions, replicas = _number(module, "mhlo.num_partitions"), _number(module, "mhlo.num_replicas")
        code = mlir.module_to_bytecode(module)
    try:
        computation = _jax.mlir.mlir_module_to_xla_computation(code, use_tuple_args=False, return_tuple=False)
        proto = computation.as_serialized_hlo_module_proto()
        hlo = _hlo.HloModule.from_serialized_hlo_module_proto(proto)
        return Parsed(proto, hlo.name, False, partitions, replicas)
    except Exception as error:
        said = parser_message(error)
        dynamic = "dynamic" in said or "tensor<?" in str(error)
        concrete = "lower or export it with concrete shapes"
        advice = concrete if dynamic else "give StableHLO as jax.jit(f).lower(...).as_text() writes it"
        raise InputError(file, f"is StableHLO that XLA cannot translate to HLO: {said}", advice) from None
