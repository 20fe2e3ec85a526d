"""Exceptions that hlo_memopt raises on purpose."""

from __future__ import annotations


class HloMemoptError(Exception):
    """Base of hlo_memopt's own errors."""


class MemoryLimitError(HloMemoptError):
    """A memory limit that the user asked for cannot be met. Raised whatever ``Options.strict`` says."""


class PlanError(HloMemoptError, RuntimeError):
    """With ``Options(strict=True)``: planning, rewriting or checking a module failed; ``__cause__`` says how."""


class DonationLostError(PlanError):
    """With ``Options(strict=True)``: this XLA forgets donated arguments in a module that a hook rewrites."""


class RejectedError(PlanError):
    """With ``Options(strict=True)``: XLA did not compile the module that we had rewritten."""
