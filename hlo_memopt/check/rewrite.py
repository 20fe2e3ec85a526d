"""`check_rewrite`: the gate between a plan and XLA, which does not check interference itself."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hlo_memopt.check.alias import AliasSets
from hlo_memopt.check.copies import check_copies, clone, missing_copies, with_copies, without_copies
from hlo_memopt.check.effects import Effects
from hlo_memopt.check.errors import PlanCheckError
from hlo_memopt.check.order import alias_edges, check_aliases, check_dependencies, check_effects, check_permutation
from hlo_memopt.check.structure import compare_computations, compare_rest, compare_schedules
from hlo_memopt.hlo import proto


def check_rewrite(original: bytes, rewritten: bytes) -> None:
    """Raise `PlanCheckError` unless ``rewritten`` computes what ``original`` does, in a sound order.

    Both are serialized HloModuleProtos; the original's own schedule is taken to be right. Proven here: nothing but
    the schedule, the order of listing and added control predecessors differs, and copies of donated arguments that are
    left out; each sequence is a topological permutation; effects keep their order; no value of a shared buffer is read
    after a later one was written.
    """
    before, after = _parse(original, "original"), _parse(rewritten, "rewritten")
    gone = missing_copies(before, after)
    if gone:
        before = _without(before, after, gone)
    _check(before, after)


def _without(before: Any, after: Any, gone: dict[int, int]) -> Any:
    """The original less those copies, in the rewritten module's order; raises unless it computes the same."""
    full = with_copies(before, after, gone)
    _check(before, clone(full))
    try:
        check_copies(full, gone)
    except (AttributeError, LookupError, RecursionError, TypeError) as e:
        raise PlanCheckError(f"the original module has a form that the checker does not know ({e!r})") from e
    return without_copies(full, gone)


def _check(before: Any, after: Any) -> None:
    listed = compare_computations(before, after)
    old = {c.id: c for c in before.computations}
    new = {c.id: c for c in after.computations}
    orders = compare_schedules(before, after, {key: c.name for key, c in old.items()})
    for key in listed:
        check_dependencies(new[key], [i.id for i in new[key].instructions], "listing")
    moved = []
    for key, (was, now) in orders.items():
        if was == now and (key not in listed or not was):  # libtpu gives bodies of fusions empty sequences
            continue
        check_permutation(new[key], now)
        check_dependencies(new[key], now, "schedule")
        if was != now:
            if len(was) != len(now) or set(was) != set(now):
                raise PlanCheckError(f"computation {old[key].name!r} was not scheduled whole in the original module")
            moved.append(key)
    if moved:
        try:
            facts = _Facts(before)
            for key in moved:
                was, now = orders[key]
                check_effects(old[key], was, now, facts.effects.of)
                check_aliases(old[key], was, now, facts.aliases.events(key))
        except (AttributeError, LookupError, RecursionError, TypeError) as e:
            raise PlanCheckError(f"the original module has a form that the checker does not know ({e!r})") from e
    compare_rest(before, after)


def ordering_edges(module: bytes) -> dict[int, list[tuple[int, int]]]:
    """What any new order of ``module`` must respect beyond operands and control predecessors.

    Computation id -> (earlier instruction id, later instruction id) pairs. An order that respects them, the operands
    and the control predecessors is one that `check_rewrite` accepts, and the other way round.
    """
    message = _parse(module, "given")
    facts = _Facts(message)
    found = {}
    computations = {c.id: c for c in message.computations}
    for sequence in message.schedule.sequences:
        order = list(sequence.value.instruction_ids)
        if not order:
            continue
        effects = {i.id for i in computations[sequence.key].instructions if facts.effects.of(i)}
        chain = [key for key in order if key in effects]
        edges = alias_edges(order, facts.aliases.events(sequence.key))
        found[sequence.key] = [*edges, *pairwise(chain)]
    return found


class _Facts:
    """What the checks of moved computations need to know of the original module."""

    def __init__(self, message: Any) -> None:
        computations = {c.id: c for c in message.computations}
        opcodes = {c.id: {i.opcode for i in c.instructions} for c in message.computations}
        self.effects = Effects(computations, opcodes)
        self.aliases = AliasSets(message, computations, opcodes)


def _parse(data: bytes, which: str) -> Any:
    from google.protobuf.message import DecodeError

    try:
        return proto.parse_module(data)
    except DecodeError:
        raise PlanCheckError(f"the {which} module is not a serialized HloModuleProto") from None
