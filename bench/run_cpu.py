"""Run training steps on the CPU, plain and optimized: `python -m bench.run_cpu --help`."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import models, worker

MIB = 2**20
DEFAULT_MODELS = "vgg16,resnet50,googlenet,unet,gpt2"


def _compiled(jit: Callable[..., Any], made: models.Made, **keywords: Any) -> Any:
    step, args, donated = made
    return jit(step, donate_argnums=donated, **keywords).lower(*args).compile()


def _both(made: models.Made, effort: str) -> dict[str, Callable[[], Any]]:
    """How to compile the step each way."""
    import jax

    import hlo_memopt

    options = hlo_memopt.Options(effort=effort, strict=True)
    return {
        "plain": lambda: _compiled(jax.jit, made),
        "ours": lambda: _compiled(hlo_memopt.jit, made, options=options),
    }


class _Training:
    """A step with its own copy of the state; the donated arguments come first and come back first."""

    def __init__(self, step: Any, made: models.Made) -> None:
        import jax
        import jax.numpy as jnp

        _, args, donated = made
        self.step = step
        self.state = jax.tree.map(jnp.copy, args[: len(donated)])
        self.batch = args[len(donated) :]
        self.loss: Any = None

    def __call__(self) -> float:
        """One step; seconds."""
        import jax

        start = time.perf_counter()
        *state, self.loss = jax.block_until_ready(self.step(*self.state, *self.batch))
        self.state = tuple(state)
        return time.perf_counter() - start


def differing(one: Any, other: Any) -> int:
    """How many arrays of two equal trees differ in any bit."""
    import jax
    import numpy as np

    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return sum(np.asarray(a).tobytes() != np.asarray(b).tobytes() for a, b in pairs)


def measure_steps(name: str, effort: str, steps: int, pairs: int) -> dict[str, Any]:
    """Alternate plain and optimized steps from the same state: times, and whether all results stay equal."""
    import jax

    made = models.make_small(name, real=True)
    steps_of = {way: compile_() for way, compile_ in _both(made, effort).items()}
    temps = {way: step.memory_analysis().temp_size_in_bytes for way, step in steps_of.items()}
    plain, ours = (_Training(step, made) for step in steps_of.values())
    for _ in range(steps):
        plain(), ours()
    results = {way: (run.state, run.loss) for way, run in (("plain", plain), ("ours", ours))}
    unequal = differing(results["plain"], results["ours"])
    del results
    times = []
    for i in range(pairs):  # each goes first in every other pair
        if i % 2:
            second, first = ours(), plain()
        else:
            first, second = plain(), ours()
        times.append((first, second))
    ratios = [b / a for a, b in times]
    return {
        "temps": temps,
        "arrays": len(jax.tree.leaves((plain.state, plain.loss))),
        "unequal": unequal,
        "unequal_at_end": differing((plain.state, plain.loss), (ours.state, ours.loss)),
        "loss": float(plain.loss),
        "seconds_plain": statistics.median(a for a, _ in times),
        "seconds_ours": statistics.median(b for _, b in times),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


class _PeakResident(threading.Thread):
    """Samples this process's resident memory until stopped."""

    def __init__(self, interval: float = 0.002) -> None:
        import psutil

        super().__init__(daemon=True)
        self.process, self.interval, self.peak, self.ended = psutil.Process(), interval, 0, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(self.interval):
            self.peak = max(self.peak, self.process.memory_info().rss)


def measure_resident(name: str, effort: str, way: str, steps: int) -> dict[str, Any]:
    """Peak resident memory of some steps of one executable, and what is resident between steps."""
    made = models.make_small(name, real=True)
    training = _Training(_both(made, effort)[way](), made)
    del made
    training()  # touches what was allocated but never written
    gc.collect()
    if sys.platform == "linux":  # what the compiler freed goes back to the system
        ctypes.CDLL(None).malloc_trim(0)
    sampler = _PeakResident()
    idle = sampler.process.memory_info().rss
    sampler.start()
    for _ in range(steps):
        training()
    sampler.ended.set()
    sampler.join()
    return {"idle": idle, "peak": sampler.peak}


def measure_dispatch(rounds: int, calls: int) -> dict[str, Any]:
    """Time of a call of a tiny compiled function through either jit, in alternating rounds."""
    import jax
    import jax.numpy as jnp

    import hlo_memopt

    def tiny(x: jax.Array) -> jax.Array:
        return x + 1

    def seconds_per_call(function: Any) -> float:
        y = x
        start = time.perf_counter()
        for _ in range(calls):
            y = function(x)
        y.block_until_ready()
        return (time.perf_counter() - start) / calls

    x = jnp.zeros(8)
    plain, ours = jax.jit(tiny), hlo_memopt.jit(tiny)
    for function in (plain, ours):
        seconds_per_call(function)
    times = []
    for i in range(rounds):
        if i % 2:
            second, first = seconds_per_call(ours), seconds_per_call(plain)
        else:
            first, second = seconds_per_call(plain), seconds_per_call(ours)
        times.append((first, second))
    return {
        "plain": statistics.median(a for a, _ in times),
        "ours": statistics.median(b for _, b in times),
        "ratio": statistics.median(b / a for a, b in times),
    }


TASKS = {"steps": measure_steps, "resident": measure_resident, "dispatch": measure_dispatch}
HEAD = [
    "model (batch x size)",
    "temp plain, MiB",
    "temp ours, MiB",
    "resident peak plain, MiB (above idle)",
    "resident peak ours, MiB (above idle)",
    "step plain, s",
    "step ours, s",
    "time ratio (min to max)",
    "equal to the bit",
]


def _measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """All that is measured for a model, each part in a process of its own."""
    common = {"name": name, "effort": args.effort, "steps": args.steps}
    tasks: dict[str, dict[str, Any]] = {"steps": {"task": "steps", "pairs": args.pairs, **common}}
    for way in ("plain", "ours"):
        tasks[f"resident_{way}"] = {"task": "resident", "way": way, **common}
    found: dict[str, Any] = {}
    for part, task in tasks.items():
        worker.progress(f"{name}: {part} ...")
        found[part] = worker.run("bench.run_cpu", task, args.timeout)
        if "error" in found[part]:
            return {"error": f"{part}: {found[part]['error']}"}
    return found


def _cells(name: str, found: dict[str, Any]) -> list[str]:
    def resident(way: str) -> str:
        part = found[f"resident_{way}"]
        return f"{part['peak'] / MIB:.0f} ({(part['peak'] - part['idle']) / MIB:.0f})"

    steps = found["steps"]
    batch, size = models.MODELS[name].small
    unequal = max(steps["unequal"], steps["unequal_at_end"])
    return [
        f"{name} ({batch} x {size})",
        *(f"{steps['temps'][way] / MIB:.1f}" for way in ("plain", "ours")),
        *(resident(way) for way in ("plain", "ours")),
        f"{steps['seconds_plain']:.3f}",
        f"{steps['seconds_ours']:.3f}",
        f"{steps['ratio']:.3f} ({steps['ratio_min']:.3f} to {steps['ratio_max']:.3f})",
        f"NO: {unequal} of {steps['arrays']} arrays differ" if unequal else f"yes, {steps['arrays']} arrays",
    ]


def main(argv: list[str] | None = None) -> int:
    """Entry point; status 1 if a model failed or a result differed."""
    parser = argparse.ArgumentParser(prog="python -m bench.run_cpu", description=__doc__)
    parser.add_argument("--models", default=DEFAULT_MODELS, help="comma-separated; default: %(default)s")
    parser.add_argument("--steps", type=int, default=3, help="steps before results are compared, and for memory")
    parser.add_argument("--pairs", type=int, default=8, help="timed pairs of steps")
    parser.add_argument("--calls", type=int, default=2000, help="calls in each of 40 dispatch rounds; 0: leave out")
    parser.add_argument("--effort", default="default", choices=["fast", "default", "max"])
    parser.add_argument("--out", type=Path, help="markdown file; default: standard output")
    parser.add_argument("--json", type=Path, help="JSON file, sizes in bytes")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one measurement")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        task = json.loads(args.worker)
        print(json.dumps(TASKS[task.pop("task")](**task)))
        return 0

    if args.steps < 1 or args.pairs < 1:
        parser.error("--steps and --pairs must be at least 1")
    chosen = worker.names(args.models, models.names())
    found = {name: _measure(name, args) for name in chosen}
    good = {name: parts for name, parts in found.items() if "error" not in parts}
    lines = [
        f"Training steps on CPU, plain and optimized; effort {args.effort}, {args.pairs} pairs; {worker.versions()}",
        "",
        worker.markdown(HEAD, [_cells(name, parts) for name, parts in good.items()]),
        "",
        *[f"{name}: failed, {parts['error']}" for name, parts in found.items() if "error" in parts],
    ]
    ok = len(good) == len(found)
    ok &= not any(parts["steps"]["unequal"] or parts["steps"]["unequal_at_end"] for parts in good.values())
    dispatch = None
    if args.calls > 0:
        worker.progress("dispatch ...")
        dispatch = worker.run("bench.run_cpu", {"task": "dispatch", "rounds": 40, "calls": args.calls}, args.timeout)
        if "error" in dispatch:
            ok = False
            lines.append(f"dispatch: failed, {dispatch['error']}")
        else:
            plain, ours = (1e6 * dispatch[way] for way in ("plain", "ours"))
            lines.append(f"Dispatch: {plain:.2f} us a call plain, {ours:.2f} us ours, ratio {dispatch['ratio']:.3f}")
    worker.write("\n".join(lines), args.out)
    if args.json:
        content = {"versions": worker.versions(), "models": found, "dispatch": dispatch}
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
