"""What a user can ask for."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How a module is planned. Every size is in bytes or a string such as ``"12GiB"``.

    Attributes:
      reorder: choose the order of instructions.
      pack: choose the buffers' places in memory. No effect in this version: XLA places them itself.
      elide_copies: leave out copies of donated arguments whose readers may read the argument itself, on CPU.
      recompute: which values may be computed twice. Only ``"off"`` in this version.
      memory_limit: bytes per device for arguments, outputs and temp together. Only None in this version.
      temp_limit: bytes for temp alone. Only None in this version.
      effort: how much work the search may do; counted in moves and cuts, not in seconds.
      solver: solves the integer programs; ``"cbc"`` is always there, ``"highs"`` needs
        ``pip install 'hlo_memopt[highs]'``.
      time_limit: seconds after which planning stops with what it has; None: no limit beyond ``effort``.
      strict: raise on any failure of hlo_memopt instead of compiling the module untouched.
      verify: compile both ways and keep the better by XLA's own temp figure.
    """

    reorder: bool = True
    pack: bool = True
    elide_copies: bool = True
    recompute: Literal["off", "cheap", "auto"] = "off"
    memory_limit: int | str | None = None
    temp_limit: int | str | None = None
    effort: Literal["fast", "default", "max"] = "default"
    solver: Literal["cbc", "highs"] = "cbc"
    time_limit: float | None = None
    strict: bool = False
    verify: bool = False

    def __post_init__(self) -> None:
        for name in ("reorder", "pack", "elide_copies", "strict", "verify"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if self.effort not in ("fast", "default", "max"):
            raise ValueError(f"effort must be 'fast', 'default' or 'max', not {self.effort!r}")
        if self.solver not in ("cbc", "highs"):
            raise ValueError(f"solver must be 'cbc' or 'highs', not {self.solver!r}")
        if self.recompute not in ("off", "cheap", "auto"):
            raise ValueError(f"recompute must be 'off', 'cheap' or 'auto', not {self.recompute!r}")
        if self.recompute != "off":
            raise ValueError(f"recompute={self.recompute!r} is not available in this version; use recompute='off'")
        for name in ("memory_limit", "temp_limit"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} is not available in this version; leave it None")
        limit = self.time_limit
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, numbers.Real) or not limit > 0):
            raise ValueError(f"time_limit must be a positive number of seconds or None, not {limit!r}")
