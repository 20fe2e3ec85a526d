"""Compile each training step plain and optimized: `python -m bench.compile_table --help`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench import models, worker

MIB = 2**20
MEMORY_SCHEDULER = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
"""The compiler option equal to XLA_FLAGS=--xla_cpu_scheduler_type=..., for one compile."""


@dataclasses.dataclass(frozen=True)
class Row:
    """What was measured for one program; sizes in bytes, temps reported by XLA unless called predicted."""

    model: str
    temp_default: int
    temp_memory_scheduler: int | None
    temp_after: int
    predicted_before: int
    predicted_after: int
    lower_bound: int
    plan_seconds: float
    compile_seconds_before: float
    compile_seconds_after: float

    @property
    def ratio(self) -> float:
        """Ours by XLA's default."""
        return _ratio(self.temp_after, self.temp_default)

    @property
    def ratio_best(self) -> float:
        """Ours by the better of XLA's two schedulers."""
        return _ratio(self.temp_after, min(self.temp_default, self.temp_memory_scheduler or self.temp_default))

    @property
    def error_before(self) -> float:
        """Relative error of the prediction for the module as XLA scheduled it."""
        return _ratio(self.predicted_before, self.temp_default) - 1

    @property
    def error_after(self) -> float:
        """Relative error of the prediction for ours."""
        return _ratio(self.predicted_after, self.temp_after) - 1

    @property
    def plan_share(self) -> float:
        """Planning time by plain compile time."""
        return _ratio(self.plan_seconds, self.compile_seconds_before)

    def as_json(self) -> dict[str, Any]:
        """Fields and ratios."""
        derived = ("ratio", "ratio_best", "error_before", "error_after", "plan_share")
        return {**dataclasses.asdict(self), **{name: getattr(self, name) for name in derived}}


def _ratio(a: float, b: float) -> float:
    return a / b if b else (1.0 if a == b else math.inf)


def measure(name: str, platform: str, effort: str, keep_copies: bool = False) -> Row:
    """Compile one program both ways in this process, and on CPU with XLA's memory scheduler as well."""
    import jax

    import hlo_memopt

    step, args, donated = models.make(name)
    options = hlo_memopt.Options(effort=effort, elide_copies=not keep_copies, strict=True)
    result = hlo_memopt.compare(step, *args, donate_argnums=donated, platform=platform, options=options)
    if result.plan is None:
        raise RuntimeError(f"no plan was made: {result.error or 'the hook did not see the module'}")
    other = None
    if platform == "cpu":  # after compare, so that planning pays its own first-call costs
        lowered = jax.jit(step, donate_argnums=donated).lower(*args)
        other = lowered.compile(compiler_options=MEMORY_SCHEDULER).memory_analysis().temp_size_in_bytes
    return Row(
        model=name,
        temp_default=int(result.temp_before),
        temp_memory_scheduler=other,
        temp_after=int(result.temp_after),
        predicted_before=int(result.plan.peak_before),
        predicted_after=int(result.plan.peak_after),
        lower_bound=int(result.plan.lower_bound),
        plan_seconds=result.plan_seconds,
        compile_seconds_before=result.compile_seconds_before,
        compile_seconds_after=result.compile_seconds_after,
    )


HEAD = [
    "model",
    "XLA default, MiB",
    "XLA memory scheduler, MiB",
    "ours, MiB",
    "ours / default",
    "ours / better of both",
    "predicted before, MiB (error)",
    "predicted after, MiB (error)",
    "lower bound, MiB",
    "plan, s",
    "compile plain, s",
    "compile ours, s",
    "plan / plain compile",
]


def _cells(row: Row) -> list[str]:
    def mib(size: int | None) -> str:
        return "-" if size is None else f"{size / MIB:.1f}"

    return [
        row.model,
        mib(row.temp_default),
        mib(row.temp_memory_scheduler),
        mib(row.temp_after),
        f"{row.ratio:.3f}",
        f"{row.ratio_best:.3f}",
        f"{mib(row.predicted_before)} ({row.error_before:+.2%})",
        f"{mib(row.predicted_after)} ({row.error_after:+.2%})",
        mib(row.lower_bound),
        f"{row.plan_seconds:.2f}",
        f"{row.compile_seconds_before:.2f}",
        f"{row.compile_seconds_after:.2f}",
        f"{row.plan_share:.2f}",
    ]


def geometric_mean(values: Iterable[float]) -> float:
    """Geometric mean; zeros count as one millionth."""
    logs = [math.log(max(value, 1e-6)) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def report(rows: list[Row], failures: dict[str, str], platform: str, effort: str) -> str:
    """The markdown table, failures, and the geometric means as the last line."""
    trained = [row for row in rows if row.model in models.names()]
    means = {name: geometric_mean(getattr(row, name) for row in trained) for name in ("ratio", "ratio_best")}
    share = geometric_mean(row.plan_share for row in trained)
    return "\n".join(
        [
            f"Temporary memory of compiled training steps; platform {platform}, effort {effort}; {worker.versions()}",
            "",
            worker.markdown(HEAD, [_cells(row) for row in rows]),
            "",
            *[f"{name}: failed, {reason}" for name, reason in failures.items()],
            *([""] if failures else []),
            f"Geometric means over {len(trained)} training steps: ours / default {means['ratio']:.3f}, "
            f"ours / better of both {means['ratio_best']:.3f}, plan / plain compile {share:.2f}",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Entry point; status 1 if a model failed."""
    known = [*models.names(), *models.EXTRAS]
    parser = argparse.ArgumentParser(prog="python -m bench.compile_table", description=__doc__)
    parser.add_argument("--models", default=",".join(known), help="comma-separated; default: all")
    parser.add_argument("--platform", default="cpu", choices=["cpu", "cuda", "tpu"])
    parser.add_argument("--effort", default="default", choices=["fast", "default", "max"])
    parser.add_argument("--keep-copies", action="store_true", help="order alone: no copy is left out")
    parser.add_argument("--out", type=Path, help="markdown file; default: standard output")
    parser.add_argument("--json", type=Path, help="JSON file, sizes in bytes")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for one model")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        print(json.dumps(dataclasses.asdict(measure(**json.loads(args.worker)))))
        return 0

    rows: list[Row] = []
    failures: dict[str, str] = {}
    for name in worker.names(args.models, known):
        worker.progress(f"{name} ...")
        task = {"name": name, "platform": args.platform, "effort": args.effort, "keep_copies": args.keep_copies}
        answer = worker.run("bench.compile_table", task, args.timeout, args.platform)
        if "error" in answer:
            failures[name] = answer["error"]
            worker.progress(f"{name}: {answer['error']}")
            continue
        rows.append(Row(**answer))
        worker.progress("  ".join(_cells(rows[-1])))
    worker.write(report(rows, failures, args.platform, args.effort), args.out)
    if args.json:
        content = {
            "platform": args.platform,
            "effort": args.effort,
            "versions": worker.versions(),
            "rows": [row.as_json() for row in rows],
            "failures": failures,
        }
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
