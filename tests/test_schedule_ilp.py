"""model_ilp against brute force, with each solver: order program, joint program, and the edges of `early_updates`."""

from __future__ import annotations

import functools
import itertools
import math
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from schedule_cases import (
    alias_chain,
    branchy,
    brute_peak,
    competing_problem,
    count_orders,
    layered,
    orders,
    random_problem,
    rectangles,
    training_like,
)

from hlo_memopt.schedule import windows
from hlo_memopt.schedule.exact import solve_exact
from hlo_memopt.schedule.flat import Flat
from hlo_memopt.schedule.ilp_support import SOLVERS, bytes_bound, greedy_is_best, unit_of
from hlo_memopt.schedule.model_ilp import IlpResult, early_updates, solve_joint, solve_order
from hlo_memopt.schedule.problem import Buffer, Problem, is_topological, peak, usage_profile
from hlo_memopt.schedule.windows import WindowBudget, improve_windows

FAMILIES = [random_problem, competing_problem, alias_chain]
HIGHS = SOLVERS["highs"].loads()
needs_highs = pytest.mark.skipif(not HIGHS, reason="HiGHS is not installed: " + SOLVERS["highs"].install)
both_solvers = pytest.mark.parametrize("solver", ["cbc", pytest.param("highs", marks=needs_highs)])


def cbc_and_some_highs(names: str, cases: Sequence[tuple[Any, ...]]) -> pytest.MarkDecorator:
    """Every case with CBC, every third one with HiGHS too."""
    some = [pytest.param(*case, "highs", marks=needs_highs) for case in cases[::3]]
    return pytest.mark.parametrize(f"{names},solver", [(*case, "cbc") for case in cases] + some)


def case(seed: int, low: int, high: int) -> Problem:
    rng = random.Random(seed)
    return FAMILIES[seed % 3](rng, rng.randint(low, high))


# ---- order program ----


@both_solvers
@pytest.mark.parametrize("seed", range(150))
def test_order_equals_brute_force(seed: int, solver: str) -> None:
    problem = case(seed, 1, 7)
    least = brute_peak(problem)
    got = solve_order(problem, solver=solver)
    assert got.proven and got.peak == got.bound == least
    assert (
        got.order is not None and is_topological(problem, list(got.order)) and peak(problem, list(got.order)) == least
    )


@cbc_and_some_highs("seed", [(seed,) for seed in range(1000, 1030)])
def test_order_equals_exact_on_larger_problems(seed: int, solver: str) -> None:
    problem = case(seed, 8, 11)
    got = solve_order(problem, solver=solver)
    assert got.proven and got.peak == solve_exact(problem).peak


@both_solvers
def test_bounds_and_incumbents(solver: str) -> None:
    seen_better = 0
    for seed in range(40):
        problem = case(seed, 2, 7)
        least = brute_peak(problem)
        none = solve_order(problem, upper_bound=least, solver=solver)
        assert none.order is None and none.peak == -1 and none.proven and none.bound >= least
        some = solve_order(problem, upper_bound=least + 1, solver=solver)
        assert some.order is not None and some.peak == least and some.proven
        first = next(orders(problem))
        got = solve_order(problem, incumbent=first, fixed=1000, lower_bound=1000, solver=solver)
        assert got.proven and got.peak == least + 1000
        if peak(problem, first) == least:
            assert got.order == tuple(first)  # nothing is below the incumbent: it comes back
        else:
            seen_better += 1
        kept = solve_order(problem, incumbent=first, lower_bound=peak(problem, first), solver=solver)
        assert kept.order == tuple(first)
    assert seen_better > 5


@both_solvers
def test_a_short_search_claims_nothing_false(solver: str) -> None:
    unproven = 0
    for seed in range(10) if solver == "cbc" else (4,):  # HiGHS does much before the first node
        problem = branchy(random.Random(seed), 4, 3)
        least = solve_exact(problem).peak
        got = solve_order(problem, max_nodes=1, upper_bound=least + 3, solver=solver)
        assert got.bound <= least and got.nodes in (0, 1)
        assert got.order is None or got.peak >= least
        assert not got.proven or got.peak == least
        unproven += not got.proven
    assert unproven  # the budget did cut searches short


@both_solvers
@pytest.mark.parametrize("scale", [3, 2**20, 2**36 + 1])
def test_large_sizes_stay_exact(scale: int, solver: str) -> None:
    for seed in range(12):
        problem = random_problem(random.Random(seed), 6, scale=scale)
        got = solve_order(problem, solver=solver)
        assert got.proven and got.peak == got.bound == brute_peak(problem)


@both_solvers
def test_sizes_of_very_different_scale(solver: str) -> None:
    """gcd 1 and sizes of 2**40 bytes: units are rounded, so the bound may lie a little below, never above."""
    for seed in range(12):
        rng = random.Random(seed)
        problem = random_problem(rng, 6)
        buffers = tuple(replace(b, size=b.size * rng.choice([2**30, 2**40]) + b.size % 2) for b in problem.buffers)
        problem = replace(problem, buffers=buffers, reuse=())
        least = brute_peak(problem)
        got = solve_order(problem, solver=solver)
        assert got.order is not None and got.peak == peak(problem, list(got.order)) >= least
        assert got.bound <= least and got.bound >= least * (1 - 1e-4)
        assert got.peak <= least * (1 + 1e-4)
        assert not got.proven or got.peak == least


@both_solvers
def test_greedy_reuse_is_modelled_as_evaluated(solver: str) -> None:
    """XLA's list-order matching takes (0, 2) and then has no output for buffer 1; a best matching would take two."""
    buffers = (Buffer(4, 0, (2,)), Buffer(4, 1, (2,)), Buffer(4, 2, (), True), Buffer(4, 2, (), True))
    problem = Problem(3, ((), (), (0, 1)), buffers, (0, 0, 0), ((2, 0, 2), (2, 0, 3), (2, 1, 2)))
    assert not greedy_is_best([(0, 2), (0, 3), (1, 2)])
    assert max(usage_profile(problem, [0, 1, 2])) == 12
    assert solve_order(problem, solver=solver).peak == 12 == solve_exact(problem).peak
    better = replace(problem, reuse=((2, 0, 3), (2, 0, 2), (2, 1, 2)))
    assert solve_order(better, solver=solver).peak == 8 == solve_exact(better).peak


@both_solvers
def test_empty_and_single(solver: str) -> None:
    empty = Problem(0, (), (), ())
    assert solve_order(empty, solver=solver) == IlpResult((), 0, 0, True)
    assert solve_joint(empty, solver=solver).peak == 0
    single = Problem(1, ((),), (Buffer(5, 0), Buffer(3, -1)), (2,))
    assert solve_order(single, fixed=10, solver=solver) == IlpResult((0,), 20, 20, True)
    assert solve_joint(single, solver=solver).peak == 10
    nothing = Problem(2, ((), ()), (), (0, 0))
    assert solve_order(nothing, solver=solver).peak == 0 and solve_joint(nothing, solver=solver).peak == 0


@both_solvers
def test_deterministic_and_silent(solver: str, capfd: pytest.CaptureFixture[str]) -> None:
    problem = layered(random.Random(3), 11, 3)
    first, second = (solve_order(problem, solver=solver) for _ in range(2))
    assert first == second and first.nodes >= 0
    joint = training_like(2, random.Random(1))
    assert solve_joint(joint, solver=solver) == solve_joint(joint, solver=solver)
    out = capfd.readouterr()
    assert out.out == "" and out.err == ""


@both_solvers
def test_windows_ask_the_chosen_solver(solver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def ask(problem: Problem, **arguments: Any) -> IlpResult:
        asked.append(arguments["solver"])
        return solve_order(problem, **arguments)

    monkeypatch.setattr(windows, "solve_order", ask)
    flat = Flat.of(branchy(random.Random(1), 4, 3))
    given = np.arange(flat.n)
    budget = WindowBudget(states=1200, most=2, sizes=(14,), programs=2, ilp_nodes=12)
    better = improve_windows(flat, given, 0, budget, solver=solver)
    assert asked and set(asked) == {solver}
    assert flat.profile(better).max() < flat.profile(given).max()


@needs_highs
def test_highs_next_to_a_callers_own_searches() -> None:
    """HiGHS keeps its threads between searches and then refuses any other number of them."""
    import mip

    problem = layered(random.Random(3), 11, 3)
    for threads in (2, 3):
        model = mip.Model(solver_name=mip.HIGHS)
        model.verbose, model.threads = 0, threads
        model.objective = model.add_var(var_type=mip.INTEGER, lb=0.5)
        assert model.optimize() == mip.OptimizationStatus.OPTIMAL and model.objective_value == 1
        assert solve_order(problem, solver="highs").proven


@pytest.mark.parametrize("solve", [solve_order, solve_joint])
def test_a_solver_that_is_not_there(solve: Callable[..., IlpResult], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOLVERS, "highs", replace(SOLVERS["highs"], loads=lambda: False))
    monkeypatch.setitem(sys.modules, "mip", None)  # told before anything is built, and also where nothing is to solve
    for problem in (Problem(0, (), (), ()), random_problem(random.Random(1), 4)):
        with pytest.raises(ValueError, match=r"'highs' is not installed: pip install 'hlo_memopt\[highs\]'"):
            solve(problem, solver="highs")
        with pytest.raises(ValueError, match="solver must be 'cbc' or 'highs', not 'gurobi'"):
            solve(problem, solver="gurobi")


@pytest.mark.parametrize("missing", [(), ("highspy", "highsbox"), ("mip",)])
def test_looking_for_highs_is_silent(missing: tuple[str, ...]) -> None:
    """In a new process, since python-mip looks once; where it does not find the library it logs that as an error."""
    program = f"""
import sys
sys.modules.update(dict.fromkeys({missing!r}))
from hlo_memopt.schedule.ilp_support import SOLVERS
loads = SOLVERS["highs"].loads()
assert loads == SOLVERS["highs"].loads()
assert loads == {HIGHS and len(missing) < 2 and missing != ("mip",)}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_units_bound_is_safe() -> None:
    step, unit = unit_of([2**40, 2**40 + 4, 12])
    assert step == 4 and unit % 4 == 0 and (2**41 + 16) // unit <= 1 << 20
    assert unit_of([6, 0, 9]) == (3, 3) and unit_of([]) == (1, 1)
    assert bytes_bound(6.9999999, 3, 3) == 21  # CBC's noise below 7 units
    assert bytes_bound(7.00001, 3, 3) == 21  # and above
    assert bytes_bound(6.2, 3, 3) == 21  # a peak is a whole number of units
    assert bytes_bound(2.0, 12, 8) == 24


# ---- joint program ----


def least_packing(rects: list[tuple[int, int, int]], groups: list[list[int]], align: int, most: int) -> int:
    """Least arena below ``most`` for rectangles that are glued in groups: all stackings, by rising offset."""
    best = most
    pad = [-(-size // align) * align for _, _, size in rects]

    def meet(g: list[int], h: list[int]) -> bool:
        return any(rects[i][0] <= rects[j][1] and rects[j][0] <= rects[i][1] for i in g for j in h)

    meets = [[meet(g, h) for h in groups] for g in groups]

    def place(left: frozenset[int], low: dict[int, int], floor: int, arena: int) -> None:
        nonlocal best
        if arena >= best:
            return
        if not left:
            best = arena
            return
        for g in left:
            base = low[g]
            if base < floor:
                continue
            lift = {h: max(low[h], base + pad[groups[g][0]]) if meets[g][h] else low[h] for h in left if h != g}
            place(left - {g}, lift, base, max(arena, base + rects[groups[g][0]][2]))

    every = frozenset(range(len(groups)))
    place(every, dict.fromkeys(every, 0), 0, 0)
    return best


@functools.cache
def brute_arena(problem: Problem, align: int = 1) -> int:
    """The least arena over all orders, all choices of reuse pairs and all stackings."""
    best = 1 << 60
    for order in orders(problem):
        rects = rectangles(problem, order)
        pos = {v: s for s, v in enumerate(order)}
        hits = [
            (b, c)
            for v, b, c in sorted(set(problem.reuse))
            if rects[b][1] == pos[v] and not problem.buffers[b].live_out and problem.buffers[c].size
        ]
        for count in range(len(hits) + 1):
            for chosen in itertools.combinations(hits, count):
                if len({b for b, _ in chosen}) < count or len({c for _, c in chosen}) < count:
                    continue
                after = dict(chosen)
                groups = []
                for i in range(len(rects)):
                    if rects[i][2] and i not in after.values():
                        group = [i]
                        while group[-1] in after:
                            group.append(after[group[-1]])
                        groups.append(group)
                load = [
                    sum(
                        max(rects[i][2] for i in g if rects[i][0] <= s <= rects[i][1])
                        for g in groups
                        if any(rects[i][0] <= s <= rects[i][1] for i in g)
                    )
                    for s in pos.values()
                ]
                if max(load) < best:
                    best = least_packing(rects, groups, align, best)
    return best


def check_packing(problem: Problem, got: IlpResult, align: int = 1) -> None:
    """No overlap in space and time but an output on the operand that it reuses; aligned; the arena is ``peak``."""
    assert got.order is not None and got.offsets is not None and got.transient_offsets is not None
    assert is_topological(problem, list(got.order))
    rects = rectangles(problem, list(got.order))
    offsets = [*got.offsets, *got.transient_offsets]
    last_reader = {b: got.order[end] for b, (_, end, _) in enumerate(rects[: len(problem.buffers)])}
    assert all(o % align == 0 and o >= 0 for o in offsets)
    taken: list[int] = []
    for (i, (s, e, size)), (j, (t, f, more)) in itertools.combinations(enumerate(rects), 2):
        if size and more and s <= f and t <= e and offsets[i] < offsets[j] + more and offsets[j] < offsets[i] + size:
            b, c = (i, j) if (last_reader.get(i), i, j) in problem.reuse else (j, i)
            assert offsets[b] == offsets[c] and (last_reader[b], b, c) in problem.reuse
            assert rects[b][1] == rects[c][0] and not problem.buffers[b].live_out
            taken += [b, ~c]
    assert len(set(taken)) == len(taken)
    arena = max((o + size for o, (_, _, size) in zip(offsets, rects, strict=True) if size), default=0)
    assert got.peak == arena


CHAINS = [7, 23, 41, 75, 99, 143, 439, 489, 783, 855, 909, 1061, 1107, 1125, 1171, 2719]


def small_joint_cases(seeds: range) -> list[tuple[int, Problem, int]]:
    out = []
    for seed in seeds:
        problem = case(seed, 1, 5)
        blocks = sum(b.size > 0 for b in problem.buffers) + sum(t > 0 for t in problem.transient)
        if blocks <= 8 and count_orders(problem, 1000) <= 24:
            out.append((seed, problem, [1, 1, 2, 4, 3][seed % 5]))
    return out


@cbc_and_some_highs("seed", [(seed,) for seed in CHAINS])
def test_joint_reuse_chains(seed: int, solver: str) -> None:
    """Cases in which an output that lies next to its operand instead of on it would give a false arena."""
    rng = random.Random(seed)
    problem = alias_chain(rng, rng.randint(4, 7))
    got = solve_joint(problem, solver=solver)
    assert got.proven and got.peak == got.bound == brute_arena(problem)
    check_packing(problem, got)


@cbc_and_some_highs("seed,problem,align", small_joint_cases(range(120)))
def test_joint_equals_brute_force(seed: int, problem: Problem, align: int, solver: str) -> None:
    least = brute_arena(problem, align)
    got = solve_joint(problem, alignment=align, solver=solver)
    assert got.proven and got.peak == got.bound == least
    check_packing(problem, got, align)
    if seed % 4 == 0:
        none = solve_joint(problem, alignment=align, upper_bound=least, solver=solver)
        assert none.order is None and none.offsets is None and none.proven


@both_solvers
def test_joint_pays_for_alignment_and_chooses_reuse(solver: str) -> None:
    """Padding makes an arena larger than the order program's peak; a free choice of reuse may make it smaller."""
    three = Problem(1, ((),), (Buffer(3, 0), Buffer(3, 0), Buffer(2, -1, (0,))), (0,))
    padded = solve_joint(three, alignment=4, solver=solver)
    assert padded.peak == 10 and solve_order(three, solver=solver).peak == 8  # the 2 bytes go on top: nothing pads them
    check_packing(three, padded, 4)
    buffers = (Buffer(4, 0, (2,)), Buffer(4, 1, (2,)), Buffer(4, 2, (), True), Buffer(4, 2, (), True))
    problem = Problem(3, ((), (), (0, 1)), buffers, (0, 0, 0), ((2, 0, 2), (2, 0, 3), (2, 1, 2)))
    joint = solve_joint(problem, solver=solver)
    assert joint.peak == 8 < solve_order(problem, solver=solver).peak
    check_packing(problem, joint)


@both_solvers
def test_joint_large_sizes_and_fixed(solver: str) -> None:
    for seed in range(6):
        problem = random_problem(random.Random(seed), 4, scale=2**34)
        plain, shifted = (solve_joint(problem, alignment=256, fixed=fixed, solver=solver) for fixed in (0, 77))
        check_packing(problem, plain, 256)
        assert plain.proven and shifted.proven and shifted.peak == plain.peak + 77


# ---- early updates ----


def with_edges(problem: Problem, edges: tuple[tuple[int, int], ...]) -> Problem:
    preds = [set(p) for p in problem.preds]
    for u, v in edges:
        preds[v].add(u)
    return replace(problem, preds=tuple(tuple(sorted(p)) for p in preds))


def test_safe_early_updates_keep_a_best_order() -> None:
    found = 0
    for seed in range(400):
        problem = case(seed, 3, 8)
        edges = early_updates(problem)
        found += bool(edges)
        assert solve_exact(with_edges(problem, edges)).peak == solve_exact(problem).peak
    assert found > 40


def test_early_updates_of_a_training_step() -> None:
    problem = training_like(5, random.Random(0))
    edges = early_updates(problem)
    assert {u for u, _ in edges} >= set(range(11, 15))  # the updates, but for the one whose gradient comes last
    restricted = with_edges(problem, edges)
    assert solve_exact(restricted).peak == solve_exact(problem).peak
    assert count_orders(restricted, 10**9) < count_orders(problem, 10**9)


def test_unsafe_early_updates_are_acyclic_and_more() -> None:
    more = 0
    for seed in range(200):
        problem = case(seed, 3, 8)
        loose = early_updates(problem, safe=False)
        more += len(loose) > len(early_updates(problem))
        least, got = solve_exact(problem).peak, solve_exact(with_edges(problem, loose))
        assert got.order is not None and got.peak >= least and math.isfinite(got.peak)
    assert more > 10


@pytest.mark.parametrize(("kept", "edges"), [(4, ((1, 2),)), (5, ())])
def test_an_update_frees_at_least_what_it_leaves(kept: int, edges: tuple[tuple[int, int], ...]) -> None:
    """0 makes a gradient of 4 bytes and goes on to 2; 1 turns the gradient into ``kept`` bytes that stay."""
    buffers = (Buffer(4, 0, (1,)), Buffer(8, 0, (2,)), Buffer(kept, 1, (), True), Buffer(9, 2, (), True))
    problem = Problem(3, ((), (0,), (0,)), buffers, (0, 0, 0))
    assert early_updates(problem, safe=False) == edges
    assert early_updates(problem) == ()  # no reuse pair: node 1 needs new bytes
    if kept == 4:
        assert early_updates(replace(problem, reuse=((1, 0, 2),))) == edges
