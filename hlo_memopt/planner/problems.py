"""From a module's buffers to one scheduling problem a computation.

A buffer belongs to the innermost computation that sees all of its values; computations that are called add their
own peak at the call site. Instructions that only pass values on (get-tuple-element, bitcast) travel with the one
that makes the value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hlo_memopt.hlo.graph import Computation, Instruction
from hlo_memopt.liveness.dataflow import Buffer as HloBuffer
from hlo_memopt.liveness.dataflow import Dataflow, Value
from hlo_memopt.liveness.ranges import Schedule, flattened_callees, readers
from hlo_memopt.liveness.sharing import can_share
from hlo_memopt.schedule.problem import Buffer, Problem

# Instructions whose order among each other other parties can see: it never changes.
ORDERED = frozenset({
    "all-gather", "all-gather-done", "all-gather-start", "all-reduce", "all-reduce-done", "all-reduce-start",
    "all-to-all", "async-done", "async-start", "async-update", "collective-broadcast", "collective-permute",
    "collective-permute-done", "collective-permute-start", "collective-reduce", "copy-done", "copy-start", "infeed",
    "outfeed", "ragged-all-to-all", "recv", "recv-done", "reduce-scatter", "rng", "rng-get-and-update-state", "send",
    "send-done",
})  # fmt: skip
_CALLS = frozenset({"call", "conditional", "custom-call", "fusion", "while"})
_PASSES_ON = frozenset({"get-tuple-element", "bitcast"})


@dataclass(frozen=True)
class ComputationProblem:
    """``problem`` orders clusters of instructions; node v is ``clusters[v]`` (instruction ids in order)."""

    computation: Computation
    clusters: list[list[int]]
    problem: Problem

    def expand(self, order: list[int]) -> list[int]:
        """A schedule (instruction ids) from an order of nodes."""
        return [i for v in order for i in self.clusters[v]]


def has_fixed_order(instruction: Instruction, known: dict[int, bool]) -> bool:
    """Whether the instruction keeps its place among the others of its kind (collectives, side effects).

    So does one that calls a computation in which such an instruction runs. ``known``: answers by computation id.
    """
    if instruction.opcode in ORDERED or instruction.is_host_transfer or instruction.has_side_effect:
        return True
    if instruction.opcode not in _CALLS:
        return False
    for computation_id in instruction.called:
        if computation_id not in known:
            known[computation_id] = False  # no computation calls itself
            callee = instruction.computation.module.computations[computation_id]
            known[computation_id] = any(has_fixed_order(i, known) for i in callee.instructions)
        if known[computation_id]:
            return True
    return False


class ProblemBuilder:
    """Scheduling problems of one module under one given schedule; ``counted`` says which buffers are temp.

    In the heap a buffer of several values (of a branch, of a loop) takes over nobody's bytes, and nobody its. In the
    allocation of a result or an argument it may: ``any_takeover`` puts that among the reuses, for a floor.
    """

    def __init__(
        self,
        dataflow: Dataflow,
        schedule: Schedule,
        counted: Callable[[HloBuffer], bool],
        any_takeover: bool = False,
    ) -> None:
        self.dataflow = dataflow
        self._any_takeover = any_takeover
        self.schedule = schedule
        self._effects: dict[int, bool] = dataflow.cache.setdefault("effects", {})
        self._path: dict[int, list[int]] = {dataflow.module.entry.id: [dataflow.module.entry.id]}
        for c in dataflow.visited[1:]:
            self._path[c] = [*self._path[dataflow.call_site[c].computation.id], c]
        self._owned: dict[int, list[HloBuffer]] = {c: [] for c in dataflow.visited}
        self._shared: dict[int, list[HloBuffer]] = {c: [] for c in dataflow.visited}
        for buffer in dataflow.buffers:
            homes = {w.computation.id for v in buffer.values for w, _ in v.positions}
            if counted(buffer) and buffer.bytes:
                self._owned[self._common(homes)].append(buffer)
            if len(buffer.values) > 1:
                for c in {x for h in homes for x in self._path[h]}:
                    self._shared[c].append(buffer)

    def _common(self, homes: set[int]) -> int:
        paths = [self._path[h] for h in homes]
        shared = paths[0]
        for path in paths[1:]:
            n = 0
            while n < min(len(shared), len(path)) and shared[n] == path[n]:
                n += 1
            shared = shared[:n]
        return shared[-1]

    def computations(self) -> list[int]:
        """Scheduled computations that hold buffers of their own, callees before callers."""
        return [c for c in reversed(self.dataflow.visited) if c in self.schedule]

    def owned(self, computation_id: int) -> list[HloBuffer]:
        """The buffers of a computation's problem, in its order."""
        return self._owned[computation_id]

    def build(self, computation_id: int, peaks: dict[int, int]) -> ComputationProblem:
        """The problem of one computation; ``peaks``: bytes that each callee needs at its peak."""
        computation = self.dataflow.module.computations[computation_id]
        given = self.schedule[computation_id]
        clusters, node_of = self._clusters(computation, given)
        n = len(clusters)
        preds: list[set[int]] = [set() for _ in range(n)]
        by_id = computation.by_id
        transient = [0] * n
        chain = -1
        for instruction_id in given:
            instruction = by_id[instruction_id]
            v = node_of[instruction_id]
            for before in (*instruction.operands, *instruction.control_predecessors):
                preds[v].add(node_of[before])
            callees = flattened_callees(instruction)
            if callees:
                transient[v] = max(transient[v], *(peaks.get(c, 0) for c in callees))
            if has_fixed_order(instruction, self._effects):
                if chain >= 0:
                    preds[v].add(chain)
                chain = v
        self._order_writers(computation_id, node_of, preds)
        for v in range(n):
            preds[v].discard(v)
        buffers, index_of = self._buffers(computation_id, node_of, n)
        reuse = self._reuse(computation, given, node_of, index_of)
        reuse = [(v, b, c) for v, b, c in reuse if buffers[c].producer == v and b != c]
        names = tuple(by_id[c[0]].name for c in clusters)
        problem = Problem(
            n, tuple(tuple(sorted(p)) for p in preds), tuple(buffers), tuple(transient), tuple(reuse), names
        )
        return ComputationProblem(computation, clusters, problem)

    def _clusters(self, computation: Computation, given: list[int]) -> tuple[list[list[int]], dict[int, int]]:
        clusters: list[list[int]] = []
        node_of: dict[int, int] = {}
        for instruction_id in given:
            instruction = computation.by_id[instruction_id]
            if (
                instruction.opcode in _PASSES_ON
                and not instruction.control_predecessors
                and not instruction.is_root
            ):
                v = node_of[instruction.operands[0]]
                clusters[v].append(instruction_id)
            else:
                v = len(clusters)
                clusters.append([instruction_id])
            node_of[instruction_id] = v
        return clusters, node_of

    def node(self, computation_id: int, instruction: Instruction, node_of: dict[int, int]) -> int | None:
        """The node of ``computation_id`` in which ``instruction`` runs (its call site, if it is nested)."""
        while instruction.computation.id != computation_id:
            site = self.dataflow.call_site.get(instruction.computation.id)
            if site is None:
                return None
            instruction = site
        return node_of[instruction.id]

    def _order_writers(self, computation_id: int, node_of: dict[int, int], preds: list[set[int]]) -> None:
        """Values of one buffer: whoever touches the old value stays before the writer of the next, as given."""
        for buffer in self._shared[computation_id]:
            writers: set[int] = set()
            touching: set[int] = set()
            for value in buffer.values:
                w = self.node(computation_id, value.instruction, node_of)
                if w is not None:
                    writers.add(w)
                touching.update(self.touching(computation_id, value, node_of))
            touching |= writers
            last_writer = -1
            since: list[int] = []
            for v in sorted(touching):  # node numbers follow the given order
                if last_writer >= 0:
                    preds[v].add(last_writer)
                if v in writers:
                    preds[v].update(since)
                    last_writer, since = v, []
                else:
                    since.append(v)

    def touching(self, computation_id: int, value: Value, node_of: dict[int, int]) -> set[int]:
        """Nodes at which a value is seen or used."""
        nodes: set[int] = set()
        for where, index in value.positions:
            v = self.node(computation_id, where, node_of)
            if v is not None:
                nodes.add(v)
            for user in readers(self.dataflow, where, index):
                u = self.node(computation_id, user, node_of)
                if u is not None:
                    nodes.add(u)
        return nodes

    def _buffers(
        self, computation_id: int, node_of: dict[int, int], n: int
    ) -> tuple[list[Buffer], dict[int, int]]:
        buffers: list[Buffer] = []
        index_of: dict[int, int] = {}
        for owned in self._owned[computation_id]:
            defined: list[int] = []
            nodes: set[int] = set()
            live_out = False
            for value in owned.values:
                w = self.node(computation_id, value.instruction, node_of)
                assert w is not None
                defined.append(w)
                nodes |= self.touching(computation_id, value, node_of)
                live_out |= any(p.is_root and p.computation.id == computation_id for p, _ in value.positions)
            producer = min(defined)
            nodes.update(defined)
            nodes.discard(producer)
            if len(owned.values) == 1 or self._any_takeover:
                index_of.update((value.id, len(buffers)) for value in owned.values)
            buffers.append(Buffer(owned.bytes, producer, tuple(sorted(nodes)), live_out))
        return buffers, index_of

    def _reuse(
        self, computation: Computation, given: list[int], node_of: dict[int, int], index_of: dict[int, int]
    ) -> list[tuple[int, int, int]]:
        """(node, operand buffer, output buffer) wherever XLA may let the output take over the operand's bytes."""
        trees = self.dataflow.trees
        out: list[tuple[int, int, int]] = []
        for instruction_id in given:
            user = computation.by_id[instruction_id]
            if user.opcode == "copy" or user.opcode in _PASSES_ON:
                continue
            for value in trees[instruction_id].values():
                if value.instruction is not user or value.id not in index_of:
                    continue
                for operand in dict.fromkeys(user.operands):
                    seen = trees[operand].get(())
                    if seen is None or seen.id not in index_of or seen.bytes != value.bytes:
                        continue
                    source, index = seen.instruction, seen.index
                    if self._any_takeover:  # wherever it is seen
                        source, index = computation.by_id[operand], ()
                    if (
                        source.computation is computation
                        and source.id in user.operands
                        and can_share(source, index, user, value.index)
                    ):
                        out.append((node_of[instruction_id], index_of[seen.id], index_of[value.id]))
        return out
