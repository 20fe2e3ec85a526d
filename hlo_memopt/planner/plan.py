"""A plan for one module, and how it is made."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

from hlo_memopt.hlo.graph import Module, ShapeIndex
from hlo_memopt.liveness.dataflow import Dataflow
from hlo_memopt.options import Options
from hlo_memopt.pack.assignment import simulate
from hlo_memopt.planner.floor import FloorBudget, lower_bound
from hlo_memopt.planner.improve import Candidate, fill_places, improve
from hlo_memopt.platforms import Platform
from hlo_memopt.platforms import platform as platform_named
from hlo_memopt.rewrite import put_schedule
from hlo_memopt.schedule.search import OPTIMAL

# Cuts of the floor
_FLOOR = {"fast": FloorBudget(4, 1, 2), "default": FloorBudget(12, 3, 4), "max": FloorBudget(400, 40, 20)}


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
    given = Candidate(module.schedule, simulate(dataflow, module.schedule))
    best, timed_out, bound = given, False, 0
    binding: set[int] = set()
    deadline = None if options.time_limit is None else started + options.time_limit

    def floor(candidate: Candidate) -> int:
        if not candidate.assignment.temp:
            return 0
        kind = candidate.assignment.kind
        return lower_bound(dataflow, candidate.schedule, kind, _FLOOR[options.effort], binding, deadline)

    if options.reorder and given.assignment.temp:
        best, timed_out = improve(dataflow, given, options, deadline, binding)
        bound = floor(best)
        filled, late = fill_places(dataflow, best, options, deadline, bound)
        timed_out |= late
        if filled is not best:
            best, bound = filled, max(bound, floor(filled))
    if not _worth_it(target, given.assignment.temp, best.assignment.temp):
        best = given
    bound = bound or floor(best)
    return _make_plan(module, target, options, given, best, bound, timed_out, started)


def _worth_it(target: Platform, before: int, after: int) -> bool:
    """Whether a prediction promises more than its own error may be."""
    return after < before * (1 - target.model_error)


def _make_plan(
    module: Module,
    target: Platform,
    options: Options,
    given: Candidate,
    best: Candidate,
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
