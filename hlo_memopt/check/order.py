"""Is a new order of one computation's instructions a valid one?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hlo_memopt.check.alias import WRITE
from hlo_memopt.check.errors import PlanCheckError

Event = tuple[int, int, int]


def check_permutation(computation: Any, order: list[int]) -> None:
    """Every instruction exactly once, nothing else."""
    where = f"computation {computation.name!r}"
    names = {i.id: i.name for i in computation.instructions}
    seen: set[int] = set()
    for key in order:
        if key not in names:
            raise PlanCheckError(f"the schedule of {where} holds the unknown instruction id {key}")
        if key in seen:
            raise PlanCheckError(f"the schedule of {where} holds instruction {names[key]!r} twice")
        seen.add(key)
    for key, name in names.items():
        if key not in seen:
            raise PlanCheckError(f"instruction {name!r} is missing from the schedule of {where}")


def check_dependencies(computation: Any, order: Iterable[int], what: str) -> None:
    """Operands and control predecessors stand before their users. ``what``: the schedule, or the listing."""
    position = {key: n for n, key in enumerate(order)}
    for i in computation.instructions:
        here = position[i.id]
        for ids, kind in ((i.operand_ids, "operand"), (i.control_predecessor_ids, "control predecessor")):
            for key in ids:
                there = position.get(key)
                if there is None:
                    raise PlanCheckError(
                        f"instruction {i.name!r} of computation {computation.name!r} has the {kind} id {key} "
                        "from outside the computation"
                    )
                if there >= here:
                    name = next(j.name for j in computation.instructions if j.id == key)
                    raise PlanCheckError(
                        f"instruction {i.name!r} stands before its {kind} {name!r} in the {what} of computation "
                        f"{computation.name!r}"
                    )


def check_effects(computation: Any, old: list[int], new: list[int], has_effect: Callable[[Any], bool]) -> None:
    """Instructions with effects keep their relative order."""
    names = {i.id: i.name for i in computation.instructions if has_effect(i)}
    before = [key for key in old if key in names]
    after = [key for key in new if key in names]
    for x, y in zip(before, after, strict=True):
        if x != y:
            raise PlanCheckError(
                f"instruction {names[y]!r} overtakes {names[x]!r} in computation {computation.name!r}: both have "
                "effects whose order must stay"
            )


def check_aliases(computation: Any, old: list[int], new: list[int], events: Iterable[Event]) -> None:
    """Around every write to a shared buffer, its earlier and later users stay on their sides.

    Two users of one buffer, one of them a writer, keep the order they had. A value of the buffer is thus dead
    before the next one is written wherever it was so in the original order.
    """
    position = {key: n for n, key in enumerate(new)}
    for timeline in _timelines(old, events):
        written = latest = -1  # new positions of the last writer and of the latest of all users so far
        for key, bits in timeline:
            here = position[key]
            if here < (latest if bits & WRITE else written):
                raise PlanCheckError(_crossed(computation, new, timeline, key, bits))
            latest = max(latest, here)
            if bits & WRITE:
                written = here


def alias_edges(old: list[int], events: Iterable[Event]) -> list[tuple[int, int]]:
    """What `check_aliases` demands, as (earlier, later) pairs; transitively implied pairs are left out."""
    edges = []
    for timeline in _timelines(old, events):
        writer, readers = None, []
        for key, bits in timeline:
            if not bits & WRITE:
                readers.append(key)
                if writer is not None:
                    edges.append((writer, key))
                continue
            if readers:
                edges += [(r, key) for r in readers]
            elif writer is not None:
                edges.append((writer, key))
            writer, readers = key, []
    return edges


def _timelines(old: list[int], events: Iterable[Event]) -> list[list[tuple[int, int]]]:
    """The users of each buffer that has a writer and another user, in the original order."""
    rank = {key: n for n, key in enumerate(old)}
    sets: dict[int, list[tuple[int, int, int]]] = {}
    for s, key, bits in events:
        sets.setdefault(s, []).append((rank[key], key, bits))
    return [
        [(key, bits) for _, key, bits in sorted(users)]
        for users in sets.values()
        if len(users) > 1 and any(bits & WRITE for _, _, bits in users)
    ]


def _crossed(computation: Any, new: list[int], timeline: list[tuple[int, int]], key: int, bits: int) -> str:
    """The message for the first user found on the wrong side."""
    names = {i.id: i.name for i in computation.instructions}
    position = {k: n for n, k in enumerate(new)}
    where = f"in computation {computation.name!r}"
    for other, theirs in timeline:
        if other == key:
            break
        if position[other] > position[key] and (bits | theirs) & WRITE:
            if bits & WRITE:
                verb = "writes" if theirs & WRITE else "reads"
                return (
                    f"instruction {names[other]!r} {where} {verb} a buffer that {names[key]!r}, now before it, "
                    "overwrites in place"
                )
            return (
                f"instruction {names[key]!r} {where} reads a buffer that {names[other]!r}, now after it, has yet "
                "to write"
            )
    return f"instruction {names[key]!r} {where} is on the wrong side of a writer of its buffer"
