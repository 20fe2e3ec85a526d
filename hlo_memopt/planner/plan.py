"""A plan for one module, and how it is made."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

from hlo_memopt.hlo.graph import Module, ShapeIndex
from hlo_memopt.liveness.dataflow import Dataflow
from hlo_memopt.liveness.ranges import Schedule
from hlo_memopt.options import Options
from hlo_memopt.pack.assignment import Assignment, simulate
from hlo_memopt.planner.floor import lower_bound
from hlo_memopt.planner.problems import ProblemBuilder
from hlo_memopt.platforms import Platform
from hlo_memopt.platforms import platform as platform_named
from hlo_memopt.rewrite import put_schedule
from hlo_memopt.schedule.divide import passed
from hlo_memopt.schedule.search import OPTIMAL, search, smoothed

# How often the buffers that lie in idle allocations are looked at anew: where they lie depends on the order.
_ROUNDS = {"fast": 1, "default": 2, "max": 4}

# A round's problem is taken to be the right one if its peak comes out within this share
_SAME_HEAP = 0.02
# Orders that are packed, to take the best
_PACKED = {"fast": 2, "default": 8, "max": 8}
# What is alive above these shares of the peak is lowered where packing wastes memory
_SMOOTH = (0.97, 0.9)
# Share of the heap lost to fragmentation that is worth another look
_WASTE = 0.002
_FLOOR_CUTS = {"fast": 4, "default": 12, "max": 400}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to change in a module and what our model expects of it. Sizes in bytes.

    Attributes:
      module, platform: what was planned, for what.
      instructions: scheduled instructions.
      peak_before, peak_after: predicted temp (XLA's temp_size_in_bytes) of the given schedule and of ours.
      lower_bound: no order of the module's computations has a smaller temp, by the same model.
      fragmentation_bytes: predicted heap of our schedule less its largest live sum.
      schedule: computation name -> instruction names in order.
      offsets: (instruction name, shape index) -> predicted offset in the temp allocation.
      changed: whether the plan differs from the given schedule; False: not predicted to be better, nothing to do.
      timed_out: whether ``time_limit`` cut the search short.
    """

    module: str
    platform: str
    instructions: int
    peak_before: int
    peak_after: int
    lower_bound: int
    fragmentation_bytes: int
    schedule: dict[str, list[str]]
    offsets: dict[tuple[str, ShapeIndex], int]
    plan_seconds: float
    optimal: bool
    options: Options
    changed: bool
    timed_out: bool = False

    @property
    def gap(self) -> float:
        """(peak_after - lower_bound) / lower_bound; 0 where no temp is needed, infinite where no floor is known."""
        if not self.lower_bound:
            return math.inf if self.peak_after else 0.0
        return (self.peak_after - self.lower_bound) / self.lower_bound

    def apply(self, module_bytes: bytes) -> bytes:
        """Serialized HloModuleProto with this plan's schedule put in; ValueError if it is another module."""
        return put_schedule(module_bytes, self.schedule)

    def to_json(self) -> dict[str, Any]:
        """The object that ``--json`` writes."""
        return {
            "module": self.module,
            "platform": self.platform,
            "instructions": self.instructions,
            "peak_before_bytes": self.peak_before,
            "peak_after_bytes": self.peak_after,
            "lower_bound_bytes": self.lower_bound,
            "gap": self.gap if math.isfinite(self.gap) else None,
            "fragmentation_bytes": self.fragmentation_bytes,
            "plan_seconds": self.plan_seconds,
            "optimal": self.optimal,
            "changed": self.changed,
            "timed_out": self.timed_out,
            "options": dataclasses.asdict(self.options),
        }


@dataclasses.dataclass
class _Candidate:
    schedule: Schedule
    assignment: Assignment


def plan_module(data: bytes, platform: str = "cpu", options: Options | None = None) -> Plan:
    """Plan a scheduled module (serialized HloModuleProto).

    Raises ValueError if the module has no schedule or is one that we cannot read.
    """
    started = time.perf_counter()
    options = options or Options()
    target = platform_named(platform)
    module = Module.from_bytes(data)
    if not module.is_scheduled:
        raise ValueError(f"module {module.name!r} has no schedule")
    dataflow = Dataflow(module, target)
    given = _Candidate(module.schedule, simulate(dataflow, module.schedule))
    best, timed_out = given, False
    binding: set[int] = set()
    deadline = None if options.time_limit is None else started + options.time_limit
    if options.reorder and given.assignment.temp:
        best, timed_out = _improve(dataflow, given, options, deadline, binding)
    if not _worth_it(target, given.assignment.temp, best.assignment.temp):
        best = given
    bound = 0
    if best.assignment.temp:
        cuts = _FLOOR_CUTS[options.effort]
        bound = lower_bound(dataflow, best.schedule, best.assignment.kind, cuts, binding, deadline)
    return _make_plan(module, target, options, given, best, bound, timed_out, started)


def _worth_it(target: Platform, before: int, after: int) -> bool:
    """Whether a prediction promises more than its own error may be."""
    return after < before * (1 - target.model_error)


def _improve(
    dataflow: Dataflow, given: _Candidate, options: Options, deadline: float | None, binding: set[int]
) -> tuple[_Candidate, bool]:
    """The best schedule found. Adds to ``binding`` the instructions whose cuts bound the searches."""
    best, timed_out = given, False
    for _ in range(_ROUNDS[options.effort]):
        kind = best.assignment.kind
        builder = ProblemBuilder(dataflow, best.schedule, lambda b, kind=kind: kind[b.id] == "heap")  # type: ignore[misc]
        found, peak, late = _round(dataflow, builder, best, options, deadline, binding)
        timed_out |= late
        if found.assignment.temp >= best.assignment.temp:
            break
        best = found
        if timed_out or abs(best.assignment.live_peak - peak) <= _SAME_HEAP * peak:
            break
    return best, timed_out


def _round(
    dataflow: Dataflow,
    builder: ProblemBuilder,
    start: _Candidate,
    options: Options,
    deadline: float | None,
    binding: set[int],
) -> tuple[_Candidate, int, bool]:
    """Plan every computation, callees first; of the good orders of the one that holds most take what XLA packs best.

    Also the peak that the entry's problem promised, and whether the deadline bit.
    """
    schedule = dict(start.schedule)
    peaks: dict[int, int] = {}
    timed_out = False
    lead, lead_bytes = None, -1
    for computation_id in builder.computations():
        item = builder.build(computation_id, peaks)
        result = search(item.problem, options.effort, deadline)
        timed_out |= result.timed_out
        if result.node >= 0:
            binding.add(item.clusters[result.node][0])
        peaks[computation_id] = result.peak
        schedule[computation_id] = item.expand(result.orders[0])
        own_bytes = result.peak - max(item.problem.transient, default=0)
        if own_bytes > lead_bytes:
            lead, lead_bytes = (item, result), own_bytes
    assert lead is not None, "a module has an entry"
    item, result = lead

    def packed(order: list[int]) -> tuple[_Candidate, list[int]]:
        candidate = {**schedule, item.computation.id: item.expand(order)}
        return _Candidate(candidate, simulate(dataflow, candidate)), order

    tried = [packed(result.orders[0])]
    for order in result.orders[1 : _PACKED[options.effort]]:
        if not passed(deadline):
            tried.append(packed(order))
    tried.sort(key=lambda t: t[0].assignment.temp)
    if _fragmented(tried[0][0].assignment) and not passed(deadline):
        order = tried[0][1]
        tried += [packed(smoothed(item.problem, order, above, options.effort, deadline)) for above in _SMOOTH]
    best = min((t[0] for t in tried), key=lambda c: c.assignment.temp)
    return best, peaks[dataflow.module.entry.id], timed_out or passed(deadline)


def _fragmented(assignment: Assignment) -> bool:
    """Whether XLA's placement wastes enough to look for an order that packs better."""
    return assignment.heap - assignment.live_peak > _WASTE * assignment.heap


def _make_plan(
    module: Module,
    target: Platform,
    options: Options,
    given: _Candidate,
    best: _Candidate,
    bound: int,
    timed_out: bool,
    started: float,
) -> Plan:
    assignment = best.assignment
    names = {
        module.computations[c].name: [module.computations[c].by_id[i].name for i in order]
        for c, order in best.schedule.items()
        if order and c in assignment.ranges.span
    }
    offsets = {
        (e.value.instruction.name, e.value.index): assignment.offsets[e.value.id] for e in assignment.events
    }
    return Plan(
        module=module.name,
        platform=target.name,
        instructions=module.instruction_count,
        peak_before=given.assignment.temp,
        peak_after=assignment.temp,
        lower_bound=bound,
        fragmentation_bytes=assignment.heap - assignment.live_peak,
        schedule=names,
        offsets=offsets,
        plan_seconds=time.perf_counter() - started,
        optimal=assignment.temp <= OPTIMAL * bound,
        options=options,
        changed=best is not given,
        timed_out=timed_out,
    )
