"""Copies that are needless once the order is known."""

from hlo_memopt.elide.copies import needless_copies

__all__ = ["needless_copies"]
