"""Packing problems as CSV, in the form that google/minimalloc reads and writes.

A header, then a buffer a line: ``id,lower,upper,size``, alive at the times [lower, upper), sizes in bytes. Here also
``alignment`` and ``offset`` (where the buffer has to lie; empty: anywhere); other columns are kept. A solution is the
same table with every ``offset``.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

from hlo_memopt.hlo.errors import InputError
from hlo_memopt.pack.problem import PackBuffer, PackingProblem

_NEEDED = ("id", "lower", "upper", "size")
_WHOLE = re.compile(r"[+-]?[0-9]{1,30}")
_ADVICE = "write a header id,lower,upper,size (also alignment, offset), then a line of whole numbers for each buffer"


@dataclass(frozen=True)
class PackTable:
    """A problem and the text it came in: the header and one row of cells a buffer."""

    problem: PackingProblem
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def with_offsets(self, offsets: Sequence[int]) -> str:
        """The table with the column ``offset`` filled, appended if it is not there."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        names = [name.strip() for name in self.header]
        at = names.index("offset") if "offset" in names else len(names)
        writer.writerow([*self.header[:at], "offset", *self.header[at + 1 :]])
        for row, offset in zip(self.rows, offsets, strict=True):
            writer.writerow([*row[:at], str(offset), *row[at + 1 :]])
        return out.getvalue()


def read_table(path: str, capacity: int | None = None) -> PackTable:
    """Read a CSV file; raises `InputError` with the file and, where it can be told, the line."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as stream:
            text = stream.read()
    except UnicodeDecodeError:
        raise InputError(path, "is no text in UTF-8", _ADVICE) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(path, f"cannot be read ({reason})", "give a CSV file that can be read") from None
    return parse_table(text, path, capacity)


def parse_table(text: str, name: str, capacity: int | None = None) -> PackTable:
    """The table in ``text``; ``name`` is what errors call it."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] | None = None
    rows: list[tuple[str, ...]] = []
    buffers: list[PackBuffer] = []
    while True:
        line = reader.line_num + 1
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise InputError(f"{name}:{line}", f"is no CSV ({error})", _ADVICE) from None
        if row is None:
            break
        if not any(cell.strip() for cell in row):
            continue
        if header is None:
            header = row
            _check_header([c.strip() for c in row], f"{name}:{line}")
            continue
        if len(row) != len(header):
            raise InputError(f"{name}:{line}", f"has {len(row)} cells where the header has {len(header)}", _ADVICE)
        cells = dict(zip((c.strip() for c in header), (c.strip() for c in row), strict=True))
        buffers.append(_buffer(cells, f"{name}:{line}"))
        rows.append(tuple(row))
    if header is None:
        raise InputError(name, "is empty", _ADVICE)
    try:
        problem = PackingProblem(buffers, capacity)
    except ValueError as error:
        raise InputError(name, str(error), "correct these lines") from None
    return PackTable(problem, tuple(header), tuple(rows))


def _check_header(names: list[str], where: str) -> None:
    if "gaps" in names:
        advice = "give each stretch of the buffer's life a line of its own, or leave the column out"
        raise InputError(where, "has a column gaps, which is not supported", advice)
    missing = [n for n in _NEEDED if n not in names]
    if missing:
        raise InputError(where, f"is a header without {', '.join(missing)}", _ADVICE)
    twice = next((n for n in names if n and names.count(n) > 1), None)
    if twice is not None:
        raise InputError(where, f"names the column {twice} twice", _ADVICE)


def _buffer(cells: dict[str, str], where: str) -> PackBuffer:
    def whole(column: str) -> int:
        if not _WHOLE.fullmatch(cells[column]):
            raise InputError(where, f"{column} is {cells[column][:40]!r}, not a whole number", "correct this line")
        return int(cells[column])

    buffer = PackBuffer(
        cells["id"],
        whole("lower"),
        whole("upper"),
        whole("size"),
        whole("alignment") if cells.get("alignment") else 1,
        whole("offset") if cells.get("offset") else None,
    )
    fault = buffer.fault()
    if fault is not None:
        raise InputError(where, fault, "correct this line")
    return buffer
