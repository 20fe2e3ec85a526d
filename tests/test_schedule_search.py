"""Cuts, division, windows and the whole search on small random problems, against brute force."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from schedule_cases import brute_peak, problems, random_problem, training_like

from hlo_memopt.schedule.construct import backward_greedy_order, depth_first_order, greedy_order
from hlo_memopt.schedule.cuts import CutFinder
from hlo_memopt.schedule.divide import Work, divide, smooth
from hlo_memopt.schedule.flat import Flat
from hlo_memopt.schedule.problem import Problem, is_topological, peak, usage_profile
from hlo_memopt.schedule.search import search, smoothed
from hlo_memopt.schedule.windows import WindowBudget, improve_windows

many = settings(max_examples=300, deadline=None)
CONSTRUCTORS = [greedy_order, backward_greedy_order, depth_first_order]


def some_order(problem: Problem, seed: int) -> list[int]:
    rng = random.Random(seed)
    missing = [len(p) for p in problem.preds]
    ready = [v for v in range(problem.n) if not missing[v]]
    order = []
    while ready:
        v = ready.pop(rng.randrange(len(ready)))
        order.append(v)
        for w in problem.succs[v]:
            missing[w] -= 1
            if not missing[w]:
                ready.append(w)
    return order


def numbered(problem: Problem) -> Problem:
    """The same problem with nodes numbered by one of its orders, as the planner numbers them."""
    order = some_order(problem, 0)
    new = {v: i for i, v in enumerate(order)}
    buffers = tuple(
        replace(b, producer=new.get(b.producer, -1), consumers=tuple(new[c] for c in b.consumers))
        for b in problem.buffers
    )
    preds = tuple(tuple(new[p] for p in problem.preds[v]) for v in order)
    reuse = tuple((new[v], b, c) for v, b, c in problem.reuse)
    return Problem(problem.n, preds, buffers, tuple(problem.transient[v] for v in order), reuse)


@many
@given(problems(), st.integers(0, 99))
def test_flat_profile_is_the_plain_profile(problem: Problem, seed: int) -> None:
    order = some_order(problem, seed)
    assert Flat.of(problem).profile(np.array(order, dtype=np.int64)).tolist() == usage_profile(problem, order).tolist()
    assert Flat.of(problem).to_problem() == Problem(
        problem.n, problem.preds, problem.buffers, problem.transient, problem.reuse
    )


@many
@given(problems(), st.integers(0, 99), st.integers(0, 8), st.integers(0, 8))
def test_a_part_costs_what_it_costs_in_the_whole(problem: Problem, seed: int, a: int, b: int) -> None:
    """Sums without reuse agree step by step: reuse across a border is the one thing that a part does not see."""
    used = tuple(b for b in problem.buffers if b.producer >= 0 or b.consumers or b.live_out)
    plain = Problem(problem.n, problem.preds, used, problem.transient)
    order = np.array(some_order(plain, seed), dtype=np.int64)
    low, high = sorted((min(a, plain.n), min(b, plain.n)))
    before = np.zeros(plain.n, dtype=bool)
    before[order[:low]] = True
    part, base = Flat.of(plain).part(before, order[low:high])
    whole = usage_profile(plain, order)[low:high]
    assert (part.profile(np.arange(high - low)) + base).tolist() == whole.tolist()


@many
@given(problems(max_nodes=7))
def test_no_order_is_below_a_cut(problem: Problem) -> None:
    if problem.n == 0:
        return
    finder = CutFinder(Flat.of(problem))
    cuts = [finder.cut(v) for v in range(problem.n)]
    assert max(c.bound for c in cuts) <= brute_peak(problem)
    for v, cut in enumerate(cuts):
        inside = set(np.flatnonzero(cut.before).tolist())
        assert v not in inside and set(problem.preds[v]) <= inside
        assert all(set(problem.preds[w]) <= inside for w in inside)


def test_bounds_hold_for_huge_sizes() -> None:
    """Capacities beyond 31 bits are scaled down, never up."""
    rng = random.Random(7)
    for _ in range(50):
        problem = random_problem(rng, 6, scale=2**36 + 12345)
        finder = CutFinder(Flat.of(problem))
        assert max(finder.cut(v).bound for v in range(problem.n)) <= brute_peak(problem)


@many
@given(problems())
def test_constructed_orders_are_schedules(problem: Problem) -> None:
    for construct in CONSTRUCTORS:
        assert is_topological(problem, construct(problem))


@many
@given(problems(), st.integers(0, 99))
def test_improvements_are_schedules_and_never_worse(problem: Problem, seed: int) -> None:
    # a buffer that is there from the start and that nobody reads belongs to no step in particular
    assume(problem.n and all(b.producer >= 0 or b.consumers or b.live_out for b in problem.buffers))
    order = np.array(some_order(problem, seed), dtype=np.int64)
    flat = Flat.of(problem)
    given_peak = peak(problem, order)
    divided, bound, _ = divide(flat, order.copy(), Work(10_000))
    windowed = improve_windows(flat, order.copy(), 0, WindowBudget(states=1200, most=1000, sizes=(5,), programs=0))
    lowered = np.array(smoothed(problem, order.tolist(), 0.5))
    for result in (divided, windowed, lowered, smooth(flat, order.copy(), Work(10_000), 0)):
        assert is_topological(problem, result)
        if result is not lowered:
            continue
        assert peak(problem, result) <= given_peak
    assert peak(problem, divided) <= given_peak
    assert peak(problem, windowed) <= given_peak
    assert bound <= brute_peak(problem)


@many
@given(problems())
def test_small_problems_are_solved_exactly(problem: Problem) -> None:
    problem = numbered(problem)
    result = search(problem)
    best = brute_peak(problem)
    assert result.peak == best
    assert result.bound <= best
    assert all(is_topological(problem, o) for o in result.orders)
    assert peak(problem, result.orders[0]) == result.peak


@pytest.mark.parametrize("seed", range(3))
def test_training_like_graphs_reach_their_bound(seed: int) -> None:
    problem = training_like(12, random.Random(seed))
    result = search(problem)
    assert result.peak <= peak(problem, list(range(problem.n)))
    assert result.bound <= result.peak <= 1.05 * result.bound


def test_the_same_problem_gives_the_same_orders() -> None:
    problem = training_like(10, random.Random(3))
    assert search(problem) == search(problem)
