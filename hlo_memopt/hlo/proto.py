"""HloModuleProto through `protobuf`, with a descriptor made at run time.

Only the fields that hlo_memopt reads or writes are declared (numbers from XLA's ``hlo.proto``,
``xla_data.proto``); everything else travels as unknown fields and survives a round trip unchanged.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "hlo_memopt"
_F = descriptor_pb2.FieldDescriptorProto

# message -> field name -> (number, kind); "*" marks a repeated field, a capital letter a message.
_SCHEMA: dict[str, dict[str, tuple[int, str]]] = {
    "HloProto": {"hlo_module": (1, "HloModuleProto")},
    "HloModuleProto": {
        "name": (1, "string"),
        "entry_computation_name": (2, "string"),
        "computations": (3, "*HloComputationProto"),
        "id": (5, "int64"),
        "entry_computation_id": (6, "int64"),
        "schedule": (7, "HloScheduleProto"),
        "input_output_alias": (8, "HloInputOutputAliasProto"),
        "stack_frame_index": (17, "StackFrameIndexProto"),
        "buffer_donor": (18, "HloBufferDonorProto"),
    },
    "HloComputationProto": {
        "name": (1, "string"),
        "instructions": (2, "*HloInstructionProto"),
        "id": (5, "int64"),
        "root_id": (6, "int64"),
        "is_fusion_computation": (7, "bool"),
        "execution_thread": (8, "string"),
    },
    "HloInstructionProto": {
        "name": (1, "string"),
        "opcode": (2, "string"),
        "shape": (3, "ShapeProto"),
        "metadata": (7, "OpMetadata"),
        "parameter_number": (9, "int64"),
        "fusion_kind": (11, "string"),
        "tuple_index": (13, "int64"),
        "dimensions": (14, "*int64"),
        "channel_id": (26, "int64"),
        "custom_call_target": (28, "string"),
        "id": (35, "int64"),
        "operand_ids": (36, "*int64"),
        "control_predecessor_ids": (37, "*int64"),
        "called_computation_ids": (38, "*int64"),
        "backend_config": (43, "bytes"),
        "is_host_transfer": (47, "bool"),
        "custom_call_has_side_effect": (65, "bool"),
        "output_operand_aliasing": (74, "*OutputOperandAliasing"),
        "async_execution_thread": (79, "string"),
    },
    "OutputOperandAliasing": {
        "output_shape_index": (1, "*int64"),
        "operand_index": (2, "int64"),
        "operand_shape_index": (3, "*int64"),
    },
    "OpMetadata": {
        "op_type": (1, "string"),
        "op_name": (2, "string"),
        "source_file": (3, "string"),
        "source_line": (4, "int32"),
        "stack_frame_id": (15, "int32"),
    },
    "ShapeProto": {
        "element_type": (2, "int32"),
        "dimensions": (3, "*int64"),
        "tuple_shapes": (4, "*ShapeProto"),
        "layout": (5, "LayoutProto"),
        "is_dynamic_dimension": (6, "*bool"),
    },
    "LayoutProto": {
        "minor_to_major": (1, "*int64"),
        "tiles": (6, "*TileProto"),
        "element_size_in_bits": (7, "int64"),
        "memory_space": (8, "int64"),
        "tail_padding_alignment_in_elements": (16, "int64"),
    },
    "TileProto": {"dimensions": (1, "*int64")},
    "InstructionSequence": {"instruction_ids": (1, "*int64")},
    "HloScheduleEntry": {"key": (1, "int64"), "value": (2, "InstructionSequence")},
    "HloScheduleProto": {"sequences": (1, "*HloScheduleEntry")},
    "AliasEntry": {
        "output_shape_index": (1, "*int64"),
        "parameter_number": (2, "int64"),
        "parameter_shape_index": (3, "*int64"),
        "kind": (4, "int32"),
    },
    "HloInputOutputAliasProto": {"entries": (1, "*AliasEntry")},
    "DonorEntry": {"parameter_number": (1, "int64"), "parameter_shape_index": (2, "*int64")},
    "HloBufferDonorProto": {"entries": (1, "*DonorEntry")},
    "StackFrameIndexProto": {
        "file_names": (1, "*string"),
        "function_names": (2, "*string"),
        "file_locations": (3, "*FileLocation"),
        "stack_frames": (4, "*StackFrame"),
    },
    "FileLocation": {
        "file_name_id": (1, "int32"),
        "function_name_id": (2, "int32"),
        "line": (3, "int32"),
        "column": (4, "int32"),
    },
    "StackFrame": {"file_location_id": (1, "int32"), "parent_frame_id": (2, "int32")},
}

_SCALARS = {
    "string": _F.TYPE_STRING,
    "bytes": _F.TYPE_BYTES,
    "int64": _F.TYPE_INT64,
    "int32": _F.TYPE_INT32,
    "bool": _F.TYPE_BOOL,
}


@cache
def _classes() -> dict[str, Any]:
    return message_classes(_PACKAGE, _SCHEMA)


def message_classes(package: str, schema: dict[str, dict[str, tuple[int, str]]]) -> dict[str, Any]:
    """Message classes made from {message: {field: (number, kind)}}; a kind is a scalar's or a message's name.

    A "*" before it marks a repeated field.
    """
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}/subset.proto", package=package, syntax="proto3")
    for message, fields in schema.items():
        proto = file.message_type.add(name=message)
        for name, (number, kind) in fields.items():
            field = proto.field.add(name=name, number=number)
            field.label = _F.LABEL_REPEATED if kind.startswith("*") else _F.LABEL_OPTIONAL
            kind = kind.lstrip("*")
            if kind in _SCALARS:
                field.type = _SCALARS[kind]
            else:
                field.type = _F.TYPE_MESSAGE
                field.type_name = f".{package}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}"))
        for name in schema
    }


def new_module() -> Any:
    """An empty HloModuleProto message."""
    return _classes()["HloModuleProto"]()


def parse_module(data: bytes) -> Any:
    """Serialized HloModuleProto -> message; raises google.protobuf.message.DecodeError."""
    return _classes()["HloModuleProto"].FromString(data)


def parse_hlo_proto(data: bytes) -> Any:
    """Serialized HloProto (a module and its buffer assignment) -> message."""
    return _classes()["HloProto"].FromString(data)


def serialize(message: Any) -> bytes:
    """Message -> bytes, the same bytes for the same message in every process."""
    return message.SerializeToString(deterministic=True)
