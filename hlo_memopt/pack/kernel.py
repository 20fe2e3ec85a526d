"""The inner loop of the packing search: depth-first over canonical packings, compiled with numba.

Method: Moffitt & Fernando, "MiniMalloc: A Lightweight Memory Allocator for Hardware-Accelerated Machine Learning",
ASPLOS 2023. Buffers are placed in nondecreasing order of offset, each at the lowest offset above everything placed that
is alive with it. A place is cut off where

- a slot (a time at which a maximal set of buffers is alive) can no longer hold what is left for it: its buffers, each
  from its own lowest offset on, one behind the other, end above the capacity;
- another buffer would fit entirely below it (with that buffer moved down the packing is as good, and tried elsewhere);
- its twin, equal in slots, size and alignment, with a lower number is still to be placed.

Once no unplaced buffer crosses a time, what lies before and behind is searched apart, and a part that fails takes back
the placement that split it off. A part that failed before is not searched again: a table keeps hashes of its unplaced
buffers and their lowest offsets (two words, 104 bits: a confusion would need some 10^15 states).

Everything lives in arrays, the recursion too, so a search stops after any number of nodes and goes on later. Buffers
are numbered in the order in which the search prefers them among equal offsets. All sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from hlo_memopt import native

OUT_OF_NODES, FOUND, EXHAUSTED, OUT_OF_TRAIL = range(4)
# columns of a frame, which stands for the choice of one placement in one part
LOW, HIGH, BEGIN, END, LEAST, LEAST_ID, BACK, NEXT, AT, AT_ID, ROOF, PLACED, TRAIL, PARTS, KEY, CHECK = range(16)
FRAME_COLUMNS = 16
# columns of a part, which are the first ones of its frame: slots [LOW, HIGH), buffers order[BEGIN:END], the placement
# that later ones must not come before (LEAST, LEAST_ID), the frame that a failure goes to, the next part
PART_COLUMNS = 8
# control words
DEPTH, TRAIL_LENGTH, PART_COUNT, ENTER, NODES = range(5)
CONTROL_WORDS = 5
FAR = 1 << 62


def _mix(x: int) -> int:
    """64 bits to 64 bits, well spread (finalizer of SplitMix64, Steele et al. 2014), kept in int64."""
    x ^= (x >> 30) & 0x3FFFFFFFF
    x *= -4658895280553007687
    x ^= (x >> 27) & 0x1FFFFFFFFF
    x *= -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def _search(
    first, last, size, limit, alignment, fixed, twin, near_start, near, slot_start, slot_buffers,
    offset, low, slot_floor, slot_total, cut, order, frames, parts, trail_what, trail_old, queue, control,
    memo_key, memo_check, memo_least, memo_id, ceiling, budget,
):  # fmt: skip
    """Go on searching for a packing whose slots end at most at ``ceiling``; one of the status words."""
    depth, trail_n, parts_n = control[DEPTH], control[TRAIL_LENGTH], control[PART_COUNT]
    enter = control[ENTER]
    mask = len(memo_key) - 1
    stop = control[NODES] + budget
    nodes = control[NODES]
    any_fixed = fixed.max() >= 0
    status = OUT_OF_NODES
    while True:
        frame = frames[depth]
        begin, end = frame[BEGIN], frame[END]
        chosen = -1
        if enter:
            if nodes >= stop:
                break
            top = FAR
            key, check = 0, 0
            least = frame[LEAST]
            for k in range(begin, end):
                b = order[k]
                at = low[b]
                top = min(top, at + (size[b] if fixed[b] < 0 else 1))
                if mask:
                    h = _mix((b << 44) ^ (at if at >= least else 1 << 43))
                    key += h
                    check ^= (h * 0x2545F4914F6CDD1D) >> 13
            frame[ROOF] = top
            frame[AT], frame[AT_ID] = least, frame[LEAST_ID] - 1
            frame[KEY], frame[CHECK] = key, check
            enter = 0
            if mask:
                slot = (key ^ (key >> 31)) & mask
                earlier = memo_least[slot] < least or (memo_least[slot] == least and memo_id[slot] <= frame[LEAST_ID])
                if earlier and memo_key[slot] == key and memo_check[slot] == check:
                    frame[ROOF] = -1
        at, at_id, top = frame[AT], frame[AT_ID], frame[ROOF]
        best, best_k = top, -1
        for k in range(begin, end):
            b = order[k]
            o = low[b]
            if o > best or o >= top or o < at or (o == at and b <= at_id) or (o == best and b > chosen):
                continue
            if twin[b] >= 0 and offset[twin[b]] < 0:
                continue
            if any_fixed and fixed[b] < 0:
                blocked = False
                for q in range(near_start[b], near_start[b + 1]):
                    u = near[q]
                    if fixed[u] >= 0 and offset[u] < 0 and fixed[u] < o + size[b]:
                        blocked = True
                        break
                if blocked:
                    continue
            best, chosen, best_k = o, b, k
        if chosen < 0:
            if mask and top >= 0:
                slot = (frame[KEY] ^ (frame[KEY] >> 31)) & mask
                memo_key[slot], memo_check[slot] = frame[KEY], frame[CHECK]
                memo_least[slot], memo_id[slot] = frame[LEAST], frame[LEAST_ID]
            back = frame[BACK]
            if back < 0:
                status = EXHAUSTED
                break
            for d in range(depth - 1, back - 1, -1):
                b = frames[d, PLACED]
                offset[b] = -1
                for s in range(first[b], last[b]):
                    slot_total[s] += size[b]
                    if s + 1 < last[b]:
                        cut[s] += 1
            depth = back
            while trail_n > frames[depth, TRAIL]:
                trail_n -= 1
                if trail_what[trail_n] >= 0:
                    low[trail_what[trail_n]] = trail_old[trail_n]
                else:
                    slot_floor[-1 - trail_what[trail_n]] = trail_old[trail_n]
            parts_n = frames[depth, PARTS]
            continue
        if trail_n + near_start[chosen + 1] - near_start[chosen] + len(slot_total) > len(trail_what):
            status = OUT_OF_TRAIL
            break
        nodes += 1
        b = chosen
        frame[AT], frame[AT_ID], frame[PLACED], frame[TRAIL], frame[PARTS] = best, b, b, trail_n, parts_n
        offset[b] = best
        top = best + size[b]
        touched, touched_end = first[b], last[b]
        fits = True
        for q in range(near_start[b], near_start[b + 1]):
            u = near[q]
            if offset[u] >= 0 or low[u] >= top:
                continue
            trail_what[trail_n], trail_old[trail_n] = u, low[u]
            trail_n += 1
            up = top
            if alignment[u] > 1:
                up = (top + alignment[u] - 1) // alignment[u] * alignment[u]
            low[u] = up
            if up > limit[u]:
                fits = False
                break
            touched, touched_end = min(touched, first[u]), max(touched_end, last[u])
        split = False
        for s in range(first[b], last[b]):
            slot_total[s] -= size[b]
            if s + 1 < last[b]:
                cut[s] -= 1
                if cut[s] == 0:
                    split = True
        if fits:
            for s in range(touched, touched_end):
                if slot_total[s] == 0:
                    continue
                lowest, highest = FAR, best
                for q in range(slot_start[s], slot_start[s + 1]):
                    u = slot_buffers[q]
                    if offset[u] < 0:
                        lowest, highest = min(lowest, low[u]), max(highest, low[u])
                if lowest > slot_floor[s]:
                    trail_what[trail_n], trail_old[trail_n] = -1 - s, slot_floor[s]
                    trail_n += 1
                    slot_floor[s] = lowest
                if highest + slot_total[s] > ceiling:  # one behind the other, each from its own lowest offset on
                    count = 0
                    for q in range(slot_start[s], slot_start[s + 1]):
                        u = slot_buffers[q]
                        if offset[u] < 0:
                            k = count
                            while k > 0 and low[queue[k - 1]] > low[u]:
                                queue[k] = queue[k - 1]
                                k -= 1
                            queue[k] = u
                            count += 1
                    up = best
                    for k in range(count):
                        up = max(up, low[queue[k]]) + size[queue[k]]
                    if up > ceiling:
                        fits = False
                        break
            for s in range(frame[LOW], frame[HIGH]):
                if slot_total[s] > 0 and max(slot_floor[s], best) + slot_total[s] > ceiling:
                    fits = False
                    break
        if not fits:
            offset[b] = -1
            for s in range(first[b], last[b]):
                slot_total[s] += size[b]
                if s + 1 < last[b]:
                    cut[s] += 1
            while trail_n > frame[TRAIL]:
                trail_n -= 1
                if trail_what[trail_n] >= 0:
                    low[trail_what[trail_n]] = trail_old[trail_n]
                else:
                    slot_floor[-1 - trail_what[trail_n]] = trail_old[trail_n]
            continue
        order[best_k] = order[end - 1]
        order[end - 1] = b
        end -= 1
        following = frame[NEXT]
        child = frames[depth + 1]
        if end > begin and not split and slot_total[first[b]] > 0 and slot_total[last[b] - 1] > 0:
            child[LOW], child[HIGH], child[BEGIN], child[END] = frame[LOW], frame[HIGH], begin, end
            child[LEAST], child[LEAST_ID], child[BACK], child[NEXT] = best, b, depth, following
            depth += 1
            enter = 1
            continue
        # split what is left at the slots that nothing crosses
        at_slot, part_begin = frame[LOW], begin
        while at_slot < frame[HIGH]:
            stop_slot = at_slot + 1
            while stop_slot < frame[HIGH] and cut[stop_slot - 1] > 0:
                stop_slot += 1
            if slot_total[at_slot] > 0:
                part_end = part_begin
                for k in range(part_begin, end):
                    u = order[k]
                    if first[u] >= at_slot and first[u] < stop_slot:
                        order[k] = order[part_end]
                        order[part_end] = u
                        part_end += 1
                part = parts[parts_n]
                part[LOW], part[HIGH], part[BEGIN], part[END] = at_slot, stop_slot, part_begin, part_end
                part[LEAST], part[LEAST_ID], part[BACK], part[NEXT] = best, b, depth, following
                following = parts_n
                parts_n += 1
                part_begin = part_end
            at_slot = stop_slot
        if following < 0:
            status = FOUND
            break
        for c in range(PART_COLUMNS):
            child[c] = parts[following, c]
        depth += 1
        enter = 1
    control[DEPTH], control[TRAIL_LENGTH], control[PART_COUNT] = depth, trail_n, parts_n
    control[ENTER], control[NODES] = enter, nodes
    return status


@cache
def compiled() -> Callable[..., Any]:
    """`_search`, compiled."""
    return native.compiled(_search, [_mix])
