"""Local search on an order, for irregular graphs where cuts leave a gap to the bound.

A move takes a node across a stretch of the order to an earlier or a later place and drags along whatever has to keep
its side of the node: its ancestors on that stretch (earlier) or its descendants (later). Every such order is a
schedule, and single nodes, chains and whole branches all move this way.

Only the stretch is evaluated anew, from its end to its beginning: what is alive behind it does not depend on its inner
order, and the first touch of a buffer seen from behind is its last use. Reuse is counted as in `Flat.profile`.

The search looks for an order below a level, half a percent under the best peak so far. What a stretch costs is the
sum over its steps of the bytes above the level; a move is taken unless it adds more than a random slack, whose range
falls to zero in the course of a round (threshold accepting, Dueck & Scheuer 1990). Two rounds of three start from the
best order, the third from the given one, to find another way. All arithmetic is on integers, and random numbers are
Marsaglia's 32-bit xorshift (2003) from a fixed seed, so every machine finds the same order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from hlo_memopt.native import compiled
from hlo_memopt.schedule.divide import passed
from hlo_memopt.schedule.flat import Flat

_ROUNDS = 8  # at least; longer searches have more
_ROUND_WORK, _ROUND_WORK_NODE = 4_000_000, 1_000  # most work of a round: the larger of this and this a node
_AGAIN = 3  # every third round starts from the given order once more
_LEVEL = 200  # the level is 1/200 of the peak below the best peak
_SLACK = 10  # slack of up to 1/10 of the peak at the start of a round
_FOCUS = 70  # percent of moves made around a step above the level
_NEAR, _FAR, _FAR_ONE_IN = 32, 1000, 16  # longest distances; one move in 16 may go far
_BLOCK = 64  # steps whose largest usage is kept

Ints = np.ndarray


def improve_local(
    flat: Flat, order: np.ndarray, bound: int, moves: int, deadline: float | None = None
) -> np.ndarray:
    """An order whose peak is at most that of ``order``, and lower where local search finds the way.

    Args:
      order: a topological order of the nodes.
      bound: bytes; the search ends within 0.1% of it.
      moves: work to be spent, in steps evaluated or passed over; a million takes some 20 ms.
      deadline: time.perf_counter; looked at between rounds (at most 4 million or 1,000 a node of the work).
    """
    given = np.array(order, dtype=np.int64)
    target = bound + bound // 1000
    if flat.n < 2 or moves <= 0:
        return given
    peak = before = int(flat.profile(given).max())
    if peak <= target or peak * max(flat.n, 1024) >= 1 << 62:  # int64 has no room for sums over the steps
        return given
    try:
        _compiled()
    except ImportError as error:  # a numba that does not fit this numpy must not cost the plan
        logging.getLogger("hlo_memopt").debug("no local search: %s", error)
        return given
    search = _Search(flat)
    best = given
    size = max(1, min(moves // _ROUNDS, max(_ROUND_WORK, _ROUND_WORK_NODE * flat.n)))
    rounds = 0
    while peak > target and moves > 0 and not passed(deadline):
        rounds += 1
        found, low, spent = search.round(best if rounds % _AGAIN else given, target, min(moves, size))
        moves -= spent
        if low < peak:
            best, peak = found, low
    return best if int(flat.profile(best).max()) < before else given


class _Search:
    """A problem's arrays by node, and the random numbers."""

    def __init__(self, flat: Flat) -> None:
        n, m = flat.n, len(flat.size)
        made = flat.producer >= 0
        out = np.zeros(n, dtype=np.int64)
        np.add.at(out, flat.producer[made], flat.size[made])
        pair = np.unique(flat.use_node * m + flat.use_buffer)
        reuse = np.argsort(flat.reuse_node, kind="stable")
        self._arrays = (
            *_by_node(flat.edge_to, flat.edge_from, n),
            *_by_node(flat.edge_from, flat.edge_to, n),
            *_by_node(pair // max(m, 1), pair % max(m, 1), n),
            *_by_node(flat.reuse_node, flat.reuse_from, n),
            flat.reuse_to[reuse],
            out, flat.transient, flat.size, flat.live_out,
        )  # fmt: skip
        self._random = np.array([2463534242], dtype=np.int64)

    def round(self, order: Ints, target: int, work: int) -> tuple[Ints, int, int]:
        """The best order found, its peak, and the work spent (at least 1)."""
        return _compiled()(*self._arrays, order, target, work, self._random)


def _by_node(node: Ints, value: Ints, n: int) -> tuple[Ints, Ints]:
    """The values of each node, in the given sequence: node v has those at start[v]..start[v + 1]."""
    start = np.zeros(n + 1, dtype=np.int64)
    start[1:] = np.cumsum(np.bincount(node, minlength=n))
    return start, value[np.argsort(node, kind="stable")]


# -- compiled by numba ------------------------------------------------------------------------------------------------


def _draw(random: Ints, k: int) -> int:
    """A random number below ``k``."""
    x = random[0]
    x ^= (x << 13) & 0xFFFFFFFF
    x ^= x >> 17
    x ^= (x << 5) & 0xFFFFFFFF
    random[0] = x
    return (x >> 1) % k


def _distance(random: Ints, most: int) -> int:
    """A random distance from 1 to ``most`` (>= 1), every power of two as likely."""
    bits = 1
    while 1 << bits <= most:
        bits += 1
    power = 1 << _draw(random, bits)
    return min(power + _draw(random, power), most)


def _high_step(usage: Ints, block_max: Ints, level: int, start: int) -> int:
    """The first step from ``start`` on, then from 0 on, whose usage is above the level."""
    n = len(usage)
    k = start
    for _ in range(n + 1):
        if block_max[k // _BLOCK] <= level:
            k = (k // _BLOCK + 1) * _BLOCK
        elif usage[k] > level:
            return k
        else:
            k += 1
        if k >= n:
            k = 0
    return start


def _drag(
    order: Ints, low: int, high: int, later: bool, start: Ints, near: Ints, mark: Ints, stamp: int, new: Ints
) -> int:
    """Puts the nodes of [low, high) into ``new`` with one of them moved across the others; how many moved.

    The first goes later, along with its descendants there, or the last goes earlier with its ancestors; ``start`` and
    ``near`` are successors or predecessors by node. Both groups keep their sequence. ``mark`` is for own use.
    """
    mark[order[low] if later else order[high - 1]] = stamp
    moved = 0
    for i in range(high - low):
        v = order[low + i] if later else order[high - 1 - i]
        if mark[v] == stamp:
            moved += 1
            for q in range(start[v], start[v + 1]):
                mark[near[q]] = stamp
    move_to, stay_to = (high - low - moved, 0) if later else (0, moved)
    for k in range(low, high):
        v = order[k]
        if mark[v] == stamp:
            new[move_to] = v
            move_to += 1
        else:
            new[stay_to] = v
            stay_to += 1
    return moved


def _measure(
    nodes: Ints, low: int, high: int, live: int, first: int, level: int, limit: int,
    use_start: Ints, uses: Ints, reuse_start: Ints, reuse_from: Ints, reuse_to: Ints,
    out: Ints, transient: Ints, size: Ints, last: Ints, new_last: Ints, seen: Ints, stamp: int,
    usage: Ints, after: Ints,
) -> int:  # fmt: skip
    """What ``nodes`` cost at [low, high), ``live`` bytes being alive behind them; -1 as soon as it is above ``limit``.

    ``first``: bytes in use at the first step only (buffers that are there from the start and that nobody reads).
    Fills ``usage`` and ``after`` (bytes alive behind each step), and ``new_last`` for the buffers touched. A stamp
    marks a buffer in ``seen``: column 0, touched; 1, taken over; 2, served.
    """
    cost = 0
    for k in range(high - low - 1, -1, -1):
        v = nodes[k]
        dying = 0
        for q in range(use_start[v], use_start[v + 1]):
            b = uses[q]
            if seen[b, 0] != stamp:
                seen[b, 0] = stamp
                new_last[b] = last[b]
                if last[b] < high:
                    new_last[b] = low + k
                    dying += size[b]
        use = live + dying + transient[v]
        if low + k == 0:
            use += first
        for q in range(reuse_start[v], reuse_start[v + 1]):
            b, c = reuse_from[q], reuse_to[q]
            if seen[b, 0] == stamp and new_last[b] == low + k and seen[b, 1] != stamp and seen[c, 2] != stamp:
                seen[b, 1] = stamp
                seen[c, 2] = stamp
                use -= size[c]
        usage[k] = use
        after[k] = live
        live += dying - out[v]
        if use > level:
            cost += use - level
            if cost > limit:
                return -1
    return cost


def _round(
    pred_start: Ints, preds: Ints, succ_start: Ints, succs: Ints, use_start: Ints, uses: Ints,
    reuse_start: Ints, reuse_from: Ints, reuse_to: Ints, out: Ints, transient: Ints, size: Ints, live_out: Ints,
    given: Ints, target: int, work: int, random: Ints,
) -> tuple[Ints, int, int]:  # fmt: skip
    """One round from the order ``given``: the best order, its peak, the work spent. Ends at the peak ``target``."""
    n, m = len(given), len(size)
    order = given.copy()
    last = np.full(m, -1, dtype=np.int64)  # the step of each buffer's last use, n if it is live out
    for k in range(n):
        for q in range(use_start[order[k]], use_start[order[k] + 1]):
            last[uses[q]] = k
    first, end = 0, 0  # bytes in use at the first step only, bytes alive at the end
    for b in range(m):
        if live_out[b]:
            last[b] = n
            end += size[b]
        elif last[b] < 0:
            first += size[b]
    new_last = np.zeros(m, dtype=np.int64)
    seen = np.zeros((m, 3), dtype=np.int64)
    usage: Ints = np.zeros(n, dtype=np.int64)
    after: Ints = np.zeros(n, dtype=np.int64)
    _measure(
        order, 0, n, end, first, 0, 1 << 62, use_start, uses, reuse_start, reuse_from, reuse_to,
        out, transient, size, last, new_last, seen, 1, usage, after,
    )  # fmt: skip
    block_max: Ints = np.zeros((n + _BLOCK - 1) // _BLOCK, dtype=np.int64)
    for i in range(len(block_max)):
        block_max[i] = usage[i * _BLOCK : (i + 1) * _BLOCK].max()
    best, peak = order.copy(), block_max.max()
    level = peak - max(1, peak // _LEVEL)
    new, new_usage, new_after = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    mark = np.zeros(n, dtype=np.int64)
    stamp = 1
    spent = n
    while spent < work and peak > target:
        stamp += 1
        spent += 4 + n // (4 * _BLOCK)  # what a move costs besides its stretch
        far = min(n - 1, _FAR if _draw(random, _FAR_ONE_IN) == 0 else _NEAR)
        at = _draw(random, n)
        if _draw(random, 100) < _FOCUS:
            at = _high_step(usage, block_max, level, at)
        # a node at this step or on one side of it goes to the other side, or some way in that direction
        i, later = at, _draw(random, 2) == 0
        if _draw(random, 4):
            i = max(0, at - _distance(random, far)) if later else min(n - 1, at + _distance(random, far))
        origin = at if _draw(random, 2) else i
        if later:
            low, high = i, min(n - 1, origin + _distance(random, far)) + 1
            moved = _drag(order, low, high, True, succ_start, succs, mark, stamp, new)
        else:
            low, high = max(0, origin - _distance(random, far)), i + 1
            moved = _drag(order, low, high, False, pred_start, preds, mark, stamp, new)
        spent += high - low
        if moved == high - low:
            continue  # nothing to go past
        begin = low
        while new[low - begin] == order[low]:
            low += 1
        while new[high - 1 - begin] == order[high - 1]:
            high -= 1
        old = 0
        for k in range(low, high):
            old += max(0, usage[k] - level)
        most = peak // _SLACK * ((work - spent) * 1024 // work) // 1024
        slack = (most + 1) * _draw(random, 1024) // 1024
        cost = _measure(
            new[low - begin : high - begin], low, high, after[high - 1], first, level, old + slack,
            use_start, uses, reuse_start, reuse_from, reuse_to,
            out, transient, size, last, new_last, seen, stamp, new_usage, new_after,
        )  # fmt: skip
        if cost < 0:
            continue
        for k in range(low, high):
            order[k] = v = new[k - begin]
            usage[k], after[k] = new_usage[k - low], new_after[k - low]
            for q in range(use_start[v], use_start[v + 1]):
                last[uses[q]] = new_last[uses[q]]
        for i in range(low // _BLOCK, (high - 1) // _BLOCK + 1):
            block_max[i] = usage[i * _BLOCK : (i + 1) * _BLOCK].max()
        if old > 0 and block_max.max() < peak:
            best[:] = order
            peak = block_max.max()
            level = peak - max(1, peak // _LEVEL)
    return best, peak, spent


_HELPERS = (_draw, _distance, _high_step, _drag, _measure)


@cache
def _compiled() -> Callable[..., Any]:
    return compiled(_round, _HELPERS)
