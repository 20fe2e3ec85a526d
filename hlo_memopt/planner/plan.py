"""A plan for one module, and how it is made."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from typing import Any

from hlo_memopt.elide import needless_copies
from hlo_memopt.hlo.graph import Module, ShapeIndex
from hlo_memopt.liveness.dataflow import Dataflow
from hlo_memopt.options import Options
from hlo_memopt.pack.assignment import simulate
from hlo_memopt.planner.floor import FloorBudget, lower_bound
from hlo_memopt.planner.improve import Candidate, fill_places, improve
from hlo_memopt.planner.settle import settle
from hlo_memopt.platforms import Platform
from hlo_memopt.platforms import platform as platform_named
from hlo_memopt.rewrite import put_schedule, remove_copies
from hlo_memopt.schedule.divide import passed
from hlo_memopt.schedule.ilp_support import solver_named
from hlo_memopt.schedule.search import OPTIMAL

# Cuts of the floor
_FLOOR = {
    "fast": FloorBudget(cuts=4, nodes=1, rounds=2),
    "default": FloorBudget(cuts=12, nodes=3, rounds=4, states=10_000),
    "max": FloorBudget(cuts=400, nodes=40, rounds=20, states=200_000),
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to change in a module and what our model expects of it. Sizes in bytes.

    Attributes:
      module, platform: what was planned, for what.
      instructions: scheduled instructions.
      peak_before, peak_after: predicted temp (XLA's temp_size_in_bytes) of the given schedule and of ours.
      lower_bound: no order of the module's computations has a smaller temp, by the same model; 0: not known.
      fragmentation_bytes: predicted heap of our schedule less its largest live sum.
      schedule: computation name -> instruction names in order.
      elided: names of copies that are left out: their readers read what was copied.
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
    elided: tuple[str, ...]
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
        """Serialized HloModuleProto with this plan put in; ValueError if it is another module."""
        lean = remove_copies(module_bytes, self.elided) if self.elided else module_bytes
        return put_schedule(lean, self.schedule)

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
            "elided_copies": len(self.elided),
            "plan_seconds": self.plan_seconds,
            "optimal": self.optimal,
            "changed": self.changed,
            "timed_out": self.timed_out,
            "options": dataclasses.asdict(self.options),
        }


def plan_module(data: bytes, platform: str = "cpu", options: Options | None = None) -> Plan:
    """Plan a scheduled module (serialized HloModuleProto).

    Raises ValueError if the module has no schedule, is one that we cannot read, or the solver is not installed.
    """
    started = time.perf_counter()
    options = options or Options()
    solver_named(options.solver)  # not installed: better said now than in the middle
    target = platform_named(platform)
    module = Module.from_bytes(data)
    if not module.is_scheduled:
        raise ValueError(f"module {module.name!r} has no schedule")
    deadline = None if options.time_limit is None else started + options.time_limit
    dataflow = Dataflow(module, target)
    given = Candidate(module.schedule, simulate(dataflow, module.schedule))
    before = given.assignment.temp
    made = None
    if before and options.elide_copies and target.elides_copies:
        names = needless_copies(module, dataflow)
        if names:
            lean = Dataflow(Module.from_bytes(remove_copies(data, names)), target)
            start = Candidate(lean.module.schedule, simulate(lean, lean.module.schedule))
            made = _search(lean, start, options, deadline)
            made.elided = tuple(names)
    if made is None or not _worth_it(target, before, made.best.assignment.temp):
        made = _search(dataflow, given, options, deadline)
        if not _worth_it(target, before, made.best.assignment.temp):
            made.best = given
    made.changed = made.best is not given
    return _make_plan(made, target, options, before, started)


@dataclasses.dataclass
class _Made:
    """What was found for one form of the module."""

    dataflow: Dataflow
    best: Candidate
    bound: int
    timed_out: bool
    elided: tuple[str, ...] = ()
    changed: bool = False


def _search(dataflow: Dataflow, given: Candidate, options: Options, deadline: float | None) -> _Made:
    """The best candidate, and a floor for all."""
    best, bound, timed_out = given, 0, False
    binding: set[int] = set()

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
            best = filled
            if best.assignment.temp > OPTIMAL * bound:
                bound = max(bound, floor(best))
        if options.effort != "fast" and best is not given and not passed(deadline):
            best = settle(dataflow, given.schedule, best, deadline)
    bound = bound or floor(best)
    if bound > best.assignment.temp:
        # refuted by the schedule at hand: a rule of XLA's that the floor does not know; none is better than a false one
        logging.getLogger("hlo_memopt").debug("%s: a floor of %d bytes is dropped", dataflow.module.name, bound)
        bound = 0
    return _Made(dataflow, best, bound, timed_out)


def _worth_it(target: Platform, before: int, after: int) -> bool:
    """Whether a prediction promises more than its own error may be."""
    return after < before * (1 - target.model_error)


def _make_plan(made: _Made, target: Platform, options: Options, before: int, started: float) -> Plan:
    module, assignment = made.dataflow.module, made.best.assignment
    names = {
        module.computations[c].name: [module.computations[c].by_id[i].name for i in order]
        for c, order in made.best.schedule.items()
        if order and c in assignment.ranges.span
    }
    offsets = {
        (e.value.instruction.name, e.value.index): assignment.offsets[e.value.id] for e in assignment.events
    }
    return Plan(
        module=module.name,
        platform=target.name,
        instructions=module.instruction_count,
        peak_before=before,
        peak_after=assignment.temp,
        lower_bound=made.bound,
        fragmentation_bytes=assignment.heap - assignment.live_peak,
        schedule=names,
        elided=made.elided if made.changed else (),
        offsets=offsets,
        plan_seconds=time.perf_counter() - started,
        optimal=assignment.temp <= OPTIMAL * made.bound,
        options=options,
        changed=made.changed,
        timed_out=made.timed_out,
    )
