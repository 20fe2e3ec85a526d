"""The integer programs: least-peak order (`solve_order`), and order with buffer offsets (`solve_joint`).

After Steiner, Elhoushi, Kahn, Hegarty, "MODeL: Memory Optimizations for Deep Learning" (ICML 2023; earlier "OLLA",
arXiv 2210.12924), solved by CBC or HiGHS through python-mip. The whole formulation is in this file; sizes are bytes
outside and "units" (bytes // unit) inside. One node runs a step, steps s = 0 .. n-1. Of a buffer e, pr(e) is the node
that makes it (all its outputs are created together, so C is indexed by node: C[e,s] = C[pr(e),s]) and fo(e) are its
readers.

Variables
    X[v,s]  binary      v has run by the end of step s
    C[v,s]  0 or 1      v runs at s, its outputs are created:  C[v,s] = X[v,s] - X[v,s-1]  (written out, no column)
    P[e,s]  in [0,1]    e is preserved: in memory at s, created before s
    R[k,s]  in [0,1]    reuse k = (v, b, c) is taken at s: c, created by v, takes the bytes of b, whose last reader is v
    M                   the peak in units
    A[e]                offset of e                                                              (joint program only)
    a[i,j], b[i,j]      buffer i lies below / above buffer j                                     (joint program only)

The paper's rows on lifetimes are, for all e, s,
    C[e,s] + P[e,s] <= 1,   P[e,s] <= P[e,s-1] + C[e,s-1],   sum_s C[e,s] = 1,   C[g,s] <= P[e,s] for g in fo(e).
In integers they say that P[e,s] = 1 from the step after creation to the last reader. The rows below say so with X,
which gives sparse rows, a stronger linear relaxation, and branching on "before or after s" instead of "at s":
    P[e,s] >= X[pr(e),s-1] - X[g,s-1]   for g in fo(e)             ("made before s, and g has not run before s")

Reductions, as in the paper: a node runs neither before all its ancestors nor after all its descendants, so that X
and P are constants outside [asap(v), alap(v)) (spans); buffers that can never be, or always are, in memory together
need no pair variables, or have a[i,j] + b[i,j] fixed (precedence); `early_updates` adds edges that run weight updates
early.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hlo_memopt.schedule.exact import ancestor_masks, reuse_pairs, static_bound
from hlo_memopt.schedule.ilp_support import (  # fmt: skip
    Solver,
    bytes_bound,
    early_updates,
    greedy_is_best,
    never_meet,
    solver_named,
    stack_blocks,
    unit_of,
)
from hlo_memopt.schedule.problem import Problem, is_topological, peak

__all__ = ["IlpResult", "early_updates", "solve_joint", "solve_order"]


@dataclass(frozen=True)
class IlpResult:
    """What a solve found, in bytes.

    Attributes:
      order: best order known (the incumbent where none was found below its peak); None if none is known.
      peak: exact peak of ``order`` (`problem.peak`; the arena size for the joint program); -1 without an order.
      bound: no order (no order and offsets) has a smaller peak.
      proven: ``peak`` is the least, or, without an order, nothing is below ``upper_bound``.
      nodes: branch-and-bound nodes searched (-1: not known).
      offsets: offset of each buffer (joint program).
      transient_offsets: offset of each node's transient bytes, as one block (joint program).
    """

    order: tuple[int, ...] | None
    peak: int
    bound: int
    proven: bool
    nodes: int = 0
    offsets: tuple[int, ...] | None = None
    transient_offsets: tuple[int, ...] | None = None


class _Program:
    """Variables and rows that both programs have."""

    def __init__(self, problem: Problem, unit: int, solver: Solver, max_seconds: float | None, max_nodes: int) -> None:
        import mip  # takes a second: only when a program is built

        self.problem, self.unit, self.solver, self.mip = problem, unit, solver, mip
        self.limits = {"max_nodes": max_nodes} | ({} if max_seconds is None else {"max_seconds": max_seconds})
        m = self.m = mip.Model(sense=mip.MINIMIZE, solver_name=solver.name)
        m.verbose, m.threads, m.seed, m.max_mip_gap = 0, 1, 1, 0.0
        m.cuts = 0  # CBC solves these faster without, and its odd-wheel cuts can crash (seen with cbcbox 2.935)
        m.lp_method = mip.LP_Method[solver.lp_method]
        n = problem.n
        self.anc = anc = ancestor_masks(n, problem.preds)
        self.desc = [sum(1 << w for w in range(n) if anc[w] >> v & 1) for v in range(n)]
        # Spans: asap(v) = number of ancestors, alap(v) = n - 1 - number of descendants.
        self.asap = [anc[v].bit_count() for v in range(n)]
        self.alap = [n - 1 - self.desc[v].bit_count() for v in range(n)]
        self.X = [[self._x(v, s) for s in range(n)] for v in range(n)]
        m.objective = self.M = m.add_var(name="M", var_type=mip.INTEGER)  # objective:  min M
        self._order_rows()
        # readers that can be the last one: no other reader is their descendant
        self.last = [
            [g for g in sorted(readers) if not any(self.desc[g] >> h & 1 for h in readers)]
            for readers in (set() if b.live_out else set(b.consumers) for b in problem.buffers)
        ]
        self.P = [self._preserved(e) for e in range(len(problem.buffers))]

    def _x(self, v: int, s: int) -> Any:
        """X[v,s]: 0 before v's span, 1 from its last step on, a binary variable between."""
        if s < self.asap[v]:
            return 0
        return 1 if s >= self.alap[v] else self.m.add_var(name=f"X_{v}_{s}", var_type=self.mip.BINARY)

    def x(self, v: int, s: int) -> Any:
        return self.X[v][s] if s >= 0 else 0

    def c(self, v: int, s: int) -> Any:
        """C[v,s] = X[v,s] - X[v,s-1]."""
        return self.x(v, s) - self.x(v, s - 1)

    def total(self, terms: Iterable[tuple[int, Any]]) -> Any:
        """sum of k * term, as one expression; a term is a number, a variable or an expression."""
        out = self.mip.LinExpr()
        for k, term in terms:
            out.add_term(term, k)
        return out

    def plus(self, p: Any, q: Any) -> Any:
        """p + q, an int if both are. (Never x + x in python-mip: for a variable x that comes out as x.)"""
        return p + q if isinstance(p, int) and isinstance(q, int) else self.total([(1, p), (1, q)])

    def add(self, row: Any) -> None:
        """Adds a row; one without variables has come out as a Python bool, and must hold."""
        if isinstance(row, bool):
            assert row
        else:
            self.m += row

    def _order_rows(self) -> None:
        n, m = self.problem.n, self.m
        # One node a step:  sum_v C[v,s] = 1  for all s,  that is  sum_v X[v,s] = s + 1
        for s in range(n - 1):
            m += self.total((1, self.X[v][s]) for v in range(n)) == s + 1
        # A node runs once and stays run:  C[v,s] >= 0
        for v in range(n):
            for s in range(self.asap[v] + 1, self.alap[v]):
                m += self.X[v][s - 1] <= self.X[v][s]
        # Operands first:  C[v,s] <= X[u,s-1]  for u in pred(v); cumulated, X[v,s] <= X[u,s-1].
        # Only for predecessors u that are not ancestors of another one (the rest follow).
        for v in range(n):
            direct = set(self.problem.preds[v])
            for u in sorted(u for u in direct if not any(self.anc[w] >> u & 1 for w in direct)):
                for s in range(self.asap[v], min(self.alap[u], self.alap[v]) + 1):
                    self.add(self.x(v, s) <= self.x(u, s - 1))

    def _preserved(self, e: int) -> list[Any]:
        """P[e,s] for all s, with its rows; a column only where two or more readers may be the last one."""
        b = self.problem.buffers[e]
        if b.producer < 0 and not b.consumers and not b.live_out:
            return [1] + [0] * (self.problem.n - 1)  # live in and never read: problem.py has it at the first step
        row: list[Any] = []
        for s in range(self.problem.n):
            made = 1 if b.producer < 0 else self.x(b.producer, s - 1)
            if b.live_out:
                row.append(made)  # never freed:  P[e,s] = X[pr(e),s-1]
                continue
            read = [self.x(g, s - 1) for g in self.last[e] if g != b.producer]
            open_ = [x for x in read if not (isinstance(x, int) and x == 1)]
            if not open_ or (isinstance(made, int) and made == 0):
                row.append(0)  # surely read before, or surely not made yet
            elif any(isinstance(x, int) for x in open_):
                row.append(made)  # surely read at s or later
            elif len(open_) == 1:
                row.append(made - open_[0])
            else:
                # P[e,s] >= X[pr(e),s-1] - X[g,s-1]  for g in fo(e)
                p = self.m.add_var(name=f"P_{e}_{s}", ub=1.0)
                for x in open_:
                    self.m += p >= made - x
                row.append(p)
        return row

    def reuse_rows(self, v: int, pairs: list[tuple[int, int]], *, binary: bool) -> list[dict[int, Any]]:
        """R[k,s] for the pairs k = (b, c) of node v: one dict (step -> variable) a pair."""
        kind = self.mip.BINARY if binary else self.mip.CONTINUOUS
        R: list[dict[int, Any]] = [{} for _ in pairs]
        for s in range(self.asap[v], self.alap[v] + 1):
            runs = self.c(v, s)
            for k, (b, c) in enumerate(pairs):
                R[k][s] = r = self.m.add_var(name=f"R_{v}_{b}_{c}_{s}", ub=1.0, var_type=kind)
                # R[k,s] <= C[v,s]                            c takes b's bytes while v runs,
                self.m += r <= runs
                # R[k,s] <= X[g,s-1]  for g in fo(b) - {v}    every other reader of b has run before
                for g in self.last[b]:
                    if g != v:
                        self.add(r <= self.x(g, s - 1))
            # Each buffer at most once:  sum_c R[(v,b,c),s] <= C[v,s],  sum_b R[(v,b,c),s] <= C[v,s]
            for side in (0, 1):
                for e in {pair[side] for pair in pairs}:
                    ks = [k for k, pair in enumerate(pairs) if pair[side] == e]
                    if len(ks) > 1:
                        self.m += self.total((1, R[k][s]) for k in ks) <= runs
        return R

    def usage(self, s: int, R: Iterable[tuple[int, dict[int, Any]]], sizes: Sequence[int]) -> Any:
        """sum_e S[e] (C[e,s] + P[e,s]) + sum_v T[v] C[v,s] - sum_k S[c] R[k,s] in units.

        ``sizes``: bytes S of the buffers, then T of the nodes. ``R``: (output c, R[k,.]) for each reuse k.
        """
        made = [t // self.unit for t in sizes[len(self.problem.buffers) :]]
        units = [size // self.unit for size in sizes[: len(self.problem.buffers)]]
        for size, b in zip(units, self.problem.buffers, strict=True):
            if b.producer >= 0:
                made[b.producer] += size
        return self.total(
            [(made[v], self.x(v, s)) for v in range(self.problem.n) if self.asap[v] <= s <= self.alap[v]]
            + [(-made[v], self.x(v, s - 1)) for v in range(self.problem.n) if self.asap[v] < s <= self.alap[v]]
            + [(size, P[s]) for size, P in zip(units, self.P, strict=True) if size]
            + [(-units[c], r[s]) for c, r in R if s in r]
        )

    def solve(self, lower: int, limit: int, step: int) -> tuple[bool, int, int]:
        """Minimises M within [lower, limit) bytes: (has an order, bytes below which no peak lies, nodes)."""
        low, most = -(-lower // step) * step // self.unit, (limit - 1) // step * step // self.unit
        if low > most:
            return False, limit, 0
        self.M.lb, self.M.ub = low, most
        status, nodes = self.solver.optimize(self.m, self.limits)
        if status in self.solver.infeasible:
            return False, limit, nodes
        bound = self.m.objective_bound
        bound = low if bound is None or not low <= bound <= most else bound
        return self.m.num_solutions > 0, max(lower, min(limit, bytes_bound(bound, self.unit, step))), nodes

    def order(self) -> tuple[int, ...]:
        """The order of the solution: v runs at step sum_s (1 - X[v,s])."""
        value = [sum(x if isinstance(x, int) else x.x for x in self.X[v]) for v in range(self.problem.n)]
        return tuple(sorted(range(self.problem.n), key=lambda v: (-value[v], v)))


def solve_order(
    problem: Problem,
    *,
    incumbent: Sequence[int] | None = None,
    upper_bound: int | None = None,
    lower_bound: int = 0,
    max_nodes: int = 10_000,
    max_seconds: float | None = None,
    fixed: int = 0,
    solver: str = "cbc",
) -> IlpResult:
    """The order of least `peak`, by integer programming; deterministic unless ``max_seconds`` cuts it short.

    Args:
      incumbent: a known order; only a smaller peak is searched for, and it is returned if there is none.
      upper_bound: only peaks below this many bytes are searched for.
      lower_bound: bytes below which no peak lies.
      max_nodes: branch-and-bound nodes.
      max_seconds: a safety net; a result may then depend on the machine's speed.
      fixed: bytes in use at every step besides.
      solver: ``"cbc"``, or ``"highs"`` (the extra of that name); ValueError if it is not installed.
    """
    n, library = problem.n, solver_named(solver)
    known = None if incumbent is None else tuple(int(v) for v in incumbent)
    if n <= 1 and known is None:
        known = tuple(range(n))
    known_peak = -1 if known is None else peak(problem, list(known)) + (fixed if n else 0)
    if n <= 1:
        return IlpResult(known, known_peak, known_peak, True)
    lower = max(lower_bound, static_bound(problem) + fixed)
    limits = [x for x in (upper_bound, None if known is None else known_peak) if x is not None]
    sizes = [b.size for b in problem.buffers] + list(problem.transient)
    limit = min([*limits, sum(sizes) + fixed + 1])

    def result(order: tuple[int, ...] | None, value: int, bound: int, nodes: int) -> IlpResult:
        if order is None:
            return IlpResult(None, -1, bound, bound >= limit, nodes)
        return IlpResult(order, value, min(bound, value), bound >= value, nodes)

    if lower >= limit:
        return result(known, known_peak, lower, 0)
    step, unit = unit_of(sizes)
    program = _Program(problem, unit, library, max_seconds, max_nodes)
    R = []
    for v, pairs in enumerate(reuse_pairs(problem)):
        pairs = [(b, c) for b, c in pairs if v in program.last[b] or v == problem.buffers[b].producer]
        if not pairs:
            continue
        rows = program.reuse_rows(v, pairs, binary=False)
        R += [(c, r) for (_, c), r in zip(pairs, rows, strict=True)]
        if not greedy_is_best(pairs):
            # XLA takes the first pair of the list that fits, not the best set: for k = (v, b, c),
            # R[k,s] + sum of R[j,s] over pairs j before k with the same b or c  >=  C[v,s] - P[b,s+1]
            for k, (b, c) in enumerate(pairs):
                first = [j for j in range(k) if pairs[j][0] == b or pairs[j][1] == c]
                for s, r in rows[k].items():
                    kept = program.P[b][s + 1] if s + 1 < n else 0
                    row = program.total([(1, r), (-1, program.c(v, s)), (1, kept)] + [(1, rows[j][s]) for j in first])
                    program.m += row >= 0
    # Peak:  sum_e S[e] (C[e,s] + P[e,s]) + sum_v T[v] C[v,s] - sum_k S[k] R[k,s] <= M  for all s
    for s in range(n):
        program.add(program.usage(s, R, sizes) <= program.M)
    solved, bound, nodes = program.solve(lower - fixed, limit - fixed, step)
    if solved and is_topological(problem, order := list(program.order())):
        value = peak(problem, order) + fixed
        if value < limit:
            return result(tuple(order), value, bound + fixed, nodes)
    return result(known, known_peak, bound + fixed, nodes)


def solve_joint(
    problem: Problem,
    *,
    alignment: int = 1,
    upper_bound: int | None = None,
    lower_bound: int = 0,
    max_nodes: int = 10_000,
    max_seconds: float | None = None,
    fixed: int = 0,
    solver: str = "cbc",
) -> IlpResult:
    """Order and buffer offsets of least arena size ``fixed + max(offset + size)``, in one program.

    Buffers in memory at the same step do not overlap, except that an output may lie exactly on the operand that it
    reuses (any of ``problem.reuse``, by choice). A node's transient bytes are one more block, in memory at the node's
    step. Offsets are multiples of ``alignment`` and count from the end of the ``fixed`` bytes. Other arguments as in
    `solve_order`; without an order nothing below ``upper_bound`` was found.
    """
    n, count, library = problem.n, len(problem.buffers), solver_named(solver)
    if n == 0:
        return IlpResult((), 0, 0, True, 0, (0,) * count, ())
    sizes = [b.size for b in problem.buffers] + list(problem.transient)
    room = [-(-size // alignment) * alignment for size in sizes]
    limit = sum(room) + fixed + 1 if upper_bound is None else min(upper_bound, sum(room) + fixed + 1)
    lower = max(lower_bound, static_bound(problem) + fixed)
    if lower >= limit:
        return IlpResult(None, -1, lower, True)
    step, unit = unit_of(sizes + room)
    program = _Program(problem, unit, library, max_seconds, max_nodes)
    m, const = program.m, lambda term: term if isinstance(term, int) else None
    most = (limit - fixed - 1) // step * step // unit
    # L[e,s] = C[e,s] + P[e,s]: e is in memory at s; for a node's transient block, C[v,s]
    L = [[program.c(b.producer, s) if b.producer >= 0 else 0 for s in range(n)] for b in problem.buffers]
    L = [[program.plus(c, p) for c, p in zip(made, kept, strict=True)] for made, kept in zip(L, program.P, strict=True)]
    L += [[program.c(v, s) for s in range(n)] for v in range(n)]
    # R[k] = sum_s R[k,s]
    taken: list[tuple[int, int, Any]] = []
    R = []
    for v, pairs in enumerate(reuse_pairs(problem)):
        pairs = [(b, c) for b, c in pairs if v in program.last[b] and problem.buffers[b].producer != v]
        pairs = [(b, c) for b, c in pairs if sizes[c] and problem.buffers[c].producer == v]
        if pairs:
            rows = program.reuse_rows(v, pairs, binary=True)
            R += [(c, r) for (_, c), r in zip(pairs, rows, strict=True)]
            taken += [(b, c, program.total((1, t) for t in r.values())) for (b, c), r in zip(pairs, rows, strict=True)]
    shared = {(min(b, c), max(b, c)): r for b, c, r in taken}
    blocks = [i for i, size in enumerate(sizes) if size]
    tall = {i: room[i] // unit for i in blocks}
    top = {i: most - sizes[i] // unit for i in blocks}
    A = {i: m.add_var(name=f"A_{i}", ub=float(top[i])) for i in blocks}
    # Arena:  A[e] + S[e] <= M
    for i in blocks:
        m += A[i] + sizes[i] // unit <= program.M
    mirrored = alignment > 1
    for at, i in enumerate(blocks):
        for j in blocks[at + 1 :]:
            both = [program.plus(p, q) for p, q in zip(L[i], L[j], strict=True) if 0 not in (const(p), const(q))]
            if not both or never_meet(problem, program.anc, i, j):
                continue  # precedence: never in memory together, no pair
            r = shared.get((i, j))
            below, above = (m.add_var(name=f"{k}_{i}_{j}", var_type=program.mip.BINARY) for k in "ab")
            if r is None and 2 in map(const, both):
                # always together:  a[i,j] + b[i,j] = 1
                m += below + above == 1
                if not mirrored:
                    below.lb, mirrored = 1.0, True  # an arena turned upside down is as good
            else:
                # a[i,j] + b[i,j] <= 1,   a[i,j] + b[i,j] >= L[i,s] + L[j,s] - 1 (- R[k] if k = (v, i, j))  for all s
                m += below + above <= 1
                for t in both:
                    m += below + above >= t - 1 - (0 if r is None else r)
            # A[i] + S[i] <= A[j] + (1 - a[i,j]) big,   A[j] + S[j] <= A[i] + (1 - b[i,j]) big
            m += A[i] + tall[i] <= A[j] + (top[i] + tall[i]) * (1 - below)
            m += A[j] + tall[j] <= A[i] + (top[j] + tall[j]) * (1 - above)
    # Reuse:  A[b] = A[c] if R[k] = 1, k = (v, b, c):  |A[b] - A[c]| <= (1 - R[k]) big
    for b, c, r in taken:
        m += A[b] - A[c] <= top[b] * (1 - r)
        m += A[c] - A[b] <= top[c] * (1 - r)
    # No packing is smaller than the bytes in use (the order program's peak rows), sizes padded to the alignment but
    # for the block on top
    pad = max((tall[i] - sizes[i] // unit for i in blocks), default=0)
    for s in range(n):
        program.add(program.usage(s, R, sizes) <= program.M)
        if pad:
            program.add(program.usage(s, R, room) <= program.M + pad)
    solved, bound, nodes = program.solve(lower - fixed, limit - fixed, step)
    bound += fixed
    if solved and is_topological(problem, list(order := program.order())):
        place = {i: (round(A[i].x), tall[i], i) for i in blocks}
        offsets = stack_blocks(problem, order, room, place, [(b, c) for b, c, r in taken if r.x > 0.5])
        value = max((offsets[i] + sizes[i] for i in blocks), default=0) + fixed
        if value < limit:
            split = tuple(offsets[:count]), tuple(offsets[count:])
            return IlpResult(order, value, min(bound, value), bound >= value, nodes, *split)
    return IlpResult(None, -1, bound, bound >= limit, nodes)
