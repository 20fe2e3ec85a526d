"""``hlo-memopt inspect``: where a module's memory goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hlo_memopt.cli.console import Out, Table, change, percent, progress, size
from hlo_memopt.cli.source import (
    Source,
    check_target,
    load,
    make_options,
    make_plan,
    plan_fields,
    source_options,
    understood,
    write_json,
)

if TYPE_CHECKING:
    from hlo_memopt.planner.inspect import Inspection, Origin, Share
    from hlo_memopt.planner.plan import Plan


_WEAK = 10.0  # a lower bound so far below the plan proves nothing of use


@click.command("inspect", help="Where a module's memory goes: temp, its peak, what is alive there, who made it.")
@source_options
@click.option("--top", type=click.IntRange(0), default=12, show_default=True, metavar="N", help="Rows of each table.")
def command(
    source: str,
    platform: str | None,
    pattern: str | None,
    effort: str,
    solver: str,
    time_limit: float | None,
    json_path: str | None,
    top: int,
) -> int:
    """Print tables, or with ``--json -`` the JSON alone."""
    options = make_options(effort, solver, time_limit)
    check_target(json_path, "--json")
    given = load(source, platform, pattern)
    from hlo_memopt.planner.inspect import inspect_module

    with progress("simulating XLA's buffer assignment"):
        found = understood(given, lambda: inspect_module(given.data, given.platform, given.name))
    plan = make_plan(given, options)
    out = Out()
    if json_path is not None:
        write_json(json_path, {**plan_fields(given, plan), "given": found.to_json(top)}, out)
    if json_path == "-":
        return 0
    _report(given, found, plan, top, out)
    return 0


def _report(source: Source, found: Inspection, plan: Plan, top: int, out: Out) -> None:
    out.text(
        f"module {found.module} ({source.name})",
        f"  {source.describe()}; {found.instructions} instructions in {found.computations} computations",
        "  sizes are predicted by hlo_memopt, for one device, unless marked as reported by XLA",
        "",
    )
    out.table(_sizes(source, found))
    if found.peak is None:
        out.text("The heap of temporaries is empty: nothing to save.")
        return
    out.table(_peak(found))
    if top:
        out.table(_live(found, top))
        for title, shares in (("by scope of op_name", found.by_scope), ("by source line", found.by_source)):
            if any(s.name != "(unknown)" for s in shares):
                out.table(_shares(f"Alive at the peak, {title} (predicted)", shares, found.live_peak, top))
    out.text(verdict(plan))


def _sizes(source: Source, found: Inspection) -> Table:
    table = Table("Sizes", ("", "bytes", "", ""), frozenset({1, 2}))

    def add(label: str, count: int, remark: str) -> None:
        table.add(label, f"{count:,}", size(count), remark)

    add("temp", found.temp, "predicted")
    if source.reported_temp is not None:
        off = change(source.reported_temp, found.temp)
        told = "as predicted" if found.temp == source.reported_temp else f"the prediction is {off} off"
        add("temp", source.reported_temp, f"reported by XLA; {told}")
    add("largest live sum", found.live_peak, "predicted; the heap would need no more if it had no holes")
    add("fragmentation", found.fragmentation, f"predicted; {percent(found.fragmentation, found.heap)} of the heap")
    if found.tables:
        add("tuple tables", found.tables, "predicted; in temp, beside the heap")
    if found.in_idle:
        add("in idle allocations", found.in_idle, "predicted; sum of temporaries in idle parameters and outputs")
    add("parameters", found.parameters, "predicted; not in temp")
    add("outputs", found.outputs, f"predicted; not in temp; {size(found.aliased)} of them in donated parameters")
    add("constants", found.constants, "predicted; not in temp")
    return table


def _peak(found: Inspection) -> Table:
    peak = found.peak
    assert peak is not None
    table = Table("Where the peak is (predicted)", ("", ""))
    table.add("step", f"{peak.step} of {peak.steps}")
    table.add("instruction", f"{peak.instruction} = {peak.shape} {peak.opcode}")
    inside = f", run by {' > '.join(peak.calls)}" if peak.calls else ""
    table.add("computation", peak.computation + inside)
    table.add("op_name", _op_name(peak.origin))
    table.add("source", peak.origin.source or "-")
    return table


def _live(found: Inspection, top: int) -> Table:
    shown = found.live[:top]
    rest = found.live[top:]
    table = Table(
        f"Alive at the peak: the largest {len(shown)} of {len(found.live)} buffers (predicted)",
        ("size", "share", "instruction", "shape", "lives for steps", "op_name", "source"),
        frozenset({0, 1}),
    )
    for b in shown:
        name = b.instruction + (f"{{{','.join(map(str, b.index))}}}" if b.index else "")
        more = f" +{b.sharing}" if b.sharing else ""
        life = f"{b.first}-{b.last} ({b.steps})"
        row = (size(b.bytes), percent(b.bytes, found.live_peak), name + more, b.shape, life)
        table.add(*row, _op_name(b.origin), b.origin.source or "-")
    if rest:
        total = sum(b.bytes for b in rest)
        table.add(size(total), percent(total, found.live_peak), f"{len(rest)} more", "", "", "", "")
    return table


def _op_name(origin: Origin) -> str:
    return ("near " if origin.near and origin.op_name else "") + (origin.op_name or "-")


def _shares(title: str, shares: tuple[Share, ...], whole: int, top: int) -> Table:
    table = Table(title, ("size", "share", "buffers", ""), frozenset({0, 1, 2}))
    for s in shares[:top]:
        table.add(size(s.bytes), percent(s.bytes, whole), str(s.buffers), s.name)
    rest = shares[top:]
    if rest:
        total, count = sum(s.bytes for s in rest), sum(s.buffers for s in rest)
        table.add(size(total), percent(total, whole), str(count), f"{len(rest)} more places")
    return table


def verdict(plan: Plan) -> str:
    """One sentence: whether another order of instructions needs less."""
    bound = f"no order can need less than {size(plan.lower_bound)} (lower bound; {gap(plan)})"
    if plan.optimal:
        bound = f"no order needs less (lower bound {size(plan.lower_bound)})"
    elif not plan.lower_bound or plan.gap > _WEAK:
        bound = "how low it can go is not known"
    if plan.changed:
        how = f"{size(plan.peak_before)} -> {size(plan.peak_after)}, {change(plan.peak_before, plan.peak_after)}"
        text = f"Another order saves temp: {how} (predicted); {bound}."
    elif plan.optimal:
        text = f"The order is as good as any: {bound}."
    else:
        text = f"No order that needs less was found: temp stays at {size(plan.peak_before)} (predicted); {bound}."
    return text + (" The time limit cut the search short." if plan.timed_out else "")


def gap(plan: Plan) -> str:
    """How far the plan is above the lower bound, in words."""
    if plan.optimal:
        return "no order needs less"
    if not plan.lower_bound or plan.gap > _WEAK:
        return "too weak to say anything"
    return f"gap {plan.gap:.1%}"
