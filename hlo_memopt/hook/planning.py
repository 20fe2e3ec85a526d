"""``plan`` and ``plans``: planning without a compile, and what has been planned."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hlo_memopt.hook.registry import registry
from hlo_memopt.hook.scope import checked
from hlo_memopt.options import Options

if TYPE_CHECKING:
    from hlo_memopt.planner.plan import Plan


def plan(module: Any, platform: str = "cpu", options: Options | None = None) -> Plan:
    """Plan one scheduled module.

    Args:
      module: serialized HloModuleProto, a path to a file that holds a module in any form, or a jaxlib ``HloModule``.
      platform: "cpu", "cuda" or "tpu": which compiler's rules for memory to go by.
      options: how to plan; the defaults of ``Options``.
    """
    options = checked(options)
    data = _bytes(module)
    from hlo_memopt.planner import plan as planner

    made = planner.plan_module(data, platform, options)
    registry.remember(made)
    return made


def plans() -> list[Plan]:
    """The plans made in this process, newest first; each bears its module's name. The last hundred are kept."""
    return registry.plans()


def _bytes(module: Any) -> bytes:
    if isinstance(module, (bytes, bytearray, memoryview)):
        return bytes(module)
    if isinstance(module, (str, os.PathLike)):
        from hlo_memopt.hlo.read import read_module

        return read_module(module)
    serialize = getattr(module, "as_serialized_hlo_module_proto", None)
    if serialize is None:
        raise TypeError(f"module must be HloModuleProto bytes, a path or a jaxlib HloModule, not {type(module)}")
    return bytes(serialize())
