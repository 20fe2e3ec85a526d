"""A serialized HloModuleProto -> HLO text that XLA's parser reads back, or a proto file. Nothing is written half."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import tempfile
from typing import Any

from hlo_memopt.hlo.errors import InputError, parser_message
from hlo_memopt.hlo.isolated import TEXT, parse

_SUFFIXES = "end the name in .txt or .hlo (HLO text), .pb or .pb.gz (HloModuleProto)"


def to_text(data: bytes, *, num_partitions: int = 1, num_replicas: int = 1, isolated: bool = True) -> str:
    """HLO text of a serialized HloModuleProto, checked: XLA's parser reads it back with every schedule as it was.

    Computations that only wrap an asynchronous operation are not written out in text and get new names.
    The proto does not hold the number of partitions and replicas; given here, they stand in the text's first line.
    ``isolated=False`` reads back in this process: faster, for modules that XLA itself is known to have written.
    """
    from jaxlib import _hlo

    options = _hlo.HloPrintOptions()
    options.print_large_constants = True
    message, module = _load(data)
    try:
        text: str = module.to_string(options)
    except UnicodeDecodeError:
        raise InputError(module.name, "holds bytes that no text can hold", "write it as .pb") from None
    header, newline, rest = text.partition("\n")
    for key, number in (("replica_count", num_replicas), ("num_partitions", num_partitions)):
        if number > 1 and f"{key}=" not in header:
            header += f", {key}={number}"
    text = header + newline + rest
    problem = _round_trip_problem(message, text, isolated)
    if problem:
        raise InputError(module.name, f"does not survive as HLO text ({problem})", "write it as .pb")
    return text


def _load(data: bytes) -> tuple[Any, Any]:
    """(message, jaxlib module) of a serialized HloModuleProto."""
    from google.protobuf.message import DecodeError
    from jaxlib import _hlo

    from hlo_memopt.hlo import proto
    from hlo_memopt.hlo.errors import check_module

    try:
        message = proto.parse_module(data)
        problem = check_module(message)
        if problem is None:
            return message, _hlo.HloModule.from_serialized_hlo_module_proto(data)
    except (DecodeError, UnicodeDecodeError):
        problem = "it cannot be decoded"
    except RuntimeError as error:
        problem = parser_message(error)
    raise InputError("module", f"is no HloModuleProto that XLA accepts: {problem}", "give the bytes that XLA wrote")


def _sequences(message: Any) -> dict[str, list[str]]:
    """Computation name -> instruction names in schedule order."""
    wanted = {s.key: s.value.instruction_ids for s in message.schedule.sequences if s.value.instruction_ids}
    out = {}
    for c in message.computations:
        if c.id in wanted:
            names = {i.id: i.name for i in c.instructions}
            out[c.name] = [names[i] for i in wanted[c.id]]
    return out


def _round_trip_problem(message: Any, text: str, isolated: bool) -> str | None:
    from hlo_memopt.hlo import proto

    try:
        again = parse(TEXT, text.encode(), message.name, isolated=isolated)
    except InputError as error:
        return error.problem
    before, after = _sequences(message), _sequences(proto.parse_module(again.module))
    for name, sequence in before.items():
        if name in after and after[name] != sequence:
            return f"the schedule of {name} changes"
    # text writes an asynchronous operation as `fusion-start(...)`: the computation that wraps it gets a new name
    renamed = sorted(len(s) for name, s in before.items() if name not in after)
    if renamed != sorted(len(s) for name, s in after.items() if name not in before):
        return "the scheduled computations change"
    return None


def write_module(data: bytes, path: str | os.PathLike[str], *, num_partitions: int = 1, num_replicas: int = 1) -> None:
    """Write a serialized HloModuleProto to ``path``, in the form that its suffix names; all of it or nothing.

    .txt and .hlo: HLO text (with ``is_scheduled=true`` if it is); .pb: the proto; .pb.gz: gzipped, the same bytes for
    the same module always. Raises `InputError`.
    """
    name = os.fspath(path)
    if name.endswith((".txt", ".hlo")):
        content = to_text(data, num_partitions=num_partitions, num_replicas=num_replicas).encode()
    elif name.endswith(".pb"):
        content = data
    elif name.endswith(".pb.gz"):
        content = _gzip(data)
    else:
        raise InputError(name, "has a suffix that names no format", _SUFFIXES)
    write_atomically(content, name)


def _gzip(data: bytes) -> bytes:
    out = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=out, mtime=0) as f:
        f.write(data)
    return out.getvalue()


def write_atomically(content: bytes, path: str) -> None:
    """Write to a temporary file beside ``path``, then put it in its place; a link is followed, a mode kept."""
    temporary = None
    try:
        target = os.path.realpath(path)
        if os.path.isdir(target):
            raise InputError(path, "is a directory", "give a file name")
        if os.path.exists(target) and not os.path.isfile(target):  # a pipe or a device: nothing to put in its place
            with open(target, "wb") as stream:
                stream.write(content)
            return
        handle, temporary = tempfile.mkstemp(prefix=".hlo-memopt-", suffix=".tmp", dir=os.path.dirname(target))
        with os.fdopen(handle, "wb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(temporary, _mode(target))
        os.replace(temporary, target)
        temporary = None
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        advice = "create its folder first" if isinstance(error, FileNotFoundError) else "choose another place"
        raise InputError(path, f"cannot be written ({reason})", advice) from None
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _mode(target: str) -> int:
    """The mode of the file that stands there, else what a plain open() would give."""
    try:
        return os.stat(target).st_mode & 0o7777
    except OSError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask
