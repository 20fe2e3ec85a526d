"""Bring a good order back towards the given one, so that nothing is moved without need.

The third objective, after the peak and the area near it. Two means, in turn:

- Segments: the nodes of a stretch of the order, sorted as given, are in topological order too. Where that costs no
  more it is taken; else the stretch is divided, at its highest step or in the middle, and each part is tried.
- Pulls: going through the order, the first of the nodes left, in the given sequence, is pulled to the front of what
  is left if all steps that it passes can bear it; if not, it waits until the last of those that cannot is behind. The
  same from the end pushes nodes back.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from hlo_memopt.schedule.flat import Flat
from hlo_memopt.schedule.pulls import Limits, Pulls, Spans, area_above

# Work is counted in nodes passed over (about 2 microseconds); a segment costs that many at least, and one more for so
# many of its steps.
_SEGMENT, _SEGMENT_STEPS = 40, 8
# what may be spent: so much, or so much a node
_LEAST, _A_NODE = 300_000, 12
# segments shorter than this are left to the pulls
_SHORT = 16
_PASSES = 8


def nearest(flat: Flat, order: np.ndarray, peak: int, near: float = 0.9, budget: int | None = None) -> np.ndarray:
    """``order`` brought closer to the given order 0..n-1: as many inversions against it or fewer, at no more bytes.

    The result's profile stays within ``peak`` bytes (ValueError if that of ``order`` does not), and its area above
    ``near`` * ``peak`` bytes (rounded down) within that of ``order``. If the given order does so, it is the result;
    the problem may have precedence that the given order breaks. ``budget``: work that may be spent (`default_budget`
    if None), in nodes passed over; with less of it the same is done, but not to the end.
    """
    work = default_budget(flat) if budget is None else budget
    return _approach(flat, order, Limits(peak, int(near * peak), 0, work))


def nearest_accepted(
    flat: Flat,
    order: np.ndarray,
    peak: int,
    accepts: Callable[[np.ndarray], bool],
    near: float = 0.9,
    tries: int = 6,
) -> np.ndarray:
    """`nearest`, but only as far as ``accepts`` says yes: how far is found by bisection of the work, in ``tries``.

    ``accepts`` may cost more than the profile: the heap may not pack as well. ``order`` itself is not asked for.
    """
    budget = default_budget(flat)
    limits = Limits(peak, int(near * peak), 0, budget)
    found = _approach(flat, order, limits)
    if accepts(found):
        return found
    best = np.array(order, dtype=np.int64)
    least, most = 0, budget - limits.work
    for _ in range(tries):
        middle = (least + most) // 2
        found = nearest(flat, order, peak, near, middle)
        if accepts(found):
            best, least = found, middle
        else:
            most = middle
    return best


def default_budget(flat: Flat) -> int:
    """Work for a second or less up to 25,000 nodes, for two or three seconds at 100,000."""
    return max(_LEAST, _A_NODE * flat.n)


def _approach(flat: Flat, order: np.ndarray, limits: Limits) -> np.ndarray:
    """Segments, then pulls from both ends in turn, until neither moves anything."""
    best = np.array(order, dtype=np.int64)
    if flat.n == 0:
        return best
    profile = flat.profile(best)
    if int(profile.max()) > limits.peak:
        raise ValueError(f"the order's peak is {int(profile.max())} bytes, more than {limits.peak}")
    most = area_above(profile, limits.line)

    def keep(new: np.ndarray) -> None:
        """Segments and pulls do not see it all: a buffer that nothing touches counts at whatever step is first."""
        nonlocal best, profile
        steps = flat.profile(new)
        if int(steps.max()) <= limits.peak and area_above(steps, limits.line) <= most:
            best, profile = new, steps

    keep(_sort_segments(flat, best, limits))
    spans = Spans.of(flat)
    mirrored = spans.mirrored()
    number = idle = 0
    while number < _PASSES and idle < 2 and limits.work > 0:
        limits.slack = most - area_above(profile, limits.line)
        if number % 2:
            pulls = Pulls(mirrored, _mirrored(best), profile[::-1], limits)
            keep(_mirrored(pulls.run()))
        else:
            pulls = Pulls(spans, best, profile, limits)
            keep(pulls.run())
        idle = 0 if pulls.moved else idle + 1
        number += 1
    return best


def _mirrored(order: np.ndarray) -> np.ndarray:
    """The same order from its end, with node v as n - 1 - v."""
    return len(order) - 1 - order[::-1]


def _sort_segments(flat: Flat, order: np.ndarray, limits: Limits, base: int = 0) -> np.ndarray:
    """``order`` with stretches of it sorted, the longest that can be. ``base``: bytes alive all along."""
    n = flat.n
    given = np.arange(n)
    if limits.work <= 0 or (order == given).all():
        return order
    limits.work -= _SEGMENT + n // _SEGMENT_STEPS
    profile, wanted = flat.profile(order) + base, flat.profile(given) + base
    if int(wanted.max()) <= limits.peak and (flat.edge_from < flat.edge_to).all():
        more = area_above(wanted, limits.line) - area_above(profile, limits.line)
        if more <= limits.slack:
            limits.slack -= more
            return given
    if n < _SHORT:
        return order
    at = int(np.argmax(profile))
    cuts = [0, at, at + 1, n] if n // 8 <= at < n - n // 8 else [0, n // 2, n]
    order = order.copy()
    before = np.zeros(n, dtype=bool)
    for low, high in pairwise(cuts):
        if high - low > 1:
            nodes = np.sort(order[low:high])
            part, beside = flat.part(before, nodes)
            local = np.searchsorted(nodes, order[low:high])
            order[low:high] = nodes[_sort_segments(part, local, limits, base + beside)]
        before[order[low:high]] = True
    return order
