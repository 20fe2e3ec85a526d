"""The planner alone: peak, bound, gap, seconds and memory on modules and generated graphs. See bench/README.md.

    python -m bench.planner [--corpus FOLDER] [--graphs N,N] [--effort E] [--out T.md] [--plot P.png]
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import time
from pathlib import Path
from typing import Any

from bench import worker

MIB = 2**20
GENERATED = {
    "transformer, 12 layers": ("transformer", {"layers": 12}),
    "transformer, 24 layers": ("transformer", {"layers": 24}),
    "transformer, 48 layers": ("transformer", {"layers": 48}),
    "transformer, 96 layers": ("transformer", {"layers": 96}),
    "transformer, 192 layers, 16 heads": ("transformer", {"layers": 192, "heads": 16}),
    "transformer, 192 layers, 48 heads": ("transformer", {"layers": 192, "heads": 48}),
    "series-parallel, 1,000": ("series_parallel", {"nodes": 1000}),
    "series-parallel, 10,000": ("series_parallel", {"nodes": 10000}),
    "irregular, 40": ("irregular", {"nodes": 40, "window": 12}),
    "irregular, 300": ("irregular", {"nodes": 300}),
    "irregular, 3,000": ("irregular", {"nodes": 3000}),
}
ILP_NODES = 150  # the time-indexed program has two variables for each node and step


def measure_graph(name: str, effort: str) -> dict[str, Any]:
    """One generated graph, at the level of the scheduling problem."""
    started = time.perf_counter()
    from hlo_memopt.schedule.search import search

    imported = time.perf_counter() - started
    from bench import graphs

    kind, arguments = GENERATED[name]
    problem = getattr(graphs, kind)(**arguments)
    started = time.perf_counter()
    result = search(problem, effort)
    seconds = time.perf_counter() - started + imported
    row = {"nodes": problem.n, "ours": result.peak, "bound": result.bound, "seconds": seconds}
    return row | _others(problem, list(range(problem.n)), None, seconds)


def measure_module(name: str, effort: str) -> dict[str, Any]:
    """One module through the whole planner; the other orders on its entry computation."""
    path = Path(name)
    data = gzip.decompress(path.read_bytes())
    platform = path.name.split("_")[0]
    started = time.perf_counter()
    from hlo_memopt.options import Options
    from hlo_memopt.planner import plan_module

    plan = plan_module(data, platform, Options(effort=effort))  # type: ignore[arg-type]
    seconds = time.perf_counter() - started
    row = {
        "nodes": plan.instructions,
        "given": plan.peak_before,
        "ours": plan.peak_after,
        "bound": plan.lower_bound,
        "seconds": seconds,
    }
    from hlo_memopt.hlo.graph import Module
    from hlo_memopt.liveness.dataflow import Dataflow
    from hlo_memopt.pack.assignment import simulate
    from hlo_memopt.planner.problems import ProblemBuilder
    from hlo_memopt.platforms import platform as platform_named

    module = Module.from_bytes(data)
    dataflow = Dataflow(module, platform_named(platform))
    kind = simulate(dataflow, module.schedule).kind
    builder = ProblemBuilder(dataflow, module.schedule, lambda b: kind[b.id] == "heap")
    peaks: dict[int, int] = {}
    from hlo_memopt.schedule.problem import peak

    for computation in builder.computations():
        item = builder.build(computation, peaks)
        peaks[computation] = peak(item.problem, list(range(item.problem.n)))
    place = {instruction.id: n for n, instruction in enumerate(module.entry.instructions)}
    program = sorted(range(item.problem.n), key=lambda v: place[item.clusters[v][0]])
    return _others(item.problem, list(range(item.problem.n)), program, seconds) | row


def _others(problem: Any, given: list[int], program: list[int] | None, seconds: float) -> dict[str, Any]:
    from hlo_memopt.schedule.construct import greedy_order
    from hlo_memopt.schedule.model_ilp import solve_order
    from hlo_memopt.schedule.problem import is_topological, peak

    out = {"given": peak(problem, given), "greedy": peak(problem, greedy_order(problem)), "program": None, "ilp": None}
    if program is not None and is_topological(problem, program):
        out["program"] = peak(problem, program)
    if problem.n <= ILP_NODES:
        result = solve_order(problem, incumbent=given, max_seconds=max(1.0, seconds))
        out["ilp"] = result.peak
    return out


def _worker(job: str) -> None:
    task = json.loads(job)
    measure = measure_graph if task["kind"] == "graph" else measure_module
    row = measure(task["name"], task["effort"])
    row["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(row))


def _table(rows: list[dict[str, Any]]) -> str:
    head = ["graph", "nodes", "given, MiB", "program order", "greedy", "ours", "lower bound", "gap", "seconds"]
    lines = []
    for r in rows:
        gap = r["ours"] / r["bound"] - 1 if r["bound"] else float("inf")
        columns = ("given", "program", "greedy", "ours", "bound")
        mib = ["-" if r.get(k) is None else f"{r[k] / MIB:.1f}" for k in columns]
        ilp = "too large" if r.get("ilp") is None else f"{r['ilp'] / MIB:.1f}"
        name = Path(r["name"]).name.split(".")[0]
        lines.append([name, f"{r['nodes']:,}", *mib, f"{gap:.2%}", f"{r['seconds']:.2f}", f"{r['memory']:.0f}", ilp])
    return worker.markdown([*head, "memory, MiB", "MODeL in CBC"], lines)


def _plot(rows: list[dict[str, Any]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    axes.loglog([r["nodes"] for r in rows], [r["seconds"] for r in rows], "o")
    most = max(r["nodes"] for r in rows)
    scale = max(r["seconds"] for r in rows if r["nodes"] == most)
    axes.loglog([100, most], [scale * 100 / most, scale], "--", label="linear")
    axes.set(xlabel="nodes", ylabel="planning seconds, first imports included", title="Growth of planning time")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    """Each graph in a process of its own, so that first calls and memory are counted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", help="folder with PLATFORM_name.hlo.pb.gz files")
    numbers = ",".join(str(n) for n in range(len(GENERATED)))
    parser.add_argument("--graphs", default=numbers, help="numbers of the generated graphs")
    parser.add_argument("--effort", default="default", choices=("fast", "default", "max"))
    parser.add_argument("--out")
    parser.add_argument("--plot")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return _worker(options.worker)
    jobs = [("module", str(p)) for p in sorted(Path(options.corpus).glob("*.hlo.pb.gz"))] if options.corpus else []
    names = list(GENERATED)
    jobs += [("graph", names[int(n)]) for n in options.graphs.split(",") if n]
    rows = []
    for kind, name in jobs:
        worker.progress(Path(name).name)
        task = {"kind": kind, "name": str(Path(name).resolve()) if kind == "module" else name, "effort": options.effort}
        row = worker.run("bench.planner", task, timeout=1800)
        if "error" in row:
            raise SystemExit(f"{name}: {row['error']}")
        rows.append({**row, "name": name})
    worker.write(_table(rows), Path(options.out) if options.out else None)
    if options.plot:
        _plot(rows, options.plot)


if __name__ == "__main__":
    main()
