"""``hlo-memopt demo``: a real training step, plain and optimized, side by side."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import click

from hlo_memopt.cli.console import Out, Table, change, note, progress, size
from hlo_memopt.cli.errors import NOT_HELD, Failed
from hlo_memopt.cli.inspect_command import gap
from hlo_memopt.cli.source import PLATFORMS, start_cpu
from hlo_memopt.demo import DEFAULT, NAMES

if TYPE_CHECKING:
    from hlo_memopt.demo.models import Demo
    from hlo_memopt.demo.run import Outcome

_SLOWER = 1.1  # step time ratio that is worth a remark
_INSTALL = {
    "cuda": "on a machine with an NVIDIA card: pip install 'hlo_memopt[cuda]' (and CUDA's libraries: pip install "
    "'jax[cuda12]'), and leave JAX_PLATFORMS unset; or use --platform cpu",
    "tpu": "on a machine with a TPU: pip install 'hlo_memopt[tpu]', and leave JAX_PLATFORMS unset; "
    "or use --platform cpu",
}


@click.command("demo", help="Compile a training step plain and optimized, run both, and show both side by side.")
@click.option("--platform", type=click.Choice(PLATFORMS), default="cpu", show_default=True, help="Where to run it.")
@click.option("--model", type=click.Choice(NAMES), default=DEFAULT, show_default=True, help="Which step.")
def command(platform: str, model: str) -> int:
    """0 if the results are equal to the bit and XLA reports less temp (where that is to be expected), else 1."""
    device = start_cpu("demo") if platform == "cpu" else _device(platform)
    from hlo_memopt.demo import models
    from hlo_memopt.demo.run import run

    with progress("making the model"):
        demo = models.make(model)
    out = Out()
    out.text(f"{model} on {platform} ({device.device_kind}): {demo.summary}", "")
    logging.getLogger("hlo_memopt").addHandler(logging.NullHandler())  # the failure is told below
    outcome = run(demo, device, progress)
    out.table(_table(outcome))
    problem = _problem(demo, outcome, platform)
    if problem is not None:
        raise Failed("demo", *problem, NOT_HELD)
    for remark in _remarks(outcome):
        note(f"demo: {remark}")
    return 0


def _device(platform: str) -> Any:
    import jax

    try:
        return jax.devices(platform)[0]
    except Exception:  # RuntimeError, or AssertionError where no backend at all starts
        what = {"cuda": "no CUDA device", "tpu": "no TPU"}[platform]
        raise Failed("demo", f"JAX finds {what} here", _INSTALL[platform]) from None


def _table(outcome: Outcome) -> Table:
    c = outcome.comparison
    table = Table("", ("", "plain", "optimized", "", ""), frozenset({1, 2, 3}))
    table.add("temp", size(c.temp_before), size(c.temp_after), change(c.temp_before, c.temp_after), "reported by XLA")
    table.add("temp", size(c.predicted_before), size(c.predicted_after), "", "predicted")
    if c.plan is not None:
        table.add("lower bound", "", size(c.plan.lower_bound), "", f"predicted; {gap(c.plan)}")
    seconds = f"{c.plan_seconds:.2f} s of it planning and checking"
    table.add("compile", f"{c.compile_seconds_before:.2f} s", f"{c.compile_seconds_after:.2f} s", "", seconds)
    pairs = f"measured; ratio: median of {outcome.steps - 1} pairs of runs in turns"
    before, after = f"{outcome.seconds_before * 1e3:.1f} ms", f"{outcome.seconds_after * 1e3:.1f} ms"
    table.add("step", before, after, f"x {outcome.ratio:.3f}", pairs)
    steps = f"after {outcome.steps} steps"
    if outcome.loss_before is not None and outcome.loss_after is not None:
        table.add("loss", f"{outcome.loss_before:.9g}", f"{outcome.loss_after:.9g}", "", steps)
    what = "parameters, optimizer state, loss" if outcome.loss_before is not None else "results"
    if outcome.different:
        table.add(what, "", "DIFFER", "", f"in {len(outcome.different)} of {outcome.arrays} arrays, {steps}")
    else:
        table.add(what, "", "equal", "", f"to the bit, {outcome.arrays} arrays, {steps}")
    return table


def _problem(demo: Demo, outcome: Outcome, platform: str) -> tuple[str, str] | None:
    """(what does not hold, what to do), or None."""
    c = outcome.comparison
    if c.error is not None:
        return f"the step was compiled untouched: {type(c.error).__name__}: {c.error}", "run hlo-memopt doctor"
    if outcome.different and outcome.repeatable:
        where = ", ".join(outcome.different[:3])
        return f"the optimized step computes other bits than the plain one (in {where})", "report it"
    if c.temp_after > c.temp_before:
        return "XLA reports more temp for the optimized step than for the plain one", "report it"
    if demo.should_fall and platform == "cpu" and c.temp_after == c.temp_before:
        return "XLA reports as much temp for the optimized step as for the plain one", "run hlo-memopt doctor"
    return None


def _remarks(outcome: Outcome) -> list[str]:
    remarks = []
    if outcome.different:
        remarks.append("the plain step gives other bits each time that it runs here, so equality cannot be judged")
    if outcome.ratio > _SLOWER:
        ratio = f"the optimized step took {outcome.ratio:.2f} times as long"
        remarks.append(f"{ratio}; times are noisy on a shared machine: run it again to see whether it stays so")
    if outcome.loss_before is not None and not outcome.donated:
        remarks.append(
            "nothing is donated here: this jaxlib forgets donation in rewritten modules; jaxlib 0.12 does not"
        )
    return remarks
