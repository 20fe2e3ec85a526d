"""Orders brought back towards the given one: what they may cost, and what goes back to its place."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import alias_chain, competing_problem, layered, orders, problems, random_problem, training_like
from test_schedule_search import numbered, some_order

from hlo_memopt.schedule.flat import Flat
from hlo_memopt.schedule.nearest import nearest, nearest_accepted
from hlo_memopt.schedule.problem import Buffer, Problem, is_topological, usage_profile
from hlo_memopt.schedule.search import search

many = settings(max_examples=200, deadline=None)


def inversions(order: np.ndarray) -> int:
    return sum(a > b for a, b in combinations(order.tolist(), 2))


def area(problem: Problem, order: np.ndarray, line: int) -> int:
    return sum(max(0, used - line) for used in usage_profile(problem, order).tolist())


def highest(problem: Problem, order: np.ndarray) -> int:
    return int(usage_profile(problem, order).max())


def checked(problem: Problem, order: np.ndarray, more: int = 0, near: float = 0.9) -> np.ndarray:
    """`nearest` with a limit ``more`` bytes above the order's own peak; all that it promises holds."""
    before = order.copy()
    limit = highest(problem, order) + more
    result = nearest(Flat.of(problem), order, limit, near)
    assert order.tolist() == before.tolist()
    assert is_topological(problem, result)
    assert highest(problem, result) <= limit
    line = int(near * limit)
    assert area(problem, result, line) <= area(problem, order, line)
    assert inversions(result) <= inversions(order)
    if highest(problem, as_given(problem)) <= limit and area(problem, as_given(problem), line) <= area(
        problem, order, line
    ):
        assert inversions(result) == 0
    return result


def as_given(problem: Problem) -> np.ndarray:
    return np.arange(problem.n)


@many
@given(problems(max_nodes=12), st.integers(0, 99), st.sampled_from([0, 0, 1, 5]), st.sampled_from([0.3, 0.9, 1.0]))
def test_nothing_is_paid_for_being_near(problem: Problem, seed: int, more: int, near: float) -> None:
    problem = numbered(problem)
    checked(problem, np.array(some_order(problem, seed)), more, near)


@pytest.mark.parametrize("make", [alias_chain, competing_problem])
@many
@given(st.integers(0, 2**32), st.integers(2, 16), st.sampled_from([0, 0, 3]))
def test_bytes_taken_over_are_followed(make, seed: int, n: int, more: int) -> None:  # type: ignore[no-untyped-def]
    """Reuse depends on which node is a buffer's last: it changes with every pull."""
    problem = numbered(make(random.Random(seed), n))
    checked(problem, np.array(some_order(problem, seed % 100)), more, 0.7)


@pytest.mark.parametrize("seed", range(4))
def test_training_steps_and_layered_graphs(seed: int) -> None:
    rng = random.Random(seed)
    for problem in (training_like(15, rng), layered(rng, 80, 6)):
        found = search(problem, "fast")
        order = np.array(found.orders[0])
        result = checked(problem, order)
        assert inversions(result) < inversions(order) or inversions(order) == 0
        assert result.tolist() == nearest(Flat.of(problem), order, found.peak).tolist()


def test_small_orders_are_mostly_as_near_as_can_be() -> None:
    nearer = left = 0
    for seed in range(150):
        problem = numbered(random_problem(random.Random(seed), 7))
        order = np.array(some_order(problem, seed))
        limit = highest(problem, order)
        result = checked(problem, order)
        best = min(
            inversions(np.array(o))
            for o in orders(problem)
            if highest(problem, np.array(o)) <= limit
            and area(problem, np.array(o), int(0.9 * limit)) <= area(problem, order, int(0.9 * limit))
        )
        nearer += inversions(order) - inversions(result)
        left += inversions(result) - best
    assert left <= 0.1 * nearer


def pairs(count: int, big: int) -> Problem:
    """``count`` makers of 1 byte, each with a reader; maker and reader ``big`` have 100 bytes instead.

    As given all makers run first. Held beside the big buffer the small ones cost too much: the big pair must run
    before them, or behind their readers.
    """
    size = [100 if i == big else 1 for i in range(count)]
    buffers = tuple(Buffer(size[i], i, (count + i,)) for i in range(count))
    preds = tuple(() for _ in range(count)) + tuple((i,) for i in range(count))
    return Problem(2 * count, preds, buffers, (0,) * (2 * count))


def test_one_block_must_move_and_the_rest_goes_back() -> None:
    count, big = 40, 25
    problem = pairs(count, big)
    order = np.array([v for i in [big, *range(big), *range(big + 1, count)] for v in (i, count + i)])
    assert highest(problem, order) == 100
    result = checked(problem, order, near=1.0)
    rest = [v for v in range(2 * count) if v not in (big, count + big)]
    assert result.tolist() == [big, count + big, *rest]


def test_what_was_moved_for_nothing_goes_back() -> None:
    """Two were moved for nothing; beside the big buffer there is room for two small ones."""
    count, big = 40, 25
    problem = pairs(count, big)
    rest = [v for v in range(2 * count) if v not in (big, count + big, 7, count + 3)]
    order = np.array([7, big, count + big, *rest, count + 3])
    result = checked(problem, order, more=1, near=1.0)
    rest = [v for v in range(2, 2 * count) if v not in (big, count + big)]
    assert result.tolist() == [0, 1, big, count + big, *rest]  # as late as the limit allows


def test_the_given_order_is_returned_if_it_will_do() -> None:
    problem = pairs(30, 12)
    order = np.array([v for i in range(30) for v in (i, 30 + i)])
    limit = highest(problem, as_given(problem))
    assert nearest(Flat.of(problem), order, limit, 1.0).tolist() == list(range(60))
    assert nearest(Flat.of(problem), as_given(problem), limit).tolist() == list(range(60))


def test_without_work_the_order_stays() -> None:
    problem = pairs(30, 12)
    order = np.array([v for i in range(30) for v in (i, 30 + i)])
    assert nearest(Flat.of(problem), order, 10**6, budget=0).tolist() == order.tolist()
    half = nearest(Flat.of(problem), order, highest(problem, order), budget=150)
    assert is_topological(problem, half) and highest(problem, half) <= highest(problem, order)


def test_precedence_that_the_given_order_breaks() -> None:
    """What keeps a place idle for a guest is precedence too, and not that of the given order."""
    problem = pairs(30, 12)
    flat = Flat.of(problem)
    bound = replace(flat, edge_from=np.append(flat.edge_from, 55), edge_to=np.append(flat.edge_to, 3))
    order = np.array([v for i in [25, *range(25), *range(26, 30)] for v in (i, 30 + i)])
    result = nearest(bound, order, 10**6)
    assert is_topological(problem, result)
    assert result.tolist().index(55) < result.tolist().index(3)
    assert inversions(result) < 60  # 3 and 55 have 51 nodes between them


def test_no_further_than_is_accepted() -> None:
    problem = pairs(40, 25)
    order = np.array([v for i in [25, *range(25), *range(26, 40)] for v in (i, 40 + i)])
    flat, limit = Flat.of(problem), highest(problem, order)
    whole = nearest(flat, order, limit, 1.0)
    asked = []

    def accepts(found: np.ndarray) -> bool:
        """Some step beside the big buffer's keeps low: what another measure than the profile may want."""
        asked.append(found)
        return int(usage_profile(problem, found)[2:].max()) <= 20

    result = nearest_accepted(flat, order, limit, accepts, 1.0, tries=8)
    assert accepts(result) and not accepts(whole)
    assert len(asked) <= 11
    assert inversions(whole) < inversions(result) < inversions(order)
    assert nearest_accepted(flat, order, limit, lambda _: True, 1.0).tolist() == whole.tolist()
    assert nearest_accepted(flat, order, limit, lambda _: False, 1.0).tolist() == order.tolist()


def test_a_peak_above_the_limit_is_refused() -> None:
    problem = pairs(5, 2)
    with pytest.raises(ValueError, match="peak"):
        nearest(Flat.of(problem), as_given(problem), 103)
    assert nearest(Flat.of(Problem(0, (), (), ())), np.zeros(0, np.int64), 0).tolist() == []
