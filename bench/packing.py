"""Packing problems (CSV files), solved within their capacity. See bench/README.md.

    python -m bench.packing --problems FOLDER [--effort fast|default|max] [--lowest] [--out T.md]
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path

from bench import worker
from hlo_memopt.pack.problem import PackBuffer, PackingProblem
from hlo_memopt.pack.solver import NODES, pack
from hlo_memopt.pack.table import read_table
from hlo_memopt.pack.validate import validate

_HEAD = ["problem", "buffers", "capacity", "lower bound", "height", "fits", "proven", "seconds", "nodes"]


def capacity_of(path: Path) -> int | None:
    """``A.1048576.csv`` has a capacity of 1048576 bytes."""
    found = re.search(r"\.(\d+)\.csv$", path.name)
    return int(found[1]) if found else None


def compile_search() -> float:
    """Seconds until the search is compiled, or read from numba's cache."""
    from hlo_memopt.pack import kernel, search, sections

    (part,) = sections.split(PackingProblem([PackBuffer("a", 0, 2, 1), PackBuffer("b", 1, 3, 1)]))
    started = time.perf_counter()
    kernel.compiled()
    search.fit(part, 2, 10)
    return time.perf_counter() - started


def main() -> int:
    """All in one process, in the order of their names; status 1 if one does not fit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", required=True, help="folder of CSV files")
    parser.add_argument("--effort", choices=tuple(NODES), default="default")
    parser.add_argument("--lowest", action="store_true", help="as low as can be; no capacity ends the search")
    parser.add_argument("--out")
    options = parser.parse_args()
    paths = sorted(Path(options.problems).glob("*.csv"))
    if not paths:
        print(f"{options.problems}: holds no CSV files", file=sys.stderr)
        return 2
    warm = compile_search()
    rows, total, held = [], 0.0, True
    for path in paths:
        worker.progress(path.name)
        capacity = capacity_of(path)
        problem = read_table(str(path), None if options.lowest else capacity).problem
        started = time.perf_counter()
        result = pack(problem, options.effort)
        seconds = time.perf_counter() - started
        total += seconds
        fits = capacity is None or result.height <= capacity
        held &= fits and validate(problem, result.offsets) == result.height
        figures = [len(problem.buffers), capacity or "-", result.lower_bound, result.height]
        told = ["yes" if flag else "no" for flag in (fits, result.proven)]
        rows.append([path.stem.split(".")[0], *map(str, figures), *told, f"{seconds:.2f}", f"{result.nodes:,}"])
    text = worker.markdown(_HEAD, rows)
    text += f"\n\nAll: {total:.2f} s; before that {warm:.2f} s to compile the search or to read it from numba's cache."
    worker.write(text, Path(options.out) if options.out else None)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
