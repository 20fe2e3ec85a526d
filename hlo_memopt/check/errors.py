"""What the checker raises."""

from __future__ import annotations


class PlanCheckError(ValueError):
    """A rewritten module or a packing does not hold. The message is one sentence naming what is wrong."""
