"""Better schedules of a module, judged by the simulated buffer assignment."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from hlo_memopt.liveness.dataflow import Buffer, Dataflow
from hlo_memopt.liveness.ranges import Schedule
from hlo_memopt.options import Options
from hlo_memopt.pack.assignment import Assignment, simulate
from hlo_memopt.planner.guests import Guest, invite
from hlo_memopt.planner.idle import idle_places
from hlo_memopt.planner.problems import ComputationProblem, ProblemBuilder
from hlo_memopt.schedule.divide import passed
from hlo_memopt.schedule.problem import Problem, peak
from hlo_memopt.schedule.search import OPTIMAL, search, smoothed, variants

# How often the buffers that lie in idle allocations are looked at anew: where they lie depends on the order.
_ROUNDS = {"fast": 1, "default": 2, "max": 4}
# How often temporaries are put into idle allocations on purpose
_INVITATIONS = {"fast": 0, "default": 3, "max": 10}

# A round's problem is taken to be the right one if its peak comes out within this share
_SAME_HEAP = 0.02
# ... and packing is not tried again if it wastes no more than this share
_WELL_PACKED = 0.01
# Orders that are packed, to take the best
_PACKED = {"fast": 2, "default": 8, "max": 8}
# What is alive above these shares of the peak is lowered where packing wastes memory
_SMOOTH = (0.97, 0.9)
# Good orders of which variants are tried then
_VARIED = {"fast": 1, "default": 2, "max": 8}
# Share of the heap lost to fragmentation that is worth other orders
_WASTE = 0.0005


@dataclasses.dataclass
class Candidate:
    """A schedule and what XLA would make of it."""

    schedule: Schedule
    assignment: Assignment


def improve(
    dataflow: Dataflow, given: Candidate, options: Options, deadline: float | None, binding: set[int]
) -> tuple[Candidate, bool]:
    """The best schedule that ordering each computation by itself finds, and whether the deadline bit.

    Adds to ``binding`` the instructions whose cuts bound the searches.
    """
    best, timed_out = given, False
    for _ in range(_ROUNDS[options.effort]):
        found, lowest, promised, late = _round(dataflow, best, options, deadline, binding)
        timed_out |= late
        if found.assignment.temp >= best.assignment.temp:
            break
        best = found
        as_promised = abs(lowest - promised) <= _SAME_HEAP * promised
        if timed_out or (as_promised and best.assignment.heap <= (1 + _WELL_PACKED) * lowest):
            break
    return best, timed_out


def fill_places(
    dataflow: Dataflow, given: Candidate, options: Options, deadline: float | None, bound: int
) -> tuple[Candidate, bool]:
    """``given``, or a better schedule in which more temporaries lie in idle allocations; whether the deadline bit.

    ``bound``: no schedule has a smaller temp, in bytes.
    """
    best = given
    banned: set[Guest] = set()
    for _ in range(_INVITATIONS[options.effort]):
        if best.assignment.temp <= OPTIMAL * bound or passed(deadline):
            break
        found, timed_out = _with_guests(dataflow, best, options, deadline, banned)
        if found is not None and found.assignment.temp < best.assignment.temp:
            best = found
        if found is None or timed_out:
            return best, timed_out
    return best, False


def _builder(dataflow: Dataflow, candidate: Candidate, *kinds: str) -> ProblemBuilder:
    """Problems in which the buffers of these kinds count."""
    kind = candidate.assignment.kind

    def counted(buffer: Buffer) -> bool:
        return kind[buffer.id] in kinds

    return ProblemBuilder(dataflow, candidate.schedule, counted)


def _round(
    dataflow: Dataflow, start: Candidate, options: Options, deadline: float | None, binding: set[int]
) -> tuple[Candidate, int, int, bool]:
    """Plan every computation, callees first; of the good orders of the one that holds most take what XLA packs best.

    Also the least that was alive at the peak of any, the peak that the entry's problem promised, and whether the
    deadline bit.
    """
    builder = _builder(dataflow, start, "heap")
    schedule = dict(start.schedule)
    peaks: dict[int, int] = {}
    timed_out = False
    lead, lead_bytes = None, -1
    for computation_id in builder.computations():
        item = builder.build(computation_id, peaks)
        result = search(item.problem, options.effort, deadline, options.solver)
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

    def packed(order: list[int]) -> Candidate:
        return _packed(dataflow, schedule, item, order)

    best, lowest = _best_packed(packed, item.problem, result.orders, options, deadline)
    return best, lowest, peaks[dataflow.module.entry.id], timed_out or passed(deadline)


def _with_guests(
    dataflow: Dataflow, start: Candidate, options: Options, deadline: float | None, banned: set[Guest]
) -> tuple[Candidate | None, bool]:
    """The entry computation ordered so that temporaries lie in idle allocations; None if none can be put there.

    Adds to ``banned`` the pairs that XLA does not put together. Also whether the deadline bit.
    """
    builder = _builder(dataflow, start, "heap", "in-allocation")
    peaks: dict[int, int] = {}
    for computation_id in builder.computations():  # the entry is the last
        item = builder.build(computation_id, peaks)
        peaks[computation_id] = peak(item.problem, range(item.problem.n))
    places = idle_places(dataflow, builder, item, start.assignment.kind)
    hosted = invite(item.problem, places, start.assignment.live_peak, banned)
    if hosted is None:
        return None, passed(deadline)
    result = search(hosted.problem, options.effort, deadline, options.solver)

    def packed(order: list[int]) -> Candidate:
        return _packed(dataflow, start.schedule, item, [hosted.nodes[v] for v in order])

    best, _ = _best_packed(packed, hosted.problem, result.orders, options, deadline)
    owned = builder.owned(item.computation.id)
    lies_in = best.assignment.lies_in
    banned.update((b, i) for b, i in hosted.guests if lies_in.get(owned[b].id) != places[i].buffer)
    return best, result.timed_out or passed(deadline)


def _packed(dataflow: Dataflow, schedule: Schedule, item: ComputationProblem, order: list[int]) -> Candidate:
    """``schedule`` with one computation ordered anew."""
    changed = {**schedule, item.computation.id: item.expand(order)}
    return Candidate(changed, simulate(dataflow, changed))


def _best_packed(
    packed: Callable[[list[int]], Candidate],
    problem: Problem,
    orders: Sequence[list[int]],
    options: Options,
    deadline: float | None,
) -> tuple[Candidate, int]:
    """The candidate of least temp, and the least that was alive at the peak of any order.

    If XLA's placement wastes memory, orders with less alive near the peak, and others of the same peak, are tried too.
    """
    tried = [(packed(orders[0]), orders[0])]
    for order in orders[1 : _PACKED[options.effort]]:
        if not passed(deadline):
            tried.append((packed(order), order))
    best = min((candidate for candidate, _ in tried), key=lambda c: c.assignment.temp)
    tried.sort(key=lambda t: t[0].assignment.live_peak)
    lowest = tried[0][0].assignment.live_peak

    def others() -> Iterator[list[int]]:
        for above in _SMOOTH:
            yield smoothed(problem, tried[0][1], above, options.effort, deadline)
        yield from variants(problem, [order for _, order in tried[: _VARIED[options.effort]]])

    for order in others():
        if best.assignment.heap <= (1 + _WASTE) * lowest or passed(deadline):
            break
        found = packed(order)
        if found.assignment.temp < best.assignment.temp:
            best = found
    return best, lowest
