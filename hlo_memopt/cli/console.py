"""What commands print: text and tables on standard output, progress on standard error.

On a terminal, tables are drawn by rich. In a pipe or a file they are aligned plain text, never cut, without colour.
Progress appears on a terminal only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30


def size(count: int | None) -> str:
    """Bytes for people: ``6046.3 MiB``; MiB up to ten thousand of them, so that a table stays comparable."""
    if count is None:
        return "-"
    if abs(count) < _KIB:
        return f"{count} B"
    if abs(count) < _MIB:
        return f"{count / _KIB:.1f} KiB"
    if abs(count) < 10_000 * _MIB:
        return f"{count / _MIB:.1f} MiB"
    return f"{count / _GIB:.2f} GiB"


def change(before: int, after: int) -> str:
    """``-46.2%``; empty where there was nothing before."""
    return f"{after / before - 1:+.1%}" if before else ""


def percent(part: float, whole: float) -> str:
    """``12.3%`` of ``whole``."""
    return f"{part / whole:.1%}" if whole else "-"


@dataclasses.dataclass
class Table:
    """Rows of text under a title. Columns whose number is in ``right`` hold figures and are never cut or wrapped."""

    title: str
    columns: Sequence[str]
    right: frozenset[int] = frozenset()
    rows: list[Sequence[str]] = dataclasses.field(default_factory=list)

    def add(self, *cells: str) -> None:
        self.rows.append(cells)

    def plain(self) -> str:
        """Aligned text."""
        lines = [self.columns, *self.rows] if any(self.columns) else self.rows
        widths = [max((len(row[n]) for row in lines), default=0) for n in range(len(self.columns))]
        text = [self.title] if self.title else []
        for row in lines:
            cells = (
                c.rjust(w) if n in self.right else c.ljust(w) for n, (c, w) in enumerate(zip(row, widths, strict=True))
            )
            text.append(("  " + "  ".join(cells)).rstrip())
        return "\n".join(text)


class Out:
    """Standard output. A reader that goes away (``| head``) ends the printing, not the work."""

    def __init__(self) -> None:
        self._gone = False

    def text(self, *lines: str) -> None:
        """Print lines as they are."""
        self._write("\n".join(lines) + "\n")

    def table(self, table: Table) -> None:
        """Print a table with an empty line behind it."""
        if sys.stdout.isatty():
            self._write(_drawn(table))
        else:
            self._write(table.plain() + "\n\n")

    def _write(self, text: str) -> None:
        if self._gone:
            return
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            self._gone = True
            silence_stdout()


def silence_stdout() -> None:
    """Let what is left in the buffers of standard output go nowhere."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def _drawn(table: Table) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table as Drawing
    from rich.text import Text

    unicode_ok = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    drawing = Drawing(
        title=Text(table.title, style="bold") if table.title else None,
        title_justify="left",
        box=box.SIMPLE_HEAD if unicode_ok else box.ASCII2,
        show_header=any(table.columns),
        pad_edge=False,
    )
    for n, column in enumerate(table.columns):
        if n in table.right:
            drawing.add_column(Text(column), justify="right", no_wrap=True, overflow="crop", min_width=_width(table, n))
        else:
            drawing.add_column(Text(column), overflow="fold")
    for row in table.rows:
        drawing.add_row(*map(Text, row))
    console = Console(file=sys.stdout, highlight=False)
    with console.capture() as captured:
        console.print(drawing)
    return captured.get()


def _width(table: Table, n: int) -> int:
    return max(len(row[n]) for row in [table.columns, *table.rows])


@contextlib.contextmanager
def progress(what: str) -> Iterator[None]:
    """Say what goes on while it does, if someone watches a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(what)):
        yield


def note(text: str) -> None:
    """A remark on standard error, for people; not an error."""
    print(f"hlo-memopt: {text}", file=sys.stderr, flush=True)
