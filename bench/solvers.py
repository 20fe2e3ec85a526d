"""Small order problems in the dynamic program, in CBC and in HiGHS, side by side. See bench/README.md.

    python -m bench.solvers [--windows N] [--nodes N] [--seconds S] [--out T.md]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench import graphs, worker
from hlo_memopt.schedule.exact import solve_exact, static_bound
from hlo_memopt.schedule.flat import Flat
from hlo_memopt.schedule.ilp_support import SOLVERS
from hlo_memopt.schedule.model_ilp import solve_order
from hlo_memopt.schedule.problem import Problem, peak

MIB = 2**20
GRAPHS = {
    "irregular": (lambda: graphs.irregular(300), (8, 10, 12, 14, 16, 24)),
    "transformer": (lambda: graphs.transformer(layers=2), (12, 16, 24)),
}
STATES = 100_000  # of the dynamic program

_Solve = Callable[[Problem], tuple[bool, int, int, int]]  # to: proven, peak, bound (bytes), nodes searched


def windows(problem: Problem, length: int, count: int) -> list[Problem]:
    """Stretches of the given order, those with the most bytes between their given peak and a plain bound."""
    flat = Flat.of(problem)
    order = np.arange(flat.n)
    parts = [flat.part(order < low, order[low : low + length])[0] for low in range(0, flat.n - length + 1, length // 2)]
    found = [part.to_problem() for part in parts]
    return sorted(found, key=lambda p: static_bound(p) - peak(p, list(range(p.n))))[:count]


def measure(solve: _Solve, problems: list[Problem]) -> dict[str, Any]:
    """Of a solver on all problems: how many proven, mean peak and bound in bytes, seconds, and nodes of all."""
    results, seconds = [], []
    for problem in problems:
        started = time.perf_counter()
        results.append(solve(problem))
        seconds.append(time.perf_counter() - started)
    proven, peaks, bounds, nodes = zip(*results, strict=True)
    return {
        "proven": f"{sum(proven)}/{len(problems)}",
        "peak": statistics.mean(peaks),
        "bound": statistics.mean(bounds),
        "seconds": statistics.median(seconds),
        "most": max(seconds),
        "nodes": sum(nodes),
    }


def _dynamic_program(problem: Problem) -> tuple[bool, int, int, int]:
    given = peak(problem, list(range(problem.n)))
    found = solve_exact(problem, max_states=STATES, upper_bound=given)
    return found.proven, found.peak, min(found.bound, found.peak), found.states


def _program(solver: str, max_nodes: int, max_seconds: float) -> _Solve:
    def solve(problem: Problem) -> tuple[bool, int, int, int]:
        given = list(range(problem.n))
        found = solve_order(problem, incumbent=given, max_nodes=max_nodes, max_seconds=max_seconds, solver=solver)
        return found.proven, found.peak, found.bound, found.nodes

    return solve


def _table(rows: list[dict[str, Any]]) -> str:
    head = ["windows of", "nodes", "solver", "proven", "peak, MiB", "bound, MiB", "median seconds", "most", "searched"]
    lines = []
    for r in rows:
        mib = [f"{r[k] / MIB:.2f}" for k in ("peak", "bound")]
        seconds = [f"{r[k]:.4f}" for k in ("seconds", "most")]
        lines.append([r["graph"], str(r["length"]), r["solver"], r["proven"], *mib, *seconds, f"{r['nodes']:,}"])
    return worker.markdown(head, lines)


def main() -> None:
    """All in one process, after a first solve of each that nobody times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=5, help="problems of each kind")
    parser.add_argument("--nodes", type=int, default=2000, help="branch-and-bound nodes for a problem")
    parser.add_argument("--seconds", type=float, default=2.0, help="for a problem, of the integer programs")
    parser.add_argument("--out")
    options = parser.parse_args()
    solvers: dict[str, _Solve] = {"dynamic program": _dynamic_program}
    solvers |= {s.name: _program(key, options.nodes, options.seconds) for key, s in SOLVERS.items() if s.loads()}
    warm = windows(graphs.irregular(40), 8, 1)
    for solve in solvers.values():
        solve(warm[0])
    rows = []
    for graph, (make, lengths) in GRAPHS.items():
        whole = make()
        for length in lengths:
            problems = windows(whole, length, options.windows)
            for name, solve in solvers.items():
                worker.progress(f"{graph}, {length} nodes, {name}")
                rows.append({"graph": graph, "length": length, "solver": name, **measure(solve, problems)})
    worker.write(_table(rows), Path(options.out) if options.out else None)


if __name__ == "__main__":
    main()
