"""Compile a step plainly and optimized, run both in turns, compare what they compute and how long they take."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from hlo_memopt.comparison import Comparison, compare
from hlo_memopt.demo.models import Demo
from hlo_memopt.errors import DonationLostError

_PAIRS = (4, 12)  # at least, at most
_SECONDS = 8.0  # no further pair after that
Stage = Callable[[str], contextlib.AbstractContextManager[None]]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of it.

    Attributes:
      comparison: XLA's figures for both compiles, and ours.
      donated: whether the carried arguments are donated, as training steps do (not where XLA would forget it).
      steps: how many steps each program ran, from equal arguments.
      different: where results differ by at least a bit after the last step, as paths; none: equal.
      repeatable: whether the plain program, run twice, gives the same bits; looked at only if something differs.
      arrays: how many arrays were compared.
      loss_before, loss_after: of the last step; None where the step has none.
      seconds_before, seconds_after: median of a step.
      ratio: median over pairs of runs of optimized / plain.
    """

    comparison: Comparison
    donated: bool
    steps: int
    different: tuple[str, ...]
    repeatable: bool
    arrays: int
    loss_before: float | None
    loss_after: float | None
    seconds_before: float
    seconds_after: float
    ratio: float


def run(demo: Demo, device: Any, stage: Stage) -> Outcome:
    """Compile and run a demo on a device; ``stage`` is entered around each part of the work."""
    donate = tuple(range(demo.carried))
    with jax.default_device(device):
        with stage("compiling plain and optimized"):
            comparison = compare(demo.step, *demo.args, platform=device.platform, donate_argnums=donate)
            if isinstance(comparison.error, DonationLostError):
                donate = ()
                comparison = compare(demo.step, *demo.args, platform=device.platform)
        with stage("running both in turns"):
            plain, optimized = _Runner(comparison.compiled_before, demo), _Runner(comparison.compiled_after, demo)
            ratios = _in_turns(plain, optimized)
        results = plain.host(), optimized.host()
        different = _different(*results)
        repeatable = True
        if different:
            with stage("running the plain step again, to see whether it repeats its bits"):
                again = _Runner(comparison.compiled_before, demo)
                for _ in range(plain.steps):
                    again.step()
                repeatable = not _different(results[0], again.host())
    losses = [float(r[-1]) if demo.carried else None for r in results]
    return Outcome(
        comparison=comparison,
        donated=bool(donate),
        steps=plain.steps,
        different=different,
        repeatable=repeatable,
        arrays=len(jax.tree.leaves(results[0])),
        loss_before=losses[0],
        loss_after=losses[1],
        seconds_before=statistics.median(plain.seconds[1:]),
        seconds_after=statistics.median(optimized.seconds[1:]),
        ratio=statistics.median(ratios),
    )


class _Runner:
    """One executable with its own arguments, which go on from step to step."""

    def __init__(self, compiled: Any, demo: Demo) -> None:
        self._compiled = compiled
        self._carried = demo.carried
        self._args = jax.tree.map(lambda a: jax.device_put(np.array(a)), demo.args)
        self._results: Any = None
        self.seconds: list[float] = []

    @property
    def steps(self) -> int:
        return len(self.seconds)

    def step(self) -> float:
        """Run a step; its seconds."""
        started = time.perf_counter()
        self._results = jax.block_until_ready(self._compiled(*self._args))
        self.seconds.append(time.perf_counter() - started)
        if self._carried:
            self._args = (*self._results[: self._carried], *self._args[self._carried :])
        return self.seconds[-1]

    def host(self) -> Any:
        """The results of the last step, as numpy arrays."""
        return jax.tree.map(np.asarray, self._results)


def _in_turns(plain: _Runner, optimized: _Runner) -> list[float]:
    """Run pairs of steps, each first as often as the other; optimized / plain of every pair but the first."""
    ratios: list[float] = []
    started = time.perf_counter()
    for pair in range(1 + _PAIRS[1]):
        if pair % 2:
            after, before = optimized.step(), plain.step()
        else:
            before, after = plain.step(), optimized.step()
        if pair:
            ratios.append(after / before)
        if len(ratios) >= _PAIRS[0] and not len(ratios) % 2 and time.perf_counter() - started > _SECONDS:
            break
    return ratios


def _different(a: Any, b: Any) -> tuple[str, ...]:
    """Paths of the arrays in which two results differ, bit by bit."""
    return tuple(
        jax.tree_util.keystr(path)
        for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True)
        if x.dtype != y.dtype or x.shape != y.shape or x.tobytes() != y.tobytes()
    )
