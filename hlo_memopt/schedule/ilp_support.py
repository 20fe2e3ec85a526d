"""What the integer programs of `model_ilp` need besides their equations: solvers, units, offsets, early updates."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hlo_memopt.schedule.exact import ancestor_masks, reuse_pairs
from hlo_memopt.schedule.problem import Problem, live_intervals

MAX_UNITS = 1 << 20  # the sum of all sizes in units; far above it the solvers' tolerances (1e-6) could hide a unit


@dataclass(frozen=True)
class Solver:
    """What differs between the solvers that python-mip calls.

    Attributes:
      name: python-mip's name for it.
      install: the command that installs it.
      loads: whether its library is there.
      infeasible: names of the statuses that mean "no solution" for a program whose objective is bounded.
      lp_method: name in `mip.LP_Method` of how it solves linear programs.
      reset: called with the model before and after a search.
      count: branch-and-bound nodes of the model's last search.
    """

    name: str
    install: str
    loads: Callable[[], bool]
    infeasible: tuple[str, ...]
    lp_method: str
    reset: Callable[[Any], object]
    count: Callable[[Any], int]

    def optimize(self, model: Any, limits: dict[str, Any]) -> tuple[str, int]:
        """Runs the search: (name of its status, nodes, -1 if the library does not say)."""
        self.reset(model)
        try:
            status = model.optimize(**limits).name
            return status, self.count(model)
        finally:
            self.reset(model)


def solver_named(name: str) -> Solver:
    """The solver; ValueError if there is none of that name, or if it is not installed."""
    if name not in SOLVERS:
        raise ValueError(f"solver must be {' or '.join(map(repr, SOLVERS))}, not {name!r}")
    solver = SOLVERS[name]
    if not solver.loads():
        raise ValueError(f"solver {name!r} is not installed: {solver.install}")
    return solver


def _cbc_nodes(model: Any) -> int:
    """python-mip has no call for it; the C library may have."""
    try:
        import cffi
        from mip import cbc

        ffi = cffi.FFI()
        ffi.cdef("int Cbc_getNodeCount(void *model);")
        handle = ffi.cast("void *", int(cbc.ffi.cast("uintptr_t", model.solver._model)))
        return int(ffi.dlopen(cbc.libfile).Cbc_getNodeCount(handle))
    except Exception:
        return -1


def _has_highs() -> bool:
    """Loads python-mip's part for HiGHS without what it logs, on stderr by default, about where it finds the library:
    first in highspy, whose newer wheels hide the C functions, then in highsbox."""

    def quiet(_: logging.LogRecord) -> bool:
        return False

    logger = logging.getLogger("mip.highs")
    logger.addFilter(quiet)
    try:
        from mip import highs
    except ImportError:
        return False
    finally:
        logger.removeFilter(quiet)
    return bool(highs.has_highs)


def _highs_reset(model: Any) -> None:
    """Ends the threads that HiGHS keeps from one search to the next: with them it refuses another number of threads,
    here the caller's before us, and ours after us."""
    model.solver._lib.Highs_resetGlobalScheduler(1)


def _highs_nodes(model: Any) -> int:
    try:
        from mip import highs

        count = highs.ffi.new("int64_t *")
        known = model.solver._lib.Highs_getInt64InfoValue(model.solver._model, b"mip_node_count", count) == 0
        return max(-1, int(count[0])) if known else -1
    except Exception:
        return -1


SOLVERS = {
    "cbc": Solver(
        name="CBC",
        install="pip install --force-reinstall mip",
        loads=lambda: True,  # comes with python-mip
        infeasible=("INFEASIBLE", "INT_INFEASIBLE"),
        lp_method="DUAL",
        reset=lambda model: None,
        count=_cbc_nodes,
    ),
    "highs": Solver(
        name="HiGHS",
        install="pip install 'hlo_memopt[highs]'",
        loads=_has_highs,
        infeasible=("INFEASIBLE", "UNBOUNDED"),  # python-mip's name for "unbounded or infeasible" too
        lp_method="AUTO",  # any other makes HiGHS 1.9 (not 1.15) forget that variables are integer
        reset=_highs_reset,
        count=_highs_nodes,
    ),
}


def unit_of(sizes: Iterable[int]) -> tuple[int, int]:
    """(gcd of the sizes, bytes a unit): the gcd, or a multiple that keeps the sum of the sizes at `MAX_UNITS`."""
    sizes = list(sizes)
    step = math.gcd(*sizes) or 1
    return step, step * max(1, -(-sum(sizes) // (step * MAX_UNITS)))


def bytes_bound(units: float, unit: int, step: int) -> int:
    """Bytes that a solver's bound in units proves: less its tolerance, then up to a whole unit, then a whole step."""
    whole = math.ceil(units - max(1e-4, 1e-6 * abs(units)))
    return -(-whole * unit // step) * step


def greedy_is_best(pairs: list[tuple[int, int]]) -> bool:
    """Whether list-order matching takes as many of any subset of operands as possible: true if operands that share
    an output share all their outputs (equal sizes: any maximal matching is then a largest one)."""
    outs = {b: {c for d, c in pairs if d == b} for b, _ in pairs}
    return all(outs[b] == outs[d] or not outs[b] & outs[d] for b in outs for d in outs)


def never_meet(problem: Problem, anc: Sequence[int], i: int, j: int) -> bool:
    """Whether in every order block i is gone before j is made, or j before i (blocks: buffers, then transients)."""
    count = len(problem.buffers)

    def users(i: int) -> set[int]:
        return {problem.buffers[i].producer, *problem.buffers[i].consumers} - {-1} if i < count else {i - count}

    def gone_before(i: int, j: int) -> bool:
        made = problem.buffers[j].producer if j < count else j - count
        if made < 0 or not users(i) or (i < count and problem.buffers[i].live_out):
            return False
        return all(anc[made] >> u & 1 for u in users(i))

    return gone_before(i, j) or gone_before(j, i)


def stack_blocks(
    problem: Problem,
    order: Sequence[int],
    room: Sequence[int],
    place: dict[int, tuple[int, int, int]],
    shares: list[tuple[int, int]],
) -> list[int]:
    """Exact offsets from the solver's: in the order of ``place``, each block (with those that share its bytes) goes
    right above the blocks already set that are in memory with it. Offsets are sums of ``room``, hence aligned."""
    start, end = live_intervals(problem, np.asarray(order))
    pos = {v: s for s, v in enumerate(order)}
    span = [(int(s), int(e)) for s, e in zip(start, end, strict=True)] + [(pos[v], pos[v]) for v in range(problem.n)]
    group = {i: [i] for i in place}
    for b, c in shares:
        if group[b] is not group[c]:
            group[b] += group[c]
            for i in group[c]:
                group[i] = group[b]
    offset = [0] * len(room)
    done: list[int] = []
    for i in sorted(place, key=lambda i: place[i]):
        if i in done:
            continue
        meets = [j for j in done if any(span[j][0] <= span[g][1] and span[g][0] <= span[j][1] for g in group[i])]
        for g in group[i]:
            offset[g] = max((offset[j] + room[j] for j in meets), default=0)
        done += group[i]
    return offset


def early_updates(problem: Problem, *, safe: bool = True) -> tuple[tuple[int, int], ...]:
    """Edges (u, w), "u before w", that run weight updates and their like as soon as they can run.

    The paper forces updates early because a gradient is kept until its update has run. Here v counts as an update if
    it frees at least what it leaves, whatever ran before: bytes of its outputs <= bytes of operands that nobody else
    reads. Let p be the last predecessor of v (all others come before p); v then goes before every other successor of
    p. That shrinks the spans of the programs above.

    ``safe``: only nodes that need no bytes beyond their operands while they run (outputs and transient within what
    reuse surely saves); these edges keep a least-peak order possible: in any order that has the edges found so far, v
    may move to right after p, where usage(v) <= live bytes after p <= usage(p), and no step between sees more bytes.
    With ``safe=False``, as in the paper, a heuristic: v's own outputs may make the step after p the new peak.
    """
    n, buffers = problem.n, problem.buffers
    preds = [set(p) for p in problem.preds]
    pairs = reuse_pairs(problem)
    edges: list[tuple[int, int]] = []
    for v in range(n):
        own = {i for i, b in enumerate(buffers) if not b.live_out and b.producer != v and set(b.consumers) == {v}}
        made = [i for i, b in enumerate(buffers) if b.producer == v]
        kept = sum(buffers[i].size for i in made if buffers[i].live_out or set(buffers[i].consumers) - {v})
        if kept > sum(buffers[i].size for i in own):
            continue
        sure: dict[int, int] = {}  # output -> operand, in list order (more operands that die at v only save more)
        for b, c in pairs[v]:
            if b in own and b not in sure.values() and c not in sure and c in made:
                sure[c] = b
        extra = sum(buffers[i].size for i in made if i not in sure) + problem.transient[v]
        if safe and extra > 0:
            continue
        anc = ancestor_masks(n, tuple(tuple(p) for p in preds))
        last = [p for p in preds[v] if all(u == p or anc[p] >> u & 1 for u in preds[v])]
        if not last:
            continue
        for w in range(n):
            if w != v and last[0] in preds[w] and not anc[v] >> w & 1 and v not in preds[w]:
                preds[w].add(v)
                edges.append((v, w))
    return tuple(edges)
