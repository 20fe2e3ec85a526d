"""The one table of platform differences."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version


@dataclass(frozen=True)
class Platform:
    """What XLA does differently on a platform.

    Attributes:
      alignment: of a buffer's offset in the temp allocation, bytes.
      pointer_bytes: size of a tuple's element in its table.
      tiled: whether layouts are tiled and padded (TPU).
      model_error: relative error that our prediction of XLA's temp may have; a plan must promise more than that.
        None is asked for on TPU.
      verify_below: a plan that promises a smaller share than this is compiled both ways, and XLA's own figure decides.
        On CUDA our figure for XLA's own schedule was up to 1.1% too large; on TPU the compiler assigns on-chip memory
        after our hook, so there it is done always.
      elides_copies: whether copies of donated arguments may be left out: where XLA's own runs were compared bit by bit.
      takes_over_anywhere: whether XLA lets an instruction write over an operand that was last seen elsewhere (jaxlib
        0.10 looks only at the place where a value is last seen).
    """

    name: str
    alignment: int
    pointer_bytes: int = 8
    tiled: bool = False
    model_error: float = 0.0
    verify_below: float = 0.0
    elides_copies: bool = False
    takes_over_anywhere: bool = True


PLATFORMS: dict[str, Platform] = {
    "cpu": Platform("cpu", alignment=64, model_error=0.002, elides_copies=True),
    "cuda": Platform("cuda", alignment=128, model_error=0.002, verify_below=0.015),
    "tpu": Platform("tpu", alignment=512, pointer_bytes=4, tiled=True, verify_below=1.0),
}


def platform(name: str) -> Platform:
    """The entry for ``name``, with the rules of the installed jaxlib; ValueError for a platform we do not know."""
    found = PLATFORMS.get({"gpu": "cuda"}.get(name, name))
    if found is None:
        raise ValueError(f"unknown platform {name!r}; known are {', '.join(PLATFORMS)}")
    return replace(found, takes_over_anywhere=not _jaxlib_version().startswith("0.10."))


@cache
def _jaxlib_version() -> str:
    return version("jaxlib")
