"""Compile a module with XLA:CPU: an unscheduled one as XLA would, or a scheduled one in its given order.

Both give the module as XLA:CPU compiled it and the sizes that XLA reports for it. Nothing is run.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

from hlo_memopt.hlo.errors import InputError, parser_message
from hlo_memopt.hlo.read import ModuleInput

PROBE = "hlo_memopt_probe"  # names of modules that the hook must leave alone


@dataclass(frozen=True)
class Compiled:
    """What XLA:CPU made of a module: the scheduled HloModuleProto and XLA's own sizes, in bytes for each device."""

    module: bytes = field(repr=False)
    temp_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    seconds: float
    num_partitions: int = 1
    num_replicas: int = 1


class _Program(NamedTuple):
    """StableHLO bytecode with what jax passes beside it."""

    code: bytes
    num_partitions: int
    num_replicas: int
    propagate_in: list[bool]
    propagate_out: list[bool]


def compile_for_cpu(
    source: bytes | ModuleInput, *, num_partitions: int | None = None, num_replicas: int | None = None
) -> Compiled:
    """Optimize and schedule a module with XLA:CPU. Raises `InputError`.

    ``source``: a serialized HloModuleProto before optimization, or what `read_input` gave (best for StableHLO, whose
    original is then compiled). Donation, aliasing and shardings are kept. The numbers of partitions and replicas come
    from the `ModuleInput`, the arguments, or else from the shardings in the module.
    """
    if isinstance(source, ModuleInput):
        name, data, code = source.source, source.module, source.stablehlo
        partitions = num_partitions or (source.num_partitions if source.num_partitions > 1 else None)
        replicas = num_replicas or source.num_replicas
    else:
        name, data, code, partitions, replicas = "module", source, None, num_partitions, num_replicas or 1
    program = _program(data, code, name, partitions, replicas)
    return _compile(program, name)


def compile_scheduled_for_cpu(data: bytes, *, num_partitions: int = 1, num_replicas: int = 1) -> Compiled:
    """Compile an optimized and scheduled module of XLA:CPU exactly as it stands, in its own order.

    A stand-in with the same parameters, results and aliases goes through XLA's pipeline; where scheduling is done, the
    given module takes its place. Raises `InputError` if XLA:CPU rejects it.
    """
    from hlo_memopt.hlo import proto

    message = proto.parse_module(data)
    name = message.name
    problem = _not_for_cpu(message)
    if problem:
        raise InputError(name, problem, "give a module that XLA:CPU has scheduled")
    with _Injection(message) as injection:
        code = _stablehlo(injection.stand_in, name)
        compiled = _compile(_program_of(code, name, message, num_partitions, num_replicas), name)
    if not injection.taken:
        raise InputError(
            name, "was not taken over by XLA:CPU (its compiler never called back)", "see hlo-memopt doctor"
        )
    result = proto.parse_module(compiled.module)
    if _entry_order(result) != _entry_order(message):
        raise InputError(name, "was compiled in another order than the given one", "report this module")
    if len(result.input_output_alias.entries) < len(message.input_output_alias.entries):
        problem = "lost its input/output aliases: this jaxlib drops them from every module that a hook returns"
        raise InputError(name, problem, "upgrade jax to 0.12 or newer for XLA's figures of a bare scheduled module")
    result.name = name
    return replace(compiled, module=proto.serialize(result))


def _entry(message: Any) -> Any:
    return next(c for c in message.computations if c.id == message.entry_computation_id)


def _entry_order(message: Any) -> list[str]:
    entry = _entry(message)
    names = {i.id: i.name for i in entry.instructions}
    sequence = next((s.value.instruction_ids for s in message.schedule.sequences if s.key == entry.id), ())
    return [names[s] for s in sequence]


def _not_for_cpu(message: Any) -> str | None:
    """Why XLA:CPU cannot take a module as scheduled; its code generator does not always say so politely."""
    if not _entry_order(message):
        return "is not scheduled"
    for c in message.computations:
        for i in c.instructions:
            if i.shape.layout.tiles or i.shape.layout.memory_space:
                return f"is not of XLA:CPU ({i.name} has a TPU's tiled layout or memory space)"
            if i.custom_call_target.startswith(("__cu", "__triton", "__gpu$", "tpu_custom_call")) or (
                i.fusion_kind == "kCustom" and b"triton" in i.backend_config
            ):
                return f"is not of XLA:CPU ({i.name} calls a kernel of another platform)"
    return None


class _Injection:
    """Puts a scheduled module in the place of its stand-in, at the end of XLA:CPU's scheduling."""

    _lock = threading.Lock()
    _count = itertools.count()
    _pending: ClassVar[dict[str, _Injection]] = {}

    def __init__(self, message: Any) -> None:
        from hlo_memopt.hlo import proto

        self.name = f"{PROBE}_{next(self._count)}"
        self.taken = False
        self.module = proto.new_module()
        self.module.CopyFrom(message)
        self.module.name = self.name
        self.stand_in = proto.serialize(_stand_in(message, self.name))
        self.module_bytes = proto.serialize(self.module)

    def __enter__(self) -> _Injection:
        from jax.extend import xla

        with self._lock:
            if not self._pending:
                stage = xla.PipelineStage.POST_SCHEDULER
                xla.register_hlo_module_transformation(self._answer, name=PROBE, stage=stage, platforms="cpu")
            self._pending[self.name] = self
        return self

    def __exit__(self, *_: object) -> None:
        from jax.extend import xla

        with self._lock:
            del self._pending[self.name]
            if not self._pending:
                xla.clear_hlo_module_transformation(PROBE, stage=xla.PipelineStage.POST_SCHEDULER, platforms="cpu")

    @classmethod
    def _answer(cls, data: bytes) -> bytes | None:
        found = re.match(rb"\n.(" + PROBE.encode() + rb"_\d+)", data, re.S)  # field 1, the name, is written first
        mine = cls._pending.get(found.group(1).decode()) if found else None
        if mine is None:
            return None
        mine.taken = True
        return mine.module_bytes


def _stand_in(message: Any, name: str) -> Any:
    """A module with the entry's parameters and, as one custom call, its result; aliases and layouts are kept."""
    from hlo_memopt.hlo import proto

    out = proto.new_module()
    out.CopyFrom(message)
    out.name = name
    for fields in ("schedule", "stack_frame_index", "computations"):
        out.ClearField(fields)
    entry = out.computations.add()
    entry.CopyFrom(_entry(message))
    kept = [i for i in entry.instructions if i.opcode == "parameter"]
    root = next(i for i in entry.instructions if i.id == entry.root_id)
    call = type(root)(name=f"{PROBE}_result", opcode="custom-call", custom_call_target=PROBE)
    call.id = max(i.id for i in entry.instructions) + 1
    call.shape.CopyFrom(root.shape)
    parameters = [type(p).FromString(p.SerializeToString()) for p in kept]
    entry.ClearField("instructions")
    for p in (*parameters, call):
        del p.control_predecessor_ids[:]
        p.ClearField("metadata")
        entry.instructions.add().CopyFrom(p)
    entry.root_id = call.id
    return out


def _stablehlo(data: bytes, name: str) -> bytes:
    from jaxlib import _jax

    try:
        return _jax.mlir.hlo_to_stablehlo(data)
    except Exception as error:
        problem = f"is HLO that cannot be handed to the compiler: {parser_message(error)}"
        raise InputError(name, problem, "give its StableHLO (jax.jit(f).lower(...).as_text()) instead") from None


def _program(data: bytes, code: bytes | None, name: str, partitions: int | None, replicas: int) -> _Program:
    from hlo_memopt.hlo import proto
    from hlo_memopt.hlo.errors import check_module

    message = proto.parse_module(data)
    problem = check_module(message)
    if problem:
        raise InputError(name, f"is a broken module proto: {problem}", "write the proto again")
    if message.schedule.sequences:
        raise InputError(name, "is scheduled already, so XLA must not optimize it again", "plan it as it stands")
    if code is not None:
        return _program_of(code, name, None, partitions, replicas)
    return _program_of(_stablehlo(data, name), name, message, partitions, replicas)


def _program_of(code: bytes, name: str, message: Any, partitions: int | None, replicas: int) -> _Program:
    """``message``: the HLO module that ``code`` was made from; its donors, lost on the way, are set again."""
    from jax.interpreters import mlir
    from jaxlib.mlir import ir

    from hlo_memopt.hlo.stablehlo import mlir_module

    with mlir_module(code, name) as module:
        functions = (op for op in module.body if op.operation.name == "func.func")
        main = next(f for f in functions if ir.StringAttr(f.attributes["sym_name"]).value == "main")
        inputs = [dict(_items(ir.DictAttr(a))) for a in main.arg_attrs] if "arg_attrs" in main.attributes else []
        count = len(ir.FunctionType(main.type).inputs)
        inputs = inputs or [{} for _ in range(count)]
        for donor in message.buffer_donor.entries if message is not None else ():
            if donor.parameter_shape_index or not 0 <= donor.parameter_number < count:
                problem = "donates a part of a tuple parameter, which the compiler's StableHLO input cannot say"
                raise InputError(name, problem, "give its StableHLO, or the module as scheduled by XLA:CPU")
            inputs[donor.parameter_number]["jax.buffer_donor"] = ir.BoolAttr.get(True)
        if inputs:
            main.arg_attrs = ir.ArrayAttr.get([ir.DictAttr.get(a) for a in inputs])
        results = ir.FunctionType(main.type).results
        has = "res_attrs" in main.attributes
        outputs = [dict(_items(ir.DictAttr(a))) for a in main.result_attrs] if has else [{} for _ in results]
        text = "" if partitions else str(module)
        partitions = partitions or _partitions_of(text)
        free_in, free_out = ([not any("sharding" in k for k in a) for a in side] for side in (inputs, outputs))
        return _Program(mlir.module_to_bytecode(module), partitions, replicas, free_in, free_out)


def _items(attributes: Any) -> list[tuple[str, Any]]:
    named = [attributes[k] for k in range(len(attributes))]
    return [(n.name, n.attr) for n in named]


def _partitions_of(text: str) -> int:
    """How many partitions the shardings in a StableHLO text speak of."""
    found = re.search(r"mhlo\.num_partitions = (\d+)", text)
    if found:
        return int(found.group(1))
    most = 1
    for axes in re.findall(r"sdy\.mesh @\w+ = <\[(.*?)\]", text):
        most = max(most, _product(re.findall(r"=(\d+)", axes)))
    for dims in re.findall(r"mhlo\.sharding = \"\{devices=\[([\d,]+)\]", text):
        most = max(most, _product(dims.split(",")))
    return most


def _product(numbers: list[str]) -> int:
    out = 1
    for n in numbers:
        out *= int(n)
    return out


def _compile(program: _Program, name: str) -> Compiled:
    import jax
    import numpy as np
    from jaxlib import _jax

    needed = program.num_partitions * program.num_replicas
    try:
        devices = jax.local_devices(backend="cpu")
    except RuntimeError:
        raise InputError(name, "XLA:CPU is not available here", "add cpu to JAX_PLATFORMS") from None
    if needed > len(devices):
        have = f"is partitioned for {needed} devices, and XLA:CPU has {len(devices)} here"
        raise InputError(name, have, f"set XLA_FLAGS=--xla_force_host_platform_device_count={needed}")
    options = _jax.CompileOptions()
    options.num_partitions, options.num_replicas = program.num_partitions, program.num_replicas
    ids = np.array([d.id for d in devices[:needed]]).reshape(program.num_replicas, program.num_partitions)
    options.device_assignment = _jax.DeviceAssignment.create(ids)
    build = options.executable_build_options
    build.use_spmd_partitioning = True
    build.use_shardy_partitioner = jax.config.jax_use_shardy_partitioner
    if program.propagate_in:
        build.allow_spmd_sharding_propagation_to_parameters = program.propagate_in
    if program.propagate_out:
        build.allow_spmd_sharding_propagation_to_output = program.propagate_out
    start = time.perf_counter()
    try:
        device_list = _jax.DeviceList(tuple(devices[:needed]))
        executable = devices[0].client.compile_and_load(program.code, device_list, options)
        (module,) = executable.hlo_modules()
        stats = executable.get_compiled_memory_stats()
    except Exception as error:
        problem = f"XLA:CPU does not compile it: {parser_message(error)}"
        raise InputError(name, problem, "compile it on the platform it was made for, and give that dump") from None
    return Compiled(
        module.as_serialized_hlo_module_proto(),
        stats.temp_size_in_bytes,
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes,
        stats.alias_size_in_bytes,
        time.perf_counter() - start,
        program.num_partitions,
        program.num_replicas,
    )
