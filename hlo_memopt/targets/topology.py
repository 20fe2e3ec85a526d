"""Compile-only topologies: the CUDA and TPU compilers on a machine with neither.

XLA compiles for a description of a device (``jax.experimental.topologies``). What it reports of such an executable is
what it would report on the device, but for kernels that it would choose by running them there. Nothing can be run.
"""

from __future__ import annotations

import dataclasses
import glob
import importlib.util
import os
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

# Two devices described here; any other by a file of the same form.
GPUS = ("h100", "a100")
TPUS = {"v5e": "v5e:1x1", "v5p": "v5p:2x2x1", "v6e": "v6e:1x1"}

# What the plugins ask for where there is no device; what a user has set stays.
_CUDA_ENVIRONMENT = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}


@dataclasses.dataclass(frozen=True)
class Target:
    """A device to compile for.

    Attributes:
      platform: "cuda" or "tpu".
      name: as the compiler calls the device.
      sharding: puts an argument on it.
    """

    platform: str
    name: str
    sharding: Any

    def place(self, tree: Any) -> Any:
        """Arrays and ``jax.ShapeDtypeStruct`` as structs on this device; other leaves, and what is placed, stay."""
        import jax

        def struct(leaf: Any) -> Any:
            if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is not None:
                return leaf
            if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
                return leaf
            weak = bool(getattr(leaf, "weak_type", False))
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self.sharding, weak_type=weak)

        return jax.tree.map(struct, tree)


@dataclasses.dataclass(frozen=True)
class _Kind:
    """How one platform is compiled for: the module of its plugin, the command that installs it, ...

    ``environment``: what the plugin asks for where there is no device; ``device_files``: where devices would be.
    """

    module: str
    install: str
    describe: Callable[[str | None], Any]
    environment: dict[str, str]
    device_files: str
    oldest: tuple[int, ...] = (0, 12)


def available(platform: str) -> str | None:
    """Why ``platform`` cannot be compiled for without a device, with the command that helps; None if it can."""
    import jax

    kind = _KINDS.get(platform)
    if kind is None:
        return f"there is no compile-only {platform!r}; known are {', '.join(_KINDS)}"
    if importlib.util.find_spec(kind.module) is None:
        return f"its compiler is not installed: {kind.install}"
    if tuple(int(x) for x in jax.__version__.split(".")[:2]) < kind.oldest:
        return f"jax {jax.__version__} calls no hook there: pip install 'jax>=0.12' (Python 3.12 or newer)"
    return None


def prepare(platform: str) -> None:
    """Set, before JAX starts the platform's plugin, what that asks for where there is no device.

    A CUDA plugin that has started without finds no cuDNN and is of no use afterwards.
    """
    kind = _KINDS.get(platform)
    if kind is not None and not glob.glob(kind.device_files):
        for key, value in kind.environment.items():
            os.environ.setdefault(key, value)


def compile_only(platform: str, target: str | None = None) -> Target:
    """The first device of a topology that is not there.

    Args:
      platform: "cuda" or "tpu".
      target: for CUDA one of `GPUS` or a file with a description (GpuTargetConfigProto text); for TPU one of `TPUS`, or
        a topology as libtpu names it ("v5e:2x2").

    Raises ValueError if the platform's compiler is not installed, or the target is not known.
    """
    import jax
    import numpy as np

    reason = available(platform)
    if reason is not None:
        raise ValueError(f"cannot compile for {platform!r} without a device: {reason}")
    prepare(platform)
    devices = _KINDS[platform].describe(target).devices
    mesh = jax.sharding.Mesh(np.array(devices[:1]), ("device",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return Target(platform, str(devices[0].device_kind), sharding)


def _cuda(target: str | None) -> Any:
    name = target or GPUS[0]
    if name in GPUS:
        text = resources.files(__package__).joinpath(f"{name}.txtpb").read_text(encoding="utf-8")
    else:
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            known = ", ".join(GPUS)
            problem = f"target {name!r} is neither one of {known} nor a file with a description: {error}"
            raise ValueError(problem) from None
    return _topology(name, "cuda", "1x1x1", target_config=text)


def _tpu(target: str | None) -> Any:
    name = target or "v5e"
    return _topology(name, "tpu", TPUS.get(name, name))


def _topology(target: str, platform: str, topology: str, **options: Any) -> Any:
    from jax.experimental import topologies

    try:
        if platform == "tpu":
            return topologies.get_topology_desc(topology, platform)
        return topologies.get_topology_desc(platform=platform, topology=topology, **options)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        if "not implemented" in reason:
            reason += "; its plugin had started as for a device: set JAX_PLATFORMS=cpu"
        raise ValueError(f"the {platform} compiler does not know target {target!r}: {reason}") from error


_KINDS = {
    "cuda": _Kind("jax_cuda12_plugin", "pip install 'hlo_memopt[cuda]'", _cuda, _CUDA_ENVIRONMENT, "/dev/nvidia[0-9]*"),
    "tpu": _Kind("libtpu", "pip install 'hlo_memopt[tpu]'", _tpu, _TPU_ENVIRONMENT, "/dev/accel*"),
}
