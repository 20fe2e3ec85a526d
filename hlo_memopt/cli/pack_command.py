"""``hlo-memopt pack``: offsets for the buffers of a CSV file."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from hlo_memopt.cli.console import Out, Table, progress, size
from hlo_memopt.cli.errors import BAD_INPUT, NOT_HELD, Failed
from hlo_memopt.cli.source import check_target, write_json

if TYPE_CHECKING:
    from hlo_memopt.pack.problem import Packing
    from hlo_memopt.pack.table import PackTable

_HELP = """Place buffers with known lives so that those alive at a common time share no byte, as low as can be.

INPUT is a CSV file (- for standard input) with the columns id, lower, upper (alive at the times lower to upper,
without upper), size in bytes, and if wanted alignment and offset (a fixed place; empty: anywhere)."""


@click.command("pack", help=_HELP)
@click.argument("source", metavar="INPUT")
@click.option("-o", "--output", metavar="OUT", help="Where to write the table with its offsets; - for standard output.")
@click.option(
    "--capacity",
    type=click.IntRange(0, 1 << 60),
    metavar="N",
    help="Bytes to stay within; the search ends with the first packing that does. Default: as low as can be.",
)
@click.option(
    "--effort",
    type=click.Choice(("fast", "default", "max")),
    default="default",
    show_default=True,
    help="How much work the search may do.",
)
@click.option("--time-limit", type=float, metavar="S", help="Seconds after which the search stops with what it has.")
@click.option("--json", "json_path", metavar="FILE", help="Write the figures as JSON; - for standard output.")
def command(
    source: str,
    output: str | None,
    capacity: int | None,
    effort: str,
    time_limit: float | None,
    json_path: str | None,
) -> int:
    """Print a summary, or with ``-o -`` or ``--json -`` that alone. Status 1: nothing within the capacity was found."""
    if time_limit is not None and not 0 < time_limit < float("inf"):
        problem = f"time_limit must be a positive number of seconds, not {time_limit}"
        raise click.UsageError(problem, click.get_current_context())
    check_target(output, "-o")
    check_target(json_path, "--json")
    if output and json_path and (output == json_path or os.path.realpath(output) == os.path.realpath(json_path)):
        raise click.UsageError("-o and --json name the same file", click.get_current_context())
    table = _read(source, capacity)
    from hlo_memopt.pack.solver import pack

    name = "<stdin>" if source == "-" else source
    started = time.perf_counter()
    with progress(f"packing {len(table.problem.buffers)} buffers of {name}"):
        packing = pack(table.problem, effort, time_limit=time_limit)
    seconds = time.perf_counter() - started
    fits = capacity is None or packing.height <= capacity
    out = Out()
    if output is not None and fits:
        text = table.with_offsets(packing.offsets)
        if output == "-":
            out.text(text.rstrip("\n"))
        else:
            from hlo_memopt.hlo.write import write_atomically

            write_atomically(text.encode(), output)
    if json_path is not None:
        write_json(json_path, _figures(name, table, packing, fits, seconds, output if fits else None, effort), out)
    if "-" not in (output, json_path):
        _report(name, table, packing, seconds, output if fits else None, effort, out)
    if not fits:
        raise _no_fit(name, table, packing, effort)
    return 0


def _read(source: str, capacity: int | None) -> PackTable:
    from hlo_memopt.pack.table import parse_table, read_table

    if source != "-":
        return read_table(source, capacity)
    try:
        return parse_table(sys.stdin.read(), "<stdin>", capacity)
    except UnicodeDecodeError:
        raise Failed("<stdin>", "is no text in UTF-8", "give a CSV table", BAD_INPUT) from None


def _no_fit(name: str, table: PackTable, packing: Packing, effort: str) -> Failed:
    capacity = table.problem.capacity
    if capacity is not None and packing.lower_bound > capacity:
        problem = f"no packing within the capacity {capacity} exists: it takes at least {packing.lower_bound} bytes"
        return Failed(name, problem, "give more capacity, or fewer bytes alive at a time", NOT_HELD)
    problem = f"no packing within the capacity {capacity} was found; the best takes {packing.height} bytes"
    advice = "give more capacity" + ("" if effort == "max" else ", or try --effort max")
    return Failed(name, problem, advice, NOT_HELD)


def _figures(
    name: str, table: PackTable, packing: Packing, fits: bool, seconds: float, output: str | None, effort: str
) -> dict[str, Any]:
    return {
        "input": name,
        "buffers": len(table.problem.buffers),
        "capacity_bytes": table.problem.capacity,
        "fits": fits,
        "height_bytes": packing.height,
        "lower_bound_bytes": packing.lower_bound,
        "proven": packing.proven,
        "nodes": packing.nodes,
        "seconds": seconds,
        "effort": effort,
        "output": output,
        "offsets": list(packing.offsets),
    }


def _report(
    name: str, table: PackTable, packing: Packing, seconds: float, output: str | None, effort: str, out: Out
) -> None:
    out.text(f"{name}: {len(table.problem.buffers)} buffers", "")
    capacity = table.problem.capacity
    rows = Table("", ("", "bytes", "", ""), frozenset({1, 2}))
    proof = "proven: no packing is lower" if packing.proven else "not proven to be the lowest"
    rows.add("height", str(packing.height), size(packing.height), proof)
    rows.add("lower bound", str(packing.lower_bound), size(packing.lower_bound), "")
    if capacity is not None:
        rows.add("capacity", str(capacity), size(capacity), "fits" if packing.height <= capacity else "does not fit")
    rows.add("packing", f"{seconds:.2f} s", "", f"{packing.nodes} placements searched, effort {effort}")
    out.table(rows)
    out.text(f"Wrote {output} with the offsets, validated." if output else "Nothing was written.")
