"""exact.py against brute force over all topological orders, and on known families."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from schedule_cases import (
    alias_chain,
    branchy,
    brute_peak,
    closed,
    competing_problem,
    count_orders,
    layered,
    orders,
    problems,
    random_problem,
    slow_usage,
    training_like,
)

from hlo_memopt.schedule.exact import ancestor_masks, solve_exact, static_bound
from hlo_memopt.schedule.problem import Buffer, Problem, is_topological, peak, usage_profile

FAMILIES = [random_problem, competing_problem, alias_chain]


def cases(seeds: range, most_orders: int) -> list[Problem]:
    out = []
    for seed in seeds:
        rng = random.Random(seed)
        problem = FAMILIES[seed % 3](rng, rng.randint(1, 10))
        if count_orders(problem, 10**9) <= most_orders:
            out.append(problem)
    return out


def check(problem: Problem, least: int) -> None:
    got = solve_exact(problem)
    assert got.proven and got.order is not None and is_topological(problem, list(got.order))
    assert got.peak == got.bound == peak(problem, list(got.order)) == least
    assert static_bound(problem) <= least


@pytest.mark.parametrize("block", range(6))
def test_equals_brute_force(block: int) -> None:
    some = cases(range(1000 * block, 1000 * block + 1000), 600)
    assert len(some) > 850
    for problem in some:
        check(problem, brute_peak(problem))


@given(problems(max_nodes=7))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_equals_brute_force_hypothesis(problem: Problem) -> None:
    check(problem, brute_peak(problem))


def test_evaluation_agrees_with_a_slow_one() -> None:
    """The common yardstick of all these tests: `usage_profile` against a plain loop."""
    for problem in cases(range(300), 10**9):
        order = next(orders(problem))
        assert usage_profile(problem, order).tolist() == slow_usage(problem, order)


def test_order_matters_in_these_cases() -> None:
    """Else the tests above would prove little: most problems have better and worse orders."""
    spread = [len({peak(p, o) for o in orders(p)}) > 1 for p in cases(range(300), 600)]
    assert sum(spread) > 100


def test_bounds_and_fixed() -> None:
    for problem in cases(range(300), 200):
        least = brute_peak(problem)
        none = solve_exact(problem, upper_bound=least)
        assert none.order is None and none.peak == least and none.proven and none.bound >= least
        some = solve_exact(problem, upper_bound=least + 1)
        assert some.order is not None and some.peak == least and some.proven
        fixed = solve_exact(problem, fixed=1000, upper_bound=least + 1001)
        assert fixed.order is not None and fixed.peak == least + 1000 == fixed.bound


def test_a_short_search_claims_nothing_false() -> None:
    unproven = 0
    for seed in range(200):
        problem = layered(random.Random(seed), 14, 4)
        least = solve_exact(problem).peak
        for most in (0, 3, 30):
            got = solve_exact(problem, max_states=most, fixed=7)
            assert got.order is not None and peak(problem, list(got.order)) + 7 == got.peak
            assert got.bound <= least + 7 <= got.peak
            assert got.proven == (got.bound == got.peak)
            cut = solve_exact(problem, max_states=most, upper_bound=least)
            assert cut.order is None and cut.bound <= least
            unproven += not got.proven
    assert unproven > 20


def test_large_sizes() -> None:
    for seed in range(50):
        problem = random_problem(random.Random(seed), 6, scale=2**40 + 1)
        check(problem, brute_peak(problem))


def test_empty_single_and_cycle() -> None:
    assert solve_exact(Problem(0, (), (), ()), fixed=9)[:3] == ((), 0, True)
    single = Problem(1, ((),), (Buffer(5, 0), Buffer(3, -1)), (2,))
    assert solve_exact(single, fixed=10)[:3] == ((0,), 20, True)
    with pytest.raises(ValueError, match="cycle"):
        solve_exact(Problem(2, ((1,), (0,)), (), (0, 0)))


def test_a_chain_that_pays_only_at_its_end_is_taken_at_once() -> None:
    """Descent rule: of 8 independent chains 2 -> 64 -> 64 -> 64 -> 1 bytes any may come next; 4**8 sets without it."""
    buffers = [Buffer(2, -1, (4 * k,)) for k in range(8)]
    for k in range(8):
        buffers += [Buffer(64, 4 * k + i, (4 * k + i + 1,)) for i in range(3)]
        buffers.append(Buffer(1, 4 * k + 3, (), True))
    got = solve_exact(Problem(32, closed(32, set(), buffers), tuple(buffers), (0,) * 32))
    assert got.proven and got.peak == 7 * 2 + 128 + 0 and got.states < 20


def test_deterministic() -> None:
    problem = layered(random.Random(5), 30, 4)
    assert solve_exact(problem) == solve_exact(problem)


@pytest.mark.parametrize(
    ("problem", "most"),
    [
        (training_like(13, random.Random(0)), 2_000),
        (branchy(random.Random(0), 6, 6), 20_000),
        (layered(random.Random(0), 40, 3), 20_000),
        (alias_chain(random.Random(0), 40), 100_000),
    ],
)
def test_windows_of_forty_nodes_are_solved(problem: Problem, most: int) -> None:
    got = solve_exact(problem)
    assert got.proven and got.states < most and got.order is not None
    assert peak(problem, list(got.order)) == got.peak == got.bound


def test_ancestor_masks() -> None:
    assert ancestor_masks(4, ((), (0,), (1,), (0, 0))) == [0, 0b1, 0b11, 0b1]
