"""Donation declared in a compiled executable of a carried module (see `hook.donation`), and its serialization."""

from __future__ import annotations

import functools
import hashlib
import threading
import zlib
from collections.abc import Callable
from typing import Any

from hlo_memopt.hlo import proto
from hlo_memopt.hlo.wire import bytes_field, fields, int_field, varint
from hlo_memopt.hook.registry import module_name

_lock = threading.Lock()
_loaded: dict[bytes, bytes] = {}  # what XLA serializes of a restored executable (hash) -> what was loaded, packed


def restore(executable: Any, aliases: Any, load: Callable[[bytes], Any]) -> Any:
    """The executable of a carried module with donation declared; ``aliases`` is the HloInputOutputAliasProto.

    Raises ValueError if XLA did not compile the module as ``carry`` means it to. ``load`` makes an executable.
    """
    data = restored(executable.serialize(), aliases)
    again = load(data)
    _remember(again, data)
    return again


def restored(data: bytes, aliases: Any) -> bytes:
    """A serialized executable with donation declared.

    A header with its length before it; then field 1, CompilationResultProto: 1 {1 module}, 2 buffer assignment.
    """
    length, at = varint(data, 0)
    header, rest = data[: at + length], data[at + length :]
    donated = {e.parameter_number for e in aliases.entries}

    def edit_module(module: bytes) -> bytes:
        present = [proto.parse_module(raw).input_output_alias for n, _, raw in fields(module) if n == 8]
        if any(p.entries for p in present) or not module_name(module):
            raise ValueError("the executable's module is not as known")
        return module + bytes_field(8, proto.serialize(aliases))

    def edit_allocation(allocation: bytes) -> bytes:
        # 5 is the entry computation's parameter, 6 its number, 7 is live out, 10 path, 13 is aliased with an output
        values = {n: v for n, v, _ in fields(allocation) if n in (5, 6, 7, 10, 13)}
        if not values.get(5):
            return allocation
        if values.get(10) or values.get(13):
            raise ValueError("an argument's allocation is not as known")
        number = int(values.get(6, 0))
        if bool(values.get(7)) != (number in donated):
            raise ValueError(f"XLA did not place the results that lie in arguments as planned (argument {number})")
        found.append(number)
        return allocation + int_field(13, 1) if number in donated else allocation

    found: list[int] = []
    edit_result = _editing(
        {
            1: _editing({1: edit_module}),
            2: _editing({3: edit_allocation}, many=True),
        }
    )
    made = header + _editing({1: edit_result})(rest)
    if len(found) != len(set(found)) or not donated <= set(found):
        raise ValueError("arguments have not one allocation each")
    return made


def _editing(edits: dict[int, Callable[[bytes], bytes]], many: bool = False) -> Callable[[bytes], bytes]:
    """A function that edits some fields of a serialized message, each of them there once if not ``many``."""

    def edit(data: bytes) -> bytes:
        parts = []
        seen = []
        for number, value, raw in fields(data):
            if number in edits:
                if not isinstance(value, bytes):
                    raise ValueError("the executable is not as known")
                seen.append(number)
                raw = bytes_field(number, edits[number](value))
            parts.append(raw)
        if set(seen) != set(edits) or (not many and len(seen) != len(edits)):
            raise ValueError("the executable is not as known")
        return b"".join(parts)

    return edit


def _remember(executable: Any, data: bytes) -> None:
    """Have ``executable.serialize()`` answer with ``data``."""
    kind = type(executable)
    with _lock:
        if not hasattr(kind.serialize, "hlo_memopt"):
            kind.serialize = _serializing(kind.serialize)
            client = type(executable.client)
            client.serialize_executable = _serializing(client.serialize_executable)
        original = kind.serialize.hlo_memopt
    digest = hashlib.sha256(original(executable)).digest()
    with _lock:
        _loaded[digest] = zlib.compress(data, 1)


def _serializing(original: Callable[..., bytes]) -> Callable[..., bytes]:
    @functools.wraps(original, assigned=("__name__", "__doc__"), updated=())
    def serialize(*args: Any) -> bytes:
        data = original(*args)
        if not _loaded:
            return data
        packed = _loaded.get(hashlib.sha256(data).digest())
        return data if packed is None else zlib.decompress(packed)

    serialize.hlo_memopt = original  # type: ignore[attr-defined]
    return serialize
