"""A floor for temp under every order: minimum cuts on a problem in which nothing is counted that XLA might save.

Beside the heap XLA has places that cost no temp: the allocations of results and of donated parameters while they
are idle, one temporary at a time in each. What lies in them is a matching of live temporaries b to idle places i, so by
the dual of that assignment no state saves more than

    sum of u(i) over idle places + sum of w(b) over live temporaries,    u(i) + w(b) >= size(b) wherever b may lie in i.

An allocation of a donated parameter is idle from the parameter's last reader to the writer of the result. Where a
temporary q is made by such a reader and read by that writer (XLA's copy of the parameter), q is alive whenever the
place is idle: q is the place's companion. It never lies there itself (unless it may take over the parameter's bytes),
and u(i) comes off q's bytes, exactly where the cut pays for q. Any u gives a true floor with

    w(b) = max(0, size(b) - u(j)) over the places j in which b may lie.

We take u(i) = the largest temporary that fits, is alive at the peak of a good order, and is nobody's companion, and
lower the bound of node v by u(i) for every place without a companion that may be idle while v runs.

Inside called computations operands may die early: what a call brings up is counted without them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import product

import numpy as np

from hlo_memopt.hlo.graph import Instruction
from hlo_memopt.liveness.dataflow import Buffer, Dataflow, Value
from hlo_memopt.liveness.inplace import in_place_pairs
from hlo_memopt.liveness.ranges import Schedule, flattened_callees
from hlo_memopt.liveness.sharing import can_share
from hlo_memopt.planner.problems import ComputationProblem, ProblemBuilder
from hlo_memopt.schedule.cuts import CutFinder
from hlo_memopt.schedule.divide import passed
from hlo_memopt.schedule.flat import Flat
from hlo_memopt.schedule.problem import Buffer as ProblemBuffer
from hlo_memopt.schedule.problem import Problem

_SIZES = 6  # sizes of idle allocations that are tried as thresholds
_RETRIES = 4
_NEAR = 8  # nodes before and behind a binding one that are looked at
_NEVER = -1  # the writer of an allocation that is not written again


@dataclass(frozen=True)
class _Idle:
    """An allocation that may hold a temporary: after ``readers`` have run and before ``writer`` has."""

    readers: frozenset[int]
    writer: int
    bytes: int
    companion: int  # buffer of the problem; -1: none
    takes_itself: bool  # whether the companion may lie in it


def lower_bound(
    dataflow: Dataflow,
    schedule: Schedule,
    kind: dict[int, str],
    cuts: int,
    binding: Set[int] = frozenset(),
    deadline: float | None = None,
) -> int:
    """Bytes that the temp of no order falls below.

    Args:
      schedule: a good order; the cuts look where its peak is.
      kind: of each buffer, see `pack.assignment.Assignment`.
      cuts: how many minimum cuts a computation may cost, about.
      binding: instructions whose cuts are likely to bind.
      deadline: time.perf_counter() after which the bound is taken as it stands (weaker, but true).
    """
    builder = ProblemBuilder(dataflow, schedule, lambda b: kind[b.id] in ("heap", "in-allocation"))
    floors: dict[int, int] = {}
    for computation_id in builder.computations():
        item = builder.build(computation_id, {})
        idle = _idle_allocations(dataflow, builder, item, kind)
        floors[computation_id] = _floor_of(dataflow, item, idle, floors, cuts, binding, builder, deadline)
    tables = sum(b.bytes for b in dataflow.buffers if kind[b.id] == "tuple")  # however XLA aligns them
    return floors[dataflow.module.entry.id] + tables


def _floor_of(
    dataflow: Dataflow,
    item: ComputationProblem,
    idle: list[_Idle],
    floors: dict[int, int],
    cuts: int,
    binding: Set[int],
    builder: ProblemBuilder,
    deadline: float | None,
) -> int:
    problem = item.problem
    nested = [max((floors.get(c, 0) for c in _callees(item, cluster)), default=0) for cluster in item.clusters]
    if not problem.buffers:
        return max(nested, default=0)
    flat = Flat.of(problem)
    calls = {v: max(0, n - _may_die_inside(dataflow, item, builder, v)) for v, n in enumerate(nested) if n}
    wanted = [v for v, cluster in enumerate(item.clusters) if not binding.isdisjoint(cluster)]
    companions = {place.companion for place in idle}
    single = np.array([j not in companions for j in range(len(flat.size))])
    inside = [x.bytes for c in builder.computations() if c != item.computation.id for x in builder.owned(c)]
    best = 0
    reach = _Reach(problem)
    for smallest, at_binding in product(_thresholds(idle), (False, True)):
        if passed(deadline):
            break
        alive = _alive_at(flat, wanted[0] if at_binding and wanted else None)
        temporaries = np.sort(flat.size[single & alive])
        price = [_price(place, temporaries, smallest) for place in idle]
        size = np.where(flat.size > smallest, flat.size, 0)
        rest: list[tuple[_Idle, int]] = []
        for j in np.flatnonzero(size).tolist():
            size[j] -= max(0, size[j] - min(_hosts(idle, price, j, int(size[j])), default=size[j]))
        for place, u in zip(idle, price, strict=True):
            q = place.companion
            paid = min(u, int(size[q])) if q >= 0 else 0
            if q >= 0:
                size[q] -= paid
            if u > paid:
                rest.append((place, u - paid))
        counted = dataclasses.replace(flat, size=size)
        own = counted.own_bytes()
        beyond = sum(
            max(0, max((b for b in inside if b <= p.bytes), default=0) - u) for p, u in zip(idle, price, strict=True)
        )
        for v, nested_bytes in calls.items():
            own[v] = max(int(own[v]), nested_bytes - beyond if not smallest else 0)
        held = _held(idle, price, problem.buffers, smallest)
        bound, node = _best_cut(counted, own, rest, held, wanted, cuts if not smallest else _RETRIES, reach)
        if bound > best:
            best = bound
            wanted = [node, *(v for v in wanted if v != node)]
    return best


def _thresholds(idle: list[_Idle]) -> list[int]:
    """Count temporaries above so many bytes: above 0, and above the largest few sizes of idle allocations.

    Each gives a true floor: what is not counted needs no saving.
    """
    return [0, *sorted({place.bytes for place in idle}, reverse=True)[:_SIZES]]


def _alive_at(flat: Flat, node: int | None) -> np.ndarray:
    """Mask of the buffers that are alive at a node, or at the peak, of the given order (0, 1, 2, ...)."""
    at = int(np.argmax(flat.profile(np.arange(flat.n)))) if node is None else node
    last = flat.producer.copy()
    np.maximum.at(last, flat.use_buffer, flat.use_node)
    return (flat.producer <= at) & ((last >= at) | flat.live_out)


def _hosts(idle: list[_Idle], price: list[int], buffer: int, size: int) -> Iterator[int]:
    """Prices of the places in which a buffer of the problem may lie."""
    for place, u in zip(idle, price, strict=True):
        if place.bytes >= size and (place.companion != buffer or place.takes_itself):
            yield u


def _price(place: _Idle, temporaries: np.ndarray, smallest: int) -> int:
    """u of a place: the largest of some temporaries that fits; 0 if it is not counted."""
    fitting = int(np.searchsorted(temporaries, place.bytes, side="right"))
    u = int(temporaries[fitting - 1]) if fitting else 0
    return u if u > smallest else 0


def _held(
    idle: list[_Idle], price: list[int], buffers: tuple[ProblemBuffer, ...], smallest: int
) -> list[tuple[int, ProblemBuffer]]:
    """Uncounted companions of which, while they are alive, as many bytes are in the heap beside what is counted.

    Such a q may lie in another place only. Either that place's price was granted for nothing, or its companion is
    uncounted too and no smaller; it may lie in another's place in turn, but the first of them lies in none.
    """
    out = []
    for place in idle:
        q = place.companion
        if q < 0 or buffers[q].size > smallest or place.takes_itself:
            continue
        size = buffers[q].size
        hosts = ((p, u) for p, u in zip(idle, price, strict=True) if p.bytes >= size)
        if all(
            u >= size or (p.companion >= 0 and size <= buffers[p.companion].size <= smallest and not p.takes_itself)
            for p, u in hosts
        ):
            out.append((size, buffers[q]))
    return out


def _best_cut(
    flat: Flat,
    own: np.ndarray,
    rest: list[tuple[_Idle, int]],
    held: list[tuple[int, ProblemBuffer]],
    wanted: list[int],
    cuts: int,
    reach: _Reach,
) -> tuple[int, int]:
    """The largest bound over the wanted nodes, their neighbours, and the nodes at the peaks of the given order.

    ``rest``: places whose price (what is left of it) comes off where they may be idle. Returns (bound, its node).
    """
    profile = flat.profile(np.arange(flat.n))
    near = [w for v in wanted for w in range(max(0, v - _NEAR), min(flat.n, v + _NEAR + 1))]
    near.sort(key=lambda v: -profile[v])
    highest = np.argsort(-profile, kind="stable")[: 4 * cuts].tolist()
    largest = max((size for size, _ in held), default=0)
    if not flat.size.any() and not held:
        return int(own.max(initial=0)), -1
    finder = CutFinder(flat, own)
    bound, binding, spent = 0, -1, 0
    for v in dict.fromkeys([*wanted, *near[:cuts], *highest]):
        if spent >= 2 * cuts or profile[v] + largest <= bound:
            continue
        extra = 0
        if rest or held:
            before, after = reach.of(v)
            alive = (s for s, b in held if b.producer in before - {v} and not after.isdisjoint(b.consumers))
            extra = max(alive, default=0)
            # v itself may still write over what lies there, or have its own result there
            extra -= sum(u for p, u in rest if p.writer not in before - {v} and not p.readers & (after - {v}))
        if profile[v] + extra > bound:
            spent += 1
            found = finder.cut(v).bound + extra
            if found > bound:
                bound, binding = found, v
    return bound, binding


class _Reach:
    """Ancestors and descendants of nodes, the node itself among both; each looked up once."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._known: dict[int, tuple[set[int], set[int]]] = {}

    def of(self, v: int) -> tuple[set[int], set[int]]:
        found = self._known.get(v)
        if found is None:
            found = self._known[v] = (self._from(v, self._problem.preds), self._from(v, self._problem.succs))
        return found

    @staticmethod
    def _from(start: int, neighbours: Sequence[Sequence[int]]) -> set[int]:
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


def _idle_allocations(
    dataflow: Dataflow, builder: ProblemBuilder, item: ComputationProblem, kind: dict[int, str]
) -> list[_Idle]:
    """Allocations of results and donated parameters that some order of this computation leaves idle for a while.

    In the entry: before a result is written, after a donated parameter was last read. In a loop or a branch: between
    the last reader of the value that came in and the writer of the one that goes out.
    """
    computation = item.computation
    is_entry = computation.id == dataflow.module.entry.id
    aliased = {(a.parameter, a.parameter_index) for a in dataflow.module.aliases}
    node_of = {i: v for v, cluster in enumerate(item.clusters) for i in cluster}
    found: list[_Idle] = []
    for buffer in dataflow.buffers:
        if kind[buffer.id] not in ("parameter", "live-out") or any(v.shape.is_tuple for v in buffer.values):
            continue
        given = [
            v for v in buffer.values if v.instruction.opcode == "parameter" and v.instruction.computation is computation
        ]
        if is_entry and not all((v.instruction.parameter_number, v.index) in aliased for v in given):
            continue
        nodes = (builder.node(computation.id, v.instruction, node_of) for v in buffer.values if v not in given)
        writers = [w for w in nodes if w is not None]
        if not buffer.bytes or not (given or writers):
            continue
        readers = set().union(*(builder.touching(computation.id, v, node_of) for v in given))
        readers -= {node_of[v.instruction.id] for v in given}
        writer = min(writers, default=_NEVER)
        if given and writer in readers:
            continue  # read until it is overwritten: never idle
        companion = -1
        for j, b in enumerate(item.problem.buffers):
            follows = b.producer in readers and writer in b.consumers and b.size <= buffer.bytes
            if follows and (companion < 0 or b.size > item.problem.buffers[companion].size):
                companion = j
        takes = companion >= 0 and any(
            _may_take_over(dataflow, item, given, i) for i in item.clusters[item.problem.buffers[companion].producer]
        )
        found.append(_Idle(frozenset(readers), writer, buffer.bytes, companion, takes))
    return found


def _may_take_over(dataflow: Dataflow, item: ComputationProblem, given: list[Value], instruction_id: int) -> bool:
    """Whether an instruction may write a result over one of the values that came in."""
    user = item.computation.by_id[instruction_id]
    for operand in user.operands:
        for index, value in dataflow.trees[operand].items():
            if value in given and any(
                can_share(item.computation.by_id[operand], index, user, at) for at, _ in user.shape.leaves()
            ):
                return user.opcode != "copy"
    return False


def _may_die_inside(dataflow: Dataflow, item: ComputationProblem, builder: ProblemBuilder, v: int) -> int:
    """Bytes of buffers that a call reads and that need not be alive at the peak inside."""
    total = 0
    for j, b in enumerate(item.problem.buffers):
        if v in b.consumers and not _held_throughout(dataflow, item, builder.owned(item.computation.id)[j], v):
            total += b.size
    return total


def _held_throughout(dataflow: Dataflow, item: ComputationProblem, buffer: Buffer, v: int) -> bool:
    """Whether some value of the buffer is alive at every step of the loop that node ``v`` runs."""
    by_id = item.computation.by_id
    loop = next((by_id[i] for i in item.clusters[v] if by_id[i].opcode == "while"), None)
    if loop is None:
        return False
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
