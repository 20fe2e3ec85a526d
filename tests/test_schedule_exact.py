"""exact.py against brute force over all topological orders, and on known families."""

from __future__ import annotations

import random
from collections.abc import Callable

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

from hlo_memopt.schedule.exact import ancestor_masks, reuse_pairs, solve_exact, static_bound
from hlo_memopt.schedule.problem import Buffer, Problem, is_topological, peak, usage_profile


def many_risers(rng: random.Random, n: int) -> Problem:
    """Allocations, copies of what is read elsewhere and in-place updates; node numbers are no topological order."""
    buffers: list[Buffer] = []
    pairs: list[tuple[int, int, int]] = []
    for v in range(n):
        later = list(range(v + 1, n))
        size = rng.choice([1, 1, 2, 4, 8])
        shared = [i for i, b in enumerate(buffers) if not b.live_out]
        for i in rng.sample(shared, min(len(shared), rng.choice([0, 0, 1, 1, 2]))):
            b = buffers[i]
            size = b.size if rng.random() < 0.5 else size
            buffers[i] = Buffer(b.size, b.producer, tuple({*b.consumers, v}), False)
            if rng.random() < 0.5:
                pairs.append((v, i, len(buffers)))
        readers = rng.sample(later, min(len(later), rng.choice([1, 1, 2, 3])))
        buffers.append(Buffer(size, v, tuple(readers), rng.random() < 0.1))
        if rng.random() < 0.25:
            readers = rng.sample(range(n), min(n, rng.choice([0, 1, 2, 2])))
            buffers.append(Buffer(rng.choice([1, 2, 4]), -1, tuple(readers), rng.random() < 0.1))
    pairs = [(v, b, c) for v, b, c in pairs if buffers[b].size == buffers[c].size]
    edges = {(u, v) for v in range(n) for u in range(v) if rng.random() < 0.05}
    transient = [rng.choice([0, 0, 0, 0, 2, 6]) for _ in range(n)]
    new = rng.sample(range(n), n)
    named = [Buffer(b.size, new[b.producer] if b.producer >= 0 else -1, tuple(new[c] for c in b.consumers), b.live_out)
             for b in buffers]  # fmt: skip
    moved = tuple(transient[new.index(v)] for v in range(n))
    preds = closed(n, {(new[u], new[v]) for u, v in edges}, named)
    return Problem(n, preds, tuple(named), moved, tuple((new[v], b, c) for v, b, c in pairs))


def plain_peak(problem: Problem) -> int:
    """The least peak by the recurrence of `exact` over all down-sets, with no rule that leaves any out."""
    n, buffers = problem.n, problem.buffers
    preds = [sum(1 << p for p in set(ps)) for ps in problem.preds]
    users = [sum(1 << u for u in {*b.consumers, b.producer} - {-1}) for b in buffers]
    pairs = reuse_pairs(problem)
    layer = {0: 0}  # down-set -> least length
    for _ in range(n):
        after: dict[int, int] = {}
        for mask, length in layer.items():
            live = sum(
                b.size
                for b, u in zip(buffers, users, strict=True)
                if (b.producer < 0 or mask >> b.producer & 1) and (b.live_out or u & ~mask or not (u or mask))
            )
            for v in range(n):
                if mask >> v & 1 or preds[v] & ~mask:
                    continue
                usage = live + problem.transient[v] + sum(b.size for b in buffers if b.producer == v)
                taken: set[int] = set()
                for b, c in pairs[v]:
                    if not users[b] & ~(mask | 1 << v) and not taken & {b, ~c}:
                        taken |= {b, ~c}
                        usage -= buffers[c].size
                child = mask | 1 << v
                after[child] = min(after.get(child, 1 << 200), max(usage, length))
        layer = after
    return layer[(1 << n) - 1]


FAMILIES = [random_problem, competing_problem, alias_chain, many_risers]


def cases(seeds: range, most_orders: int) -> list[Problem]:
    out = []
    for seed in seeds:
        rng = random.Random(seed)
        problem = FAMILIES[seed % len(FAMILIES)](rng, rng.randint(1, 10))
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


@pytest.mark.parametrize("family", [random_problem, many_risers])
def test_equals_the_plain_recurrence(family: Callable[[random.Random, int], Problem]) -> None:
    """Larger problems, in which chains of moves occur."""
    tried = 0
    for seed in range(3000):
        rng = random.Random(seed)
        problem = family(rng, rng.randint(8, 12))
        if count_orders(problem, 10**9) < 10**6:
            tried += 1
            check(problem, plain_peak(problem))
    assert tried > 2000


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
    spread = [len({peak(p, o) for o in orders(p)}) > 1 for p in cases(range(400), 600)]
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
    problems = [layered(random.Random(seed), 14, 4) for seed in range(200)]
    problems += [many_risers(random.Random(seed), 16) for seed in range(200)]
    for problem in problems:
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


def test_allocations_run_as_late_as_possible() -> None:
    """Riser rule: 16 allocations that a loop reads, and the steps before it; more than 2**16 sets without it."""
    loop, steps = 20, (16, 17, 18, 19)
    buffers = [Buffer(1 + k, k, (loop,)) for k in range(16)]
    buffers += [Buffer(10 * k, v, (loop,)) for k, v in enumerate(steps, 1)]
    transient = (*[0] * 16, *[1000] * 4, 0)
    got = solve_exact(Problem(21, closed(21, set(), buffers), tuple(buffers), transient))
    # the last step runs behind the others: 60 + 40 + 1000 or more, with no allocation made yet
    assert got.proven and got.peak == 1100 and got.states < 2000
    assert got.order is not None and set(got.order[:4]) == set(steps) and got.order[-1] == loop


def test_a_riser_runs_before_the_first_of_its_consumers() -> None:
    """Node 0 (8 bytes) and what it feeds, node 1, serve nodes 2 and 3; both come late, node 4 first."""
    buffers = [
        Buffer(8, 0, (1, 2, 3)), Buffer(4, 1, (2, 3)), Buffer(2, 2, (), True), Buffer(6, 3, (), True),
        Buffer(32, -1, (4,)), Buffer(1, 4, (2, 3)),
    ]  # fmt: skip
    problem = Problem(5, closed(5, set(), buffers), tuple(buffers), (0, 0, 5, 5, 0))
    got = solve_exact(problem)
    assert got.order == (4, 0, 1, 2, 3) and got.proven
    check(problem, brute_peak(problem))


def test_copies_sleep_while_another_reads_what_they_copy() -> None:
    """Forward and backward chains of 10; what both read is copied too, for updates: 12,000 sets if copies come early.

    Three steps before the turning point make its peak larger than the static bound.
    """
    k = 10
    forward, backward, copies, updates, steps = (range(k * i, k * i + k) for i in range(5))
    buffers: list[Buffer] = []
    for i in range(k):
        buffers.append(Buffer(8, forward[i], (*forward[i + 1 : i + 2], backward[i], copies[i])))
        buffers.append(Buffer(8, backward[i], (*backward[:i][-1:], updates[i])))
        buffers.append(Buffer(8, copies[i], (updates[i],)))
        buffers.append(Buffer(1, updates[i], (), True))
    buffers += [Buffer(3 + i, steps[i], (backward[-1],)) for i in range(3)]
    n = 4 * k + 3
    transient = (*[0] * (4 * k), 110, 110, 110)
    got = solve_exact(Problem(n, closed(n, {(forward[-1], backward[-1])}, buffers), tuple(buffers), transient))
    assert got.proven and got.peak == 122 and got.states < 100


def test_a_copy_wakes_before_an_update_in_place() -> None:
    """Node 1 copies what node 2 updates in place: 16 bytes if the copy comes first, else 24."""
    buffers = [Buffer(8, 0, (1, 2)), Buffer(8, 1, (3,)), Buffer(8, 2, (3,))]
    problem = Problem(4, closed(4, set(), buffers), tuple(buffers), (0,) * 4, ((2, 0, 2),))
    got = solve_exact(problem)
    assert got.order == (0, 1, 2, 3) and got.peak == 16
    without = solve_exact(Problem(4, problem.preds, problem.buffers, problem.transient))
    assert without.peak == 24


def test_bytes_of_the_first_step_only() -> None:
    """A riser goes first where the first step has to bear an input that nobody reads."""
    buffers = (Buffer(5, -1), Buffer(1, 0, (2,)), Buffer(10, 1, (2,)))
    problem = Problem(3, closed(3, set(), list(buffers)), buffers, (0, 2, 0))
    got = solve_exact(problem)
    assert got.order == (0, 1, 2) and got.peak == 13 == brute_peak(problem)


def test_outputs_that_nothing_waits_for_come_last() -> None:
    buffers = (*(Buffer(2, v, (), True) for v in range(12)), Buffer(20, -1, (12,)), Buffer(3, 12, (), True))
    got = solve_exact(Problem(13, ((),) * 13, buffers, (0,) * 12 + (10,)))
    assert got.proven and got.peak == 33
    assert got.order is not None and got.order[0] == 12 and sorted(got.order) == list(range(13))


def test_deterministic() -> None:
    for problem in (layered(random.Random(5), 30, 4), many_risers(random.Random(5), 40)):
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
