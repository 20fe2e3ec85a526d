"""The third objective: after temp and what is alive near the peak, an order as close to XLA's as can be.

What is moved without need costs the parallelism and overlap that XLA planned for. Temporaries that lie in idle
allocations stay there: precedence keeps each place idle as long as its guest lives.
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np

from hlo_memopt.liveness.dataflow import Buffer, Dataflow
from hlo_memopt.liveness.ranges import Schedule
from hlo_memopt.pack.assignment import simulate
from hlo_memopt.planner.idle import Place, idle_places
from hlo_memopt.planner.improve import Candidate
from hlo_memopt.planner.problems import ComputationProblem, ProblemBuilder
from hlo_memopt.schedule.divide import passed
from hlo_memopt.schedule.flat import Flat
from hlo_memopt.schedule.nearest import nearest_accepted

_NEAR = 0.9  # what is alive above this share of the peak does not rise in sum
_COMPUTATIONS = 4  # those with most instructions
_LARGE = 20_000  # instructions; above it the simulation is asked less often
_TRIES = 6


def settle(dataflow: Dataflow, given: Schedule, best: Candidate, deadline: float | None) -> Candidate:
    """``best``, closer to the ``given`` schedule at no more temp."""
    kind = best.assignment.kind

    def counted(buffer: Buffer) -> bool:
        return kind[buffer.id] in ("heap", "in-allocation")

    builder = ProblemBuilder(dataflow, given, counted)
    peaks: dict[int, int] = {}
    work: list[tuple[ComputationProblem, Flat, np.ndarray, int]] = []
    for computation_id in builder.computations():
        item = builder.build(computation_id, peaks)
        order = _order_of(item, best.schedule[computation_id])
        flat = _with_lodgers(dataflow, builder, item, best, order)
        peaks[computation_id] = int(flat.profile(order).max(initial=0)) if flat.n else 0
        if best.schedule[computation_id] != given[computation_id]:
            work.append((item, flat, order, peaks[computation_id]))
    work.sort(key=lambda w: -w[1].n)
    tries = _TRIES if dataflow.module.instruction_count < _LARGE else 1
    for item, flat, order, peak in work[:_COMPUTATIONS]:
        best = _settled(dataflow, best, item, flat, order, peak, tries, deadline)
    return best


def _settled(
    dataflow: Dataflow,
    best: Candidate,
    item: ComputationProblem,
    flat: Flat,
    order: np.ndarray,
    peak: int,
    tries: int,
    deadline: float | None,
) -> Candidate:
    """``best`` with one computation closer to its given order."""
    accepted: dict[bytes, Candidate] = {}

    def accepts(new: np.ndarray) -> bool:
        if passed(deadline):
            return False
        schedule = {**best.schedule, item.computation.id: item.expand(new.tolist())}
        found = Candidate(schedule, simulate(dataflow, schedule))
        if found.assignment.temp > best.assignment.temp:
            return False
        accepted[new.tobytes()] = found
        return True

    new = nearest_accepted(flat, order, peak, accepts, _NEAR, tries)
    closest = accepted.get(new.tobytes(), best)
    smallest = min(accepted.values(), key=lambda c: c.assignment.temp, default=best)
    return smallest if smallest.assignment.temp < closest.assignment.temp else closest


def _order_of(item: ComputationProblem, schedule: list[int]) -> np.ndarray:
    """A schedule of the computation as an order of the problem's nodes."""
    place = {i: n for n, i in enumerate(schedule)}
    return np.array(sorted(range(item.problem.n), key=lambda v: place[item.clusters[v][0]]), dtype=np.int64)


def _with_lodgers(
    dataflow: Dataflow, builder: ProblemBuilder, item: ComputationProblem, best: Candidate, order: np.ndarray
) -> Flat:
    """The problem in which temporaries in idle allocations cost nothing and stay there, whatever else moves."""
    flat, lies_in = Flat.of(item.problem), best.assignment.lies_in
    owned = builder.owned(item.computation.id)
    guests = [j for j, buffer in enumerate(owned) if buffer.id in lies_in]
    if not guests:
        return flat
    at = np.empty(flat.n, dtype=np.int64)
    at[order] = np.arange(flat.n)
    places: dict[int, Place] = {p.buffer: p for p in idle_places(dataflow, builder, item, best.assignment.kind)}
    size = flat.size.copy()
    size[guests] = 0
    by_place: dict[int, list[int]] = {}
    edges: set[tuple[int, int]] = set()
    for j in guests:
        made, users = _nodes(item, j)
        by_place.setdefault(lies_in[owned[j].id], []).append(j)
        place = places.get(lies_in[owned[j].id])
        if place is not None:
            edges.update((r, made) for r in place.readers if at[r] < at[made])
            edges.update((u, place.writer) for u in users if place.writer >= 0 and at[u] < at[place.writer])
    for together in by_place.values():
        together.sort(key=lambda j: at[_nodes(item, j)[0]])
        for j, k in pairwise(together):
            made = _nodes(item, k)[0]
            edges.update((u, made) for u in _nodes(item, j)[1] if at[u] < at[made])
    new = np.array(sorted(edges), dtype=np.int64).reshape(-1, 2)
    return dataclasses.replace(
        flat,
        edge_from=np.concatenate([flat.edge_from, new[:, 0]]),
        edge_to=np.concatenate([flat.edge_to, new[:, 1]]),
        size=size,
    )


def _nodes(item: ComputationProblem, j: int) -> tuple[int, tuple[int, ...]]:
    """The node that makes a buffer, and all that touch it."""
    buffer = item.problem.buffers[j]
    return buffer.producer, (buffer.producer, *buffer.consumers)
