"""Directories written by ``XLA_FLAGS=--xla_dump_to=DIR``: find the modules in them, choose one."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import NamedTuple

from hlo_memopt.hlo.errors import InputError, one_line
from hlo_memopt.hlo.read import DUMP_DIR, ModuleInput, file_bytes, gunzip, read_bytes

_AFTER = re.compile(r"after_optimizations\.(?:txt|hlo|hlo\.pb|pb)(?:\.gz)?$")
_BEFORE = re.compile(r"before_optimizations\.(?:txt|hlo|hlo\.pb|pb)(?:\.gz)?$")
_PLAIN = re.compile(r"\.(?:txt|hlo|hlo\.pb|pb)(?:\.gz)?$")
_DUMP = "run the program with XLA_FLAGS=--xla_dump_to=DIR set before it starts"
_NOTED = 4


class _Candidate(NamedTuple):
    file: str
    module: str
    instructions: int
    scheduled: bool
    data: bytes


def read_dump(folder: str, wanted: str | None = None) -> ModuleInput:
    """The module of ``folder`` with the most instructions, scheduled ones first; ``wanted``: only names it matches."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        reason = "permission denied" if isinstance(error, PermissionError) else str(error.strerror)
        raise InputError(folder, f"cannot be listed ({reason})", "make it readable for you") from None
    pick = _pattern(folder, wanted)
    files, stage = [n for n in names if _AFTER.search(n)], "after"
    if not files:
        files, stage = [n for n in names if _BEFORE.search(n)], "before"
    if not files:
        raise _no_modules(folder, names)
    candidates: list[_Candidate] = []
    skipped: list[str] = []
    for file in _one_per_module(files):
        try:
            candidates.append(_look(folder, file))
        except InputError as error:
            skipped.append(f"{file} ({error.problem})")
    if not candidates:
        raise InputError(folder, f"holds no readable module: {one_line(skipped[0], 150)}", "dump it again")
    chosen = [c for c in candidates if pick.search(c.file) or pick.search(c.module)]
    if not chosen:
        known = ", ".join(dict.fromkeys(c.module for c in sorted(candidates, key=_rank)))
        raise InputError(folder, f"holds no module that matches {wanted!r}", f"choose one of {one_line(known, 150)}")
    chosen.sort(key=_rank)
    best = chosen[0]
    result = read_bytes(best.data, os.path.join(folder, best.file))
    note = _note(best, [c for c in sorted(candidates, key=_rank) if c is not best], skipped, stage)
    note = f"{note}; {result.note}" if result.note else note
    return replace(result, source=folder, kind=DUMP_DIR, note=note)


def _rank(c: _Candidate) -> tuple[bool, int, str]:
    return not c.scheduled, -c.instructions, c.file


def _pattern(folder: str, wanted: str | None) -> re.Pattern[str]:
    try:
        return re.compile(wanted or "")
    except re.error as error:
        raise InputError(
            folder, f"the module pattern {wanted!r} is no regular expression ({error})", "correct it"
        ) from None


def _no_modules(folder: str, names: list[str]) -> InputError:
    if "saved_model.pb" in names:
        return InputError(folder, "is a TensorFlow SavedModel, not an XLA dump", "export StableHLO with jax.export")
    for n in names:
        inner = os.path.join(folder, n)
        try:
            if os.path.isdir(inner) and any(_AFTER.search(x) for x in os.listdir(inner)):
                return InputError(folder, f"holds no module itself, but its folder {n!r} does", f"give {inner}")
        except OSError:
            continue
    what = "is empty" if not names else "holds no *after_optimizations.txt or .hlo.pb"
    return InputError(folder, what, _DUMP)


def _one_per_module(files: list[str]) -> list[str]:
    """Where a module was dumped as text and as proto, the proto: it holds everything."""
    best: dict[str, str] = {}
    for file in files:
        stem = _PLAIN.sub("", file)
        if stem not in best or (".pb" in file[len(stem) :] and ".pb" not in best[stem][len(stem) :]):
            best[stem] = file
    return list(best.values())


def _look(folder: str, file: str) -> _Candidate:
    """Count a file's instructions without XLA's parsers: a dump may hold thousands of modules."""
    path = os.path.join(folder, file)
    data = gunzip(file_bytes(path), path)
    head = re.match(rb"\s*HloModule ([^\s,]+)([^\n]*)", data)
    if head:
        count = len(re.findall(rb"^ +(?:ROOT )?%?[^\s=]+ = ", data, re.M))
        name = head.group(1).decode(errors="replace")
        return _Candidate(file, name, count, b"is_scheduled=true" in head.group(2), data)
    return _look_proto(data, path, file)


def _look_proto(data: bytes, path: str, file: str) -> _Candidate:
    from google.protobuf.message import DecodeError

    from hlo_memopt.hlo import proto

    for parse in (proto.parse_module, lambda b: proto.parse_hlo_proto(b).hlo_module):
        try:
            message = parse(data)
        except (DecodeError, ValueError):
            continue
        if message.computations:
            count = sum(len(c.instructions) for c in message.computations)
            return _Candidate(file, message.name, count, bool(message.schedule.sequences), data)
    raise InputError(path, "is empty" if not data else "is no module", "dump it again")


def _note(best: _Candidate, others: list[_Candidate], skipped: list[str], stage: str) -> str:
    note = f"chose {best.file} ({best.instructions} instructions)"
    if others:
        listed = [f"{c.module} ({c.instructions})" for c in others[:_NOTED]]
        more = f" and {len(others) - _NOTED} more" if len(others) > _NOTED else ""
        note += f" out of {len(others) + 1} modules; others: {', '.join(listed)}{more}"
    if stage == "before":
        note += "; the dump holds no optimized module, so the one before optimizations was taken"
    if skipped:
        note += f"; {len(skipped)} unreadable: {one_line(skipped[0], 120)}"
    return note
