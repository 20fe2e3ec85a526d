"""``hlo-memopt optimize``: plan a module's schedule, check the rewritten module, write it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from hlo_memopt.cli.console import Out, Table, change, progress, size
from hlo_memopt.cli.errors import NOT_HELD, Failed
from hlo_memopt.cli.inspect_command import gap, verdict
from hlo_memopt.cli.source import (
    Source,
    check_target,
    load,
    make_options,
    make_plan,
    plan_fields,
    source_options,
    write_json,
)

if TYPE_CHECKING:
    from hlo_memopt.planner.plan import Plan

_SUFFIXES = (".txt", ".hlo", ".pb", ".pb.gz")


@click.command("optimize", help="Plan the order of a module's instructions for less temp, and write the module anew.")
@source_options
@click.option(
    "-o", "--output", metavar="OUT", help="Where to write: .txt or .hlo is HLO text, .pb or .pb.gz the proto."
)
@click.option(
    "--emit",
    type=click.Choice(("schedule", "control-deps")),
    default="schedule",
    show_default=True,
    help="Put the order into the module as its schedule, or also as control dependencies.",
)
@click.option("--recompute", type=click.Choice(("off", "cheap", "auto")), default="off", hidden=True)
@click.option("--memory-limit", hidden=True)
@click.option("--temp-limit", hidden=True)
def command(
    source: str,
    platform: str | None,
    pattern: str | None,
    effort: str,
    solver: str,
    time_limit: float | None,
    json_path: str | None,
    output: str | None,
    emit: str,
    recompute: str,
    memory_limit: str | None,
    temp_limit: str | None,
) -> int:
    """Print a summary, or with ``--json -`` the JSON alone."""
    _refuse_later_options(recompute, memory_limit, temp_limit)
    options = make_options(effort, solver, time_limit)
    check_target(output, "-o", _SUFFIXES)
    check_target(json_path, "--json")
    if output and json_path and os.path.realpath(output) == os.path.realpath(json_path):
        raise click.UsageError("-o and --json name the same file", click.get_current_context())
    given = load(source, platform, pattern)
    plan = make_plan(given, options)
    rewritten = _rewritten(given, plan, emit)
    if output is not None:
        from hlo_memopt.hlo.write import write_module

        with progress(f"writing {output}"):
            write_module(rewritten, output, num_partitions=given.num_partitions, num_replicas=given.num_replicas)
    out = Out()
    if json_path is not None:
        write_json(json_path, {**plan_fields(given, plan), "output": output, "emit": emit}, out)
    if json_path != "-":
        _report(given, plan, output, emit, out)
    return 0


def _refuse_later_options(recompute: str, memory_limit: str | None, temp_limit: str | None) -> None:
    later = {"--memory-limit": memory_limit, "--temp-limit": temp_limit}
    name = next((k for k, v in later.items() if v is not None), None)
    if recompute != "off":
        name = f"--recompute {recompute}"
    if name is not None:
        problem = f"{name} is not in this version, which plans the order only"
        raise click.UsageError(problem, click.get_current_context())


def _rewritten(source: Source, plan: Plan, emit: str) -> bytes:
    """The module with the plan in it, past the gate; the module as it is if there is nothing to put in."""
    if not plan.changed and emit == "schedule":
        return source.data
    from hlo_memopt.check import PlanCheckError
    from hlo_memopt.hook.verify import verify_rewrite
    from hlo_memopt.rewrite import add_control_dependencies

    with progress("checking the rewritten module"):
        rewritten = plan.apply(source.data)
        if emit == "control-deps":
            rewritten = add_control_dependencies(rewritten, plan.schedule)
        try:
            verify_rewrite(source.data, rewritten)
        except (PlanCheckError, ValueError, RuntimeError) as error:
            problem = f"the plan did not pass the check, and nothing was written: {error}"
            raise Failed(source.name, problem, "report it with this module", NOT_HELD) from error
    return rewritten


def _report(source: Source, plan: Plan, output: str | None, emit: str, out: Out) -> None:
    out.text(f"module {plan.module} ({source.name})", f"  {source.describe()}; {plan.instructions} instructions", "")
    table = Table("", ("", "given", "planned", "change", ""), frozenset({1, 2, 3}))
    if source.reported_temp is not None:
        table.add("temp", size(source.reported_temp), "-", "", "reported by XLA")
    gain = change(plan.peak_before, plan.peak_after)
    table.add("temp", size(plan.peak_before), size(plan.peak_after), gain, "predicted")
    table.add("lower bound", "", size(plan.lower_bound), "", f"predicted; {gap(plan)}")
    table.add("fragmentation", "", size(plan.fragmentation_bytes), "", "predicted; part of temp")
    if plan.elided:
        table.add("copies left out", "", str(len(plan.elided)), "", "of donated arguments")
    table.add("planning", "", f"{plan.plan_seconds:.2f} s", "", f"effort {plan.options.effort}")
    out.table(table)
    out.text(verdict(plan))
    if output is None:
        out.text("Nothing was written; -o OUT writes the module.")
    elif plan.changed:
        what = "control dependencies and schedule" if emit == "control-deps" else "schedule"
        out.text(f"Wrote {output} with the planned {what}, checked independently.")
    elif emit == "control-deps":
        out.text(f"Wrote {output} with its own order as control dependencies.")
    else:
        out.text(f"Wrote {output}, the module unchanged.")
