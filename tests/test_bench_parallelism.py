"""Widths that can be worked out by hand."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from hlo_memopt.hlo.graph import Module
from hlo_memopt.hlo.read import read_bytes
from hlo_memopt.liveness.dataflow import Dataflow
from hlo_memopt.pack.assignment import simulate
from hlo_memopt.platforms import platform

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.parallelism import Range, Step, assigned, critical_path, entry_steps, unshared, width

A, B = Range("a", 0, 100), Range("b", 0, 100)
LOW, MIDDLE, HIGH = Range("a", 0, 50), Range("a", 25, 75), Range("a", 50, 100)

# Two chains. Until b2 writes it, the place of result b2 is idle, and a1 lies there: b2 waits for a1 and a2.
CHAINS = """HloModule chains, is_scheduled=true

ENTRY e {
  p = f32[256]{0} parameter(0)
  a1 = f32[256]{0} reverse(p), dimensions={0}
  a2 = f32[256]{0} reverse(a1), dimensions={0}
  b1 = f32[256]{0} reverse(p), dimensions={0}
  b2 = f32[256]{0} reverse(b1), dimensions={0}
  ROOT t = (f32[256]{0}, f32[256]{0}) tuple(a2, b2)
}
"""

LOOP = """HloModule loop, is_scheduled=true

condition {
  cs = (s32[], f32[256]{0}) parameter(0)
  ci = s32[] get-tuple-element(cs), index=0
  ten = s32[] constant(10)
  ROOT less = pred[] compare(ci, ten), direction=LT
}

body {
  bs = (s32[], f32[256]{0}) parameter(0)
  bi = s32[] get-tuple-element(bs), index=0
  bx = f32[256]{0} get-tuple-element(bs), index=1
  one = s32[] constant(1)
  next = s32[] add(bi, one)
  turned = f32[256]{0} negate(bx)
  ROOT bt = (s32[], f32[256]{0}) tuple(next, turned)
}

ENTRY e {
  p = f32[256]{0} parameter(0)
  zero = s32[] constant(0)
  start = s32[] copy(zero)
  x = f32[256]{0} copy(p)
  s = (s32[], f32[256]{0}) tuple(start, x)
  ROOT w = (s32[], f32[256]{0}) while(s), condition=condition, body=body, \
backend_config={"known_trip_count":{"n":"10"}}
}
"""


def step(reads: list[Range], writes: list[Range], size: int = 1) -> Step:
    return Step(reads, writes, size, 1)


@pytest.mark.parametrize(
    ("steps", "path"),
    [
        ([], 0),
        ([step([], [A], 5)], 5),
        ([step([], [A], 5), step([], [B], 3)], 5),  # nothing in common
        ([step([], [A], 5), step([A], [B], 3)], 8),  # read after write
        ([step([A], [], 5), step([], [A], 3)], 8),  # write after read
        ([step([], [A], 5), step([], [A], 3)], 8),  # write after write
        ([step([A], [], 5), step([A], [], 3)], 5),  # two readers
        ([step([], [LOW], 5), step([HIGH], [], 3)], 5),  # side by side in one allocation
        ([step([], [LOW], 5), step([MIDDLE], [], 3)], 8),
        ([step([], [LOW], 5), step([], [HIGH], 4), step([MIDDLE], [B], 3), step([B], [LOW], 2)], 10),
        ([step([], [A], 9), step([], [B], 1), step([B], [LOW], 1), step([B], [], 7)], 10),
        ([step([A], [A], 2), step([A], [A], 2), step([A], [A], 2)], 6),  # in place
        ([step([Range("a", 7, 7)], [], 2), step([], [A], 2)], 2),  # no bytes
    ],
)
def test_critical_paths(steps: list[Step], path: int) -> None:
    assert critical_path(steps, [s.size for s in steps]) == path


def test_critical_path_is_the_longest_of_the_conflict_graph() -> None:
    def meet(one: list[Range], other: list[Range]) -> bool:
        return any(a.allocation == b.allocation and a.low < b.high and b.low < a.high for a in one for b in other)

    for seed in range(200):
        rng = random.Random(seed)

        def ranges(most: int, rng: random.Random = rng) -> list[Range]:
            bounds = [sorted(rng.sample(range(12), 2)) for _ in range(rng.randrange(most))]
            return [Range(rng.choice("ab"), low, high) for low, high in bounds]

        steps = [step(ranges(4), ranges(3), rng.randint(1, 9)) for _ in range(15)]
        done: list[int] = []
        for j, late in enumerate(steps):
            waits = [
                done[i]
                for i, s in enumerate(steps[:j])
                if meet(s.writes, late.reads + late.writes) or meet(s.reads, late.writes)
            ]
            done.append(late.size + max(waits, default=0))
        assert critical_path(steps, [s.size for s in steps]) == max(done)


def test_width_is_work_over_critical_path() -> None:
    steps = [step([], [A], 6), step([], [B], 2), step([B], [], 2)]
    assert width(steps) == (10 / 6, 3 / 2)
    assert width([]) == (1.0, 1.0)


def steps_of(text: str) -> tuple[list[Step], list[Step]]:
    """As assigned, and with each buffer in memory of its own."""
    module = Module.from_bytes(read_bytes(text.encode(), "text").module)
    dataflow = Dataflow(module, platform("cpu"))
    schedule = module.schedule
    places = (assigned(dataflow, simulate(dataflow, schedule)), unshared(dataflow))
    together, apart = (entry_steps(dataflow, schedule, place) for place in places)
    return together, apart


def test_reuse_orders_what_dataflow_does_not() -> None:
    together, apart = steps_of(CHAINS)
    assert [s.size for s in together] == [2048] * 4  # free instructions are left out
    assert width(apart) == (2.0, 2.0)
    assert width(together) == (4 / 3, 4 / 3)


def test_a_loop_does_what_its_body_does_as_often_as_it_runs() -> None:
    together, _ = steps_of(LOOP)
    assert [s.number for s in together] == [1, 1, 30]
    # compare: two numbers, a byte; add: three numbers; negate: 1 KiB read and written
    assert together[-1].size == 10 * (9 + 12 + 2048)
    assert critical_path(together, [s.number for s in together]) == 31
