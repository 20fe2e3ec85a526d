"""Which instructions must keep their relative order because something outside the program can tell."""

from __future__ import annotations

from typing import Any

_SYNC = frozenset(
    {
        "all-gather",
        "all-reduce",
        "all-to-all",
        "collective-broadcast",
        "collective-permute",
        "collective-reduce",
        "ragged-all-to-all",
        "reduce-scatter",
        "infeed",
        "outfeed",
        "recv",
        "recv-done",
        "rng",
        "rng-get-and-update-state",
        "send",
        "send-done",
    }
)
_ASYNC = frozenset(
    {
        "all-gather-done",
        "all-gather-start",
        "all-reduce-done",
        "all-reduce-start",
        "async-done",
        "async-start",
        "async-update",
        "collective-permute-done",
        "collective-permute-start",
        "copy-done",
        "copy-start",
    }
)
EFFECTS = _SYNC | _ASYNC

# What can have an effect without being one of those; appliers (of reduce, sort, ...) cannot.
_MAYBE = frozenset({"call", "conditional", "custom-call", "fusion", "while"})


class Effects:
    """Finds the instructions of a module that have effects, through the computations they call."""

    def __init__(self, computations: dict[int, Any], opcodes: dict[int, set[str]]) -> None:
        self._computations = computations
        self._opcodes = opcodes
        self._known: dict[int, bool] = {}

    def of(self, i: Any) -> bool:
        """Whether this instruction has an effect, itself or in a computation that it calls."""
        opcode = i.opcode
        if opcode in EFFECTS:
            return True
        if opcode not in _MAYBE:
            return False
        return i.custom_call_has_side_effect or any(self._inside(c) for c in i.called_computation_ids)

    def _inside(self, computation: int) -> bool:
        known = self._known.get(computation)
        if known is None:
            opcodes = self._opcodes[computation]
            known = not opcodes.isdisjoint(EFFECTS)
            if not known and not opcodes.isdisjoint(_MAYBE):
                known = any(self.of(i) for i in self._computations[computation].instructions)
            self._known[computation] = known
        return known
