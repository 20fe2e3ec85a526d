"""How a command ends: what it returns or raises, and what `main` makes of it."""

from __future__ import annotations

DONE, NOT_HELD, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


class Failed(Exception):
    """Ends a command with one line on standard error, ``hlo-memopt: FILE: what is wrong; what to do``."""

    def __init__(self, subject: str, problem: str, advice: str, status: int = BAD_INPUT) -> None:
        self.subject = subject
        self.problem = problem
        self.advice = advice
        self.status = status
        super().__init__(f"{subject}: {problem}; {advice}")
