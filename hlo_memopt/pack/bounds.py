"""A height, in bytes, that no packing can stay below."""

from __future__ import annotations

import numpy as np

from hlo_memopt.pack.sections import Ints, Part


def live_bound(part: Part) -> int:
    """The largest sum of live bytes, and the end of every fixed buffer.

    With alignment every buffer takes its room, rounded up to the common divisor of all alignments, but the uppermost
    one, which ends with its last byte. Exact for a single slot where all alignments are equal and nothing is fixed.
    """
    rooms = part.slot_sums(part.room)
    spare: Ints = np.zeros(part.slots, dtype=np.int64)
    for first, last, left in zip(part.first, part.last, part.room - part.size, strict=True):
        spare[first:last] = np.maximum(spare[first:last], left)
    bound = int((rooms - spare).max())
    fixed = part.fixed >= 0
    return max(bound, int((part.fixed + part.size)[fixed].max())) if fixed.any() else bound
