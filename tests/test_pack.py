"""The packing solver: valid, never below its bound, least for small problems, and good on public hard ones."""

from __future__ import annotations

import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from pack_cases import CAPACITY, MINIMALLOC, least_height, problems, read_csv, sliced

from hlo_memopt.check import check_offsets
from hlo_memopt.pack import kernel, search
from hlo_memopt.pack.bounds import live_bound
from hlo_memopt.pack.problem import PackBuffer, PackingProblem
from hlo_memopt.pack.search import fit
from hlo_memopt.pack.sections import split
from hlo_memopt.pack.solver import pack
from hlo_memopt.pack.starts import starts
from hlo_memopt.pack.validate import PackingError, validate

QUIET = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def buffers(*rows: tuple) -> list[PackBuffer]:
    return [PackBuffer(str(n), *row) for n, row in enumerate(rows)]


# -- small problems ------------------------------------------------------------------------------------------


@settings(QUIET, max_examples=300)
@given(problems())
def test_small_problems_are_solved_as_by_brute_force(problem: PackingProblem) -> None:
    result = pack(problem)
    assert result.height == validate(problem, result.offsets) == least_height(problem)
    assert result.proven and result.lower_bound == result.height


@settings(QUIET, max_examples=200)
@given(problems(most=7, sizes=1000))
def test_the_search_alone_finds_and_refutes(problem: PackingProblem) -> None:
    """Without the cheap packings before it, at the least height of a part and just below."""
    for part in split(problem):
        alone = PackingProblem([problem.buffers[n] for n in part.index])
        least = least_height(alone)
        found = fit(part, least, 10**6)
        assert found.offsets is not None and validate(alone, found.offsets.tolist(), least) <= least
        below = fit(part, least - 1, 10**6)
        assert below.offsets is None and below.proven


@pytest.mark.parametrize("seed", range(10))
def test_eight_buffers_as_by_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(8):
        lower = int(rng.integers(0, 12))
        rows.append((lower, lower + int(rng.integers(1, 8)), int(rng.integers(1, 60))))
    problem = PackingProblem(buffers(*rows))
    result = pack(problem)
    assert result.proven and result.height == least_height(problem)


# -- what must hold of every packing -------------------------------------------------------------------------


@settings(QUIET, max_examples=60)
@given(problems(most=25, sizes=200))
def test_packings_hold(problem: PackingProblem) -> None:
    result = pack(problem, nodes=20_000)
    assert result.height == validate(problem, result.offsets) >= result.lower_bound
    assert result.proven == (result.height == result.lower_bound)
    live = max((live_bound(p) for p in split(problem)), default=0)
    assert live <= result.lower_bound
    others = [(b.id, o, b.size, b.lower, b.upper - 1) for b, o in zip(problem.buffers, result.offsets, strict=True)]
    check_offsets(others, capacity=max(result.height, *(o for _, o, *_ in others), 0) if others else 0)
    assert pack(problem, nodes=20_000) == result


@settings(QUIET, max_examples=60)
@given(problems(most=12, sizes=50))
def test_every_start_is_a_packing(problem: PackingProblem) -> None:
    for part in split(problem):
        alone = PackingProblem([problem.buffers[n] for n in part.index])
        for offsets in starts(part):
            assert validate(alone, offsets.tolist()) == part.height(offsets) >= live_bound(part)


@pytest.mark.parametrize("shrink", [0.0, 0.02])
@pytest.mark.parametrize("cuts", [60, 150])
def test_larger_problems_stay_near_the_bound(cuts: int, shrink: float) -> None:
    problem = sliced(cuts, cuts, shrink=shrink)
    result = pack(problem, nodes=400_000)
    assert validate(problem, result.offsets) == result.height
    assert result.lower_bound <= result.height <= 1.15 * result.lower_bound


# -- cases ---------------------------------------------------------------------------------------------------


def test_nothing_to_pack() -> None:
    for rows in ([], [(0, 5, 0)]):
        result = pack(PackingProblem(buffers(*rows), 0))
        assert (result.height, result.lower_bound, result.proven, result.nodes) == (0, 0, True, 0)
    fixed = pack(PackingProblem(buffers((0, 5, 0, 1, 7), (0, 5, 3))))
    assert fixed.offsets == (7, 0) and fixed.height == 7 and fixed.proven


def test_half_open_lives_share_bytes() -> None:
    assert pack(PackingProblem(buffers((0, 5, 10), (5, 9, 10)))).offsets == (0, 0)
    assert pack(PackingProblem(buffers((0, 6, 10), (5, 9, 10)))).height == 20


def test_the_uppermost_buffer_ends_with_its_last_byte() -> None:
    result = pack(PackingProblem(buffers((0, 5, 10, 64), (0, 5, 65, 64), (0, 5, 64, 64))))
    assert result.height == 64 + 64 + 65 == result.lower_bound


def test_buffers_go_around_fixed_ones() -> None:
    problem = PackingProblem(buffers((0, 9, 10, 1, 10), (0, 9, 10), (3, 9, 5), (0, 3, 12, 4)))
    result = pack(problem)
    assert result.offsets[0] == 10 and result.proven and result.height == least_height(problem)


def test_a_capacity_ends_the_search_at_the_first_fit() -> None:
    problem = sliced(7, 30)
    tight = pack(problem)
    roomy = pack(PackingProblem(problem.buffers, 2 * tight.height))
    assert roomy.nodes == 0 and roomy.height <= 2 * tight.height
    small = pack(PackingProblem(problem.buffers, tight.lower_bound - 1), nodes=1000)
    assert small.lower_bound > tight.lower_bound - 1  # proves that there is none
    assert validate(problem, small.offsets) == small.height


def test_a_proof_that_nothing_fits_without_help_of_the_live_sum() -> None:
    """The fixed buffer leaves 4 bytes below it, too few for the other one: 14 bytes where only 10 are alive."""
    problem = PackingProblem(buffers((0, 9, 4, 1, 4), (3, 9, 6)))
    assert max(live_bound(p) for p in split(problem)) == 10
    least = least_height(problem)
    result = pack(problem)
    assert result.proven and result.height == least == result.lower_bound
    below = pack(PackingProblem(problem.buffers, least - 1))
    assert below.height == least and below.lower_bound == least


def test_huge_numbers() -> None:
    big = 1 << 55
    result = pack(PackingProblem(buffers((-(10**25), 3, big), (0, 10**25, big + 1), (2, 10**30, big - 1))))
    assert result.height == 3 * big and result.proven


def test_a_time_limit_ends_the_search() -> None:
    problem = sliced(3, 200)
    pack(problem, nodes=1000)
    started = time.perf_counter()
    result = pack(problem, "max", time_limit=0.3)
    assert time.perf_counter() - started < 5 and validate(problem, result.offsets) == result.height


def test_senseless_problems_are_refused() -> None:
    for row, words in [
        ((3, 3, 1), "not before"),
        ((0, 1, -1), "size -1"),
        ((0, 1, 1, 0), "alignment 0"),
        ((0, 1, 1, 4, 6), "multiple of the alignment"),
        ((0, 1, 1, 1, -4), "offset -4"),
        ((0, 1, 1 << 61), "size"),
    ]:
        with pytest.raises(ValueError, match=words):
            PackingProblem(buffers(row))
    with pytest.raises(ValueError, match="fixed to the same bytes"):
        PackingProblem(buffers((0, 3, 4, 1, 0), (2, 5, 4, 1, 3)))
    with pytest.raises(ValueError, match="capacity"):
        PackingProblem([], -1)
    with pytest.raises(ValueError, match="effort"):
        pack(PackingProblem([]), "huge")


# -- the validator -------------------------------------------------------------------------------------------


def test_the_validator_names_what_is_wrong() -> None:
    problem = PackingProblem(buffers((0, 5, 10), (4, 8, 10), (5, 9, 10, 4), (20, 21, 3, 1, 6)))
    assert validate(problem, (0, 10, 0, 6)) == 20
    for offsets, words in [
        ((0, 9, 20, 6), r"'0' \[0, 10\) and '1' \[9, 19\) share bytes while both are alive at time 4"),
        ((0, 10, 20, 7), "fixed to 6"),
        ((0, 10, 22, 6), "alignment 4"),
        ((0, -10, 20, 6), "negative"),
        ((0, 10, 20), "3 offsets for 4"),
    ]:
        with pytest.raises(PackingError, match=words):
            validate(problem, offsets)
    with pytest.raises(PackingError, match="beyond the capacity 19"):
        validate(problem, (0, 10, 0, 6), 19)


# -- public problems -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list("ACDEGJK"))
def test_public_problems_fit(name: str) -> None:
    path = MINIMALLOC / f"{name}.{CAPACITY}.csv"
    if not path.is_file():
        pytest.skip("shared/data/minimalloc is not here")
    problem = read_csv(path)
    result = pack(problem)
    assert validate(problem, result.offsets, CAPACITY) == result.height
    assert result.nodes < 2_000_000


# -- compiled code -------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:overflow")
def test_plain_python_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the way taken where numba has no directory for its cache."""
    cases = [sliced(seed, cuts, shrink=0.01) for seed, cuts in ((1, 25), (2, 40))]
    compiled = [pack(p, nodes=3000) for p in cases]

    def njit(function: object = None, cache: bool = False) -> object:
        if cache or function is None:
            raise RuntimeError("cannot cache function")
        return function

    monkeypatch.setitem(sys.modules, "numba", SimpleNamespace(njit=njit))
    monkeypatch.setattr(kernel, "compiled", kernel.compiled.__wrapped__)
    monkeypatch.setattr(kernel, "_mix", _plain_mix)
    assert [pack(p, nodes=3000) for p in cases] == compiled
    assert any(c.nodes for c in compiled)


def _plain_mix(x: int) -> int:
    with np.errstate(over="ignore"):
        v = np.int64(x)
        v ^= (v >> np.int64(30)) & np.int64(0x3FFFFFFFF)
        v *= np.int64(-4658895280553007687)
        v ^= (v >> np.int64(27)) & np.int64(0x1FFFFFFFFF)
        v *= np.int64(-7723592293110705685)
        return v ^ ((v >> np.int64(31)) & np.int64(0x1FFFFFFFF))


def test_a_search_goes_on_where_it_stopped() -> None:
    part = max(split(sliced(5, 60)), key=lambda p: p.n)
    bound = live_bound(part)
    shared = search._Shared.of(part)
    assert shared is not None
    ranked = search._ranked(part, shared.sums, "TWC")
    whole, pieces = (search._Search(part, shared, ranked, bound) for _ in range(2))
    status = whole.run(3000, None)
    while pieces.run(7, None) == kernel.OUT_OF_NODES and pieces.nodes < whole.nodes:
        pass
    assert pieces.nodes == whole.nodes if status == kernel.FOUND else pieces.nodes >= 3000
    if status == kernel.FOUND:
        assert (whole.offsets() == pieces.offsets()).all()


def test_importing_it_leaves_numba_alone() -> None:
    code = "import sys, hlo_memopt.pack.solver; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
