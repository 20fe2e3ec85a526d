"""A floor for temp under every order: minimum cuts on a problem in which nothing is counted that XLA might save.

Beside the heap XLA has places that cost no temp: the allocations of results and of donated parameters while they
are idle (`idle`). What may lie in them comes off the cuts at prices that hold for every order (`prices`). First many
nodes are tried under simple prices, then the best of them under prices made for each.

Operands of a call live until it is done (HloLiveRange), but for what a loop starts with and does not carry: what a
loop brings up is counted without that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence, Set

import numpy as np

from hlo_memopt.hlo.graph import Instruction
from hlo_memopt.liveness.dataflow import Buffer, Dataflow, Value
from hlo_memopt.liveness.inplace import in_place_pairs
from hlo_memopt.liveness.ranges import Schedule, flattened_callees
from hlo_memopt.planner.idle import Fits, idle_places
from hlo_memopt.planner.prices import NodePrices, Prices
from hlo_memopt.planner.problems import ComputationProblem, ProblemBuilder
from hlo_memopt.schedule.cuts import CutFinder
from hlo_memopt.schedule.divide import passed
from hlo_memopt.schedule.exact import solve_exact
from hlo_memopt.schedule.flat import Flat

_NEAR = 8  # nodes before and behind a binding one that are looked at
_LARGE = 10_000  # nodes above which few cuts are tried
_WHOLE = 6_000  # nodes up to which whole orders are looked at
_COARSE = 1e-4  # temporaries below this share of the peak do not count there
_OPEN = 1.0005  # share by which the given order is above the bound for it to be worth a look
_WORTH = 0.97  # nodes that cannot reach this share of the best bound so far are left out


@dataclasses.dataclass(frozen=True)
class FloorBudget:
    """``cuts`` under simple prices, about; then ``nodes`` nodes with ``rounds`` rounds of prices of their own.

    ``states``: of the dynamic program over whole orders, where single cuts leave a gap.
    """

    cuts: int
    nodes: int
    rounds: int
    states: int = 0


def lower_bound(
    dataflow: Dataflow,
    schedule: Schedule,
    kind: dict[int, str],
    budget: FloorBudget,
    binding: Set[int] = frozenset(),
    deadline: float | None = None,
) -> int:
    """Bytes that the temp of no order falls below.

    Args:
      schedule: a good order; the cuts look where its peak is.
      kind: of each buffer, see `pack.assignment.Assignment`.
      budget: for each computation.
      binding: instructions whose cuts are likely to bind.
      deadline: time.perf_counter() after which the bound is taken as it stands (weaker, but true).
    """
    counted = ("heap", "in-allocation")
    builder = ProblemBuilder(dataflow, schedule, lambda b: kind[b.id] in counted, any_takeover=True)
    floors: dict[int, int] = {}
    for computation_id in builder.computations():
        item = builder.build(computation_id, {})
        floors[computation_id] = _Floor(dataflow, builder, item, kind, floors).search(budget, binding, deadline)
    tables = sum(b.bytes for b in dataflow.buffers if kind[b.id] == "tuple")  # however XLA aligns them
    return floors[dataflow.module.entry.id] + tables


class _Floor:
    """The floor of one computation; ``floors``: those of the computations that it calls."""

    def __init__(
        self,
        dataflow: Dataflow,
        builder: ProblemBuilder,
        item: ComputationProblem,
        kind: dict[int, str],
        floors: dict[int, int],
    ) -> None:
        self.item = item
        self.problem = item.problem
        self.nested = [max((floors.get(c, 0) for c in _callees(item, cluster)), default=0) for cluster in item.clusters]
        if not self.problem.buffers:
            return
        self.flat = Flat.of(self.problem)
        self.places = idle_places(dataflow, builder, item, kind)
        self.fits = Fits(self.problem, self.places)
        # what a call needs inside, less operands that may die there
        self.calls = {
            v: max(0, n - _may_die_inside(dataflow, item, builder, v)) for v, n in enumerate(self.nested) if n
        }
        inside = [x.bytes for c in builder.computations() if c != item.computation.id for x in builder.owned(c)]
        # the most that a temporary of a called computation may save in each place
        self.inner = [max((b for b in inside if b <= p.bytes), default=0) if self.calls else 0 for p in self.places]

    def search(self, budget: FloorBudget, binding: Set[int], deadline: float | None) -> int:
        if not self.problem.buffers:
            return max(self.nested, default=0)
        wanted = [v for v, cluster in enumerate(self.item.clusters) if not binding.isdisjoint(cluster)]
        if self.problem.n > _LARGE:  # a cut of a deep graph costs more than its share
            budget = FloorBudget(min(budget.cuts, 3), 1, 1)
        simple = self._simple_prices()
        found = self._single_cuts(simple, wanted, budget.cuts, deadline)
        best = max((bound for bound, _ in found), default=0)
        for _, v in sorted(found, reverse=True)[: budget.nodes] if self.places else ():
            if passed(deadline):
                break
            best = max(best, self._at_node(v, budget.rounds))
        if budget.states and self.problem.n <= _WHOLE and not passed(deadline):
            best = max(best, self._whole_orders(simple, best, budget.states))
        return best

    def _own(self, flat: Flat, price: dict[int, int], calls: Iterable[int]) -> np.ndarray:
        """By node, what it brings up itself; what ``calls`` need inside, under some prices by place, included."""
        own = flat.own_bytes()
        for call in calls:
            beyond = 0
            for i, (place, inner) in enumerate(zip(self.places, self.inner, strict=True)):
                # a companion that the call itself makes is not there yet, and pays nothing
                late = place.companion >= 0 and self.flat.producer[place.companion] == call
                beyond += max(0, inner - (0 if late else price.get(i, 0)))
            own[call] = max(int(own[call]), self.calls[call] - beyond)
        return own

    def _simple_prices(self) -> _Reduced:
        """Prices for all nodes. u of a place: the largest temporary that fits, of those alive at the peak."""
        flat, given = self.flat, np.arange(self.flat.n)
        at = int(np.argmax(flat.profile(given)))
        single = np.ones(len(flat.size), dtype=bool)
        single[[place.companion for place in self.places if place.companion >= 0]] = False
        temporaries = np.sort(flat.size[single & self._alive(given < at, at)])
        fitting = [int(np.searchsorted(temporaries, place.bytes, side="right")) for place in self.places]
        u = np.array([temporaries[k - 1] if k else 0 for k in fitting], dtype=np.int64)
        nobody = np.zeros(len(flat.size), dtype=bool)
        everywhere = NodePrices(flat, self.fits, (1 << len(self.places)) - 1, nobody)
        size, unpaid, _ = everywhere.reduced(Prices(u, np.zeros(0, np.int64)))
        reduced = dataclasses.replace(flat, size=size)
        own = self._own(reduced, dict(enumerate(u.tolist())), self.calls)
        return _Reduced(reduced, own, unpaid)

    def _single_cuts(
        self, simple: _Reduced, wanted: list[int], cuts: int, deadline: float | None
    ) -> list[tuple[int, int]]:
        """(bound, node) of nodes that may bind."""
        flat, own = simple.flat, simple.own
        rest = [(1 << i, b) for i, b in enumerate(simple.unpaid.tolist()) if b]
        profile = flat.profile(np.arange(flat.n))
        near = [w for v in wanted for w in range(max(0, v - _NEAR), min(flat.n, v + _NEAR + 1))]
        near.sort(key=lambda v: -profile[v])
        highest = np.argsort(-profile, kind="stable")[: 4 * cuts].tolist()
        finder = CutFinder(flat, own) if flat.size.any() else None
        found: list[tuple[int, int]] = []
        best, spent = 0, 0
        for v in dict.fromkeys([*wanted, *near[:cuts], *highest]):
            idle = self.fits.idle_at(v)
            off = sum(b for bit, b in rest if idle & bit)
            if spent >= 2 * cuts or max(profile[v], own[v]) - off <= _WORTH * best:
                continue
            if found and passed(deadline):
                break
            spent += 1
            bound = (finder.cut(v).bound if finder else int(own[v])) - off
            found.append((bound, v))
            best = max(best, bound)
        return found

    def _whole_orders(self, simple: _Reduced, known: int, states: int) -> int:
        """A bound over whole orders by the dynamic program, where one cut is not enough.

        Small temporaries count for nothing there, so that they do not multiply the states.
        """
        flat, off = simple.flat, int(simple.unpaid.sum())
        profile = flat.profile(np.arange(flat.n))
        top = max(int(profile.max()), int(simple.own.max()))
        if top - off <= known * _OPEN:
            return known
        size = np.where(flat.size < _COARSE * top, 0, flat.size)
        _level(size, flat)
        out = np.zeros(flat.n, dtype=np.int64)
        made = flat.producer >= 0
        np.add.at(out, flat.producer[made], size[made])
        transient = np.zeros(flat.n, dtype=np.int64)
        for v in self.calls:
            transient[v] = max(0, int(simple.own[v]) - int(out[v]))
        problem = dataclasses.replace(flat, size=size, transient=transient).to_problem()
        return solve_exact(problem, max_states=states).bound - off

    def _at_node(self, v: int, rounds: int) -> int:
        """The bound of ``v`` under prices of its own."""
        flat = self.flat
        before, after = _reach(v, self.problem.preds), _reach(v, self.problem.succs)
        ran = np.zeros(flat.n, dtype=bool)
        ran[list(before - {v})] = True
        waits = np.zeros(flat.n, dtype=bool)
        waits[list(after)] = True
        certain = flat.live_out.copy()
        certain[flat.use_buffer[waits[flat.use_node]]] = True
        certain &= np.append(ran, True)[flat.producer]
        prices = NodePrices(flat, self.fits, self.fits.idle_at(v), certain)
        calls = [v] if v in self.calls else []

        def cut(size: np.ndarray, at: Prices) -> tuple[int, np.ndarray]:
            reduced = dataclasses.replace(flat, size=size)
            own = self._own(reduced, dict(zip(prices.places, at.u.tolist(), strict=True)), calls)
            if not size.any():
                return int(own[v]), np.zeros(len(size), dtype=bool)
            found = CutFinder(reduced, own).cut(v)
            return found.bound, self._alive(found.before, v)

        return prices.improve(cut, self._alive(np.arange(flat.n) < v, v), rounds)

    def _alive(self, ran: np.ndarray, v: int) -> np.ndarray:
        """Mask of the buffers that are alive while ``v`` runs after the mask ``ran`` of nodes."""
        flat = self.flat
        started = np.append(ran, True)[flat.producer] | (flat.producer == v)
        started[flat.reuse_to[flat.reuse_node == v]] = False  # it may take over an operand's bytes
        pending = np.zeros(len(flat.size), dtype=bool)
        later = ~ran[flat.use_node] | (flat.use_node == v)
        pending[flat.use_buffer[later]] = True
        return started & (pending | flat.live_out)


@dataclasses.dataclass(frozen=True)
class _Reduced:
    """The problem under some prices: sizes left; by node, bytes it brings up; by place, what is not paid for."""

    flat: Flat
    own: np.ndarray
    unpaid: np.ndarray


def _level(size: np.ndarray, flat: Flat) -> None:
    """Lower sizes until the two buffers of each reuse have equal ones again, as the dynamic program wants them."""
    if not len(flat.reuse_from):
        return
    while True:
        least = np.minimum(size[flat.reuse_from], size[flat.reuse_to])
        before = size.copy()
        np.minimum.at(size, flat.reuse_from, least)
        np.minimum.at(size, flat.reuse_to, least)
        if (before == size).all():
            return


def _reach(start: int, neighbours: Sequence[Sequence[int]]) -> set[int]:
    """What can be reached from a node, itself included."""
    seen, stack = {start}, [start]
    while stack:
        for w in neighbours[stack.pop()]:
            if w not in seen:
                seen.add(w)
                stack.append(w)
    return seen


def _callees(item: ComputationProblem, cluster: list[int]) -> list[int]:
    by_id = item.computation.by_id
    return [c for i in cluster for c in flattened_callees(by_id[i])]


def _may_die_inside(dataflow: Dataflow, item: ComputationProblem, builder: ProblemBuilder, v: int) -> int:
    """Bytes of buffers that a call reads and that need not be alive at the peak inside."""
    by_id = item.computation.by_id
    loops = [loop for i in item.clusters[v] for loop in _loops(dataflow, by_id[i])]
    if not loops:
        return 0
    total = 0
    for j, b in enumerate(item.problem.buffers):
        buffer = builder.owned(item.computation.id)[j]
        if v in b.consumers and not all(_held_throughout(dataflow, buffer, loop) for loop in loops):
            total += b.size
    return total


def _loops(dataflow: Dataflow, instruction: Instruction) -> Iterator[Instruction]:
    """The outermost loops that run while an instruction does: itself, or in what it calls."""
    if instruction.opcode == "while":
        yield instruction
        return
    for callee in flattened_callees(instruction):
        for inner in dataflow.module.computations[callee].instructions:
            yield from _loops(dataflow, inner)


def _held_throughout(dataflow: Dataflow, buffer: Buffer, loop: Instruction) -> bool:
    """Whether some value of the buffer is alive at every step of the loop."""
    body = dataflow.module.computations[loop.called[0]]
    at_start, at_end = dataflow.trees[body.parameters[0].id], dataflow.trees[body.root_id]
    for index, value in dataflow.trees[loop.id].items():
        if dataflow.buffer_of[value.id] is buffer:
            first, last = at_start[index], at_end[index]
            if first is last or _updated_in_place(dataflow, first, last):
                return True
    return False


def _updated_in_place(dataflow: Dataflow, first: Value, last: Value) -> bool:
    """Whether ``last`` is ``first`` after in-place updates only."""
    value = last
    while value is not first:
        source: Instruction = value.instruction
        pair = next((p for p in in_place_pairs(source) if p.output_index == value.index), None)
        if pair is None or source.opcode == "parameter":
            return False
        value = dataflow.trees[source.operands[pair.operand]][pair.operand_index]
    return True
