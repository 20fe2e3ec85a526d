"""``hlo-memopt doctor``: versions, what works on this machine, what to install."""

from __future__ import annotations

import dataclasses
import glob
import importlib.metadata
import os
import platform as host
from collections.abc import Callable, Iterator
from typing import Any

import click

from hlo_memopt.cli.console import Out, Table, change, progress, size
from hlo_memopt.cli.errors import DONE, NOT_HELD

_PACKAGES = ("hlo_memopt", "jax", "jaxlib", "numpy", "scipy", "mip", "protobuf", "click", "rich")
_PLUGINS = {
    "CUDA": (("jax-cuda12-plugin", "jax-cuda13-plugin"), "pip install 'hlo_memopt[cuda]'"),
    "TPU": (("libtpu",), "pip install 'hlo_memopt[tpu]'"),
}
_VARIABLES = (
    "JAX_PLATFORMS",
    "XLA_FLAGS",
    "LIBTPU_INIT_ARGS",
    "JAX_COMPILATION_CACHE_DIR",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION",
)
_FLAGS = {
    "xla_disable_hlo_passes": "may keep XLA from calling the hook",
    "xla_cpu_scheduler_type": "changes the order that XLA:CPU starts from; ours is planned on top of it",
    "xla_gpu_enable_latency_hiding_scheduler": "trades memory for overlap; ours is planned on top of it",
    "xla_dump_to": "XLA writes every module that it compiles there",
    "xla_force_host_platform_device_count": "CPU devices that share this machine's cores",
}


@dataclasses.dataclass(frozen=True)
class Check:
    """One line. ``ok`` None: for information, no fault if it is missing."""

    name: str
    ok: bool | None
    detail: str


@click.command("doctor", help="Versions, what works on this machine, and what to install.")
def command() -> int:
    """0 if everything that planning needs works, else 1."""
    out = Out()
    out.table(_versions())
    table = Table("Checks", ("", "", ""))
    checks: list[Check] = []
    with progress("checking"):
        without = (_without_device(platform) for platform in ("cuda", "tpu"))
        for run in (_mip, _highs, _scipy, _protobuf, _devices, _hook, _donation, _cache, *without):
            checks.append(_guarded(run))
    checks += [*_plugins(), *_environment()]
    for c in checks:
        table.add({True: "ok", False: "FAILED", None: "-"}[c.ok], c.name, c.detail)
    out.table(table)
    failed = [c.name for c in checks if c.ok is False]
    out.text(f"Does not work: {', '.join(failed)}." if failed else "Everything that hlo_memopt needs works.")
    return NOT_HELD if failed else DONE


def _versions() -> Table:
    table = Table("Versions", ("", ""))
    table.add("python", f"{host.python_version()} ({host.python_implementation()}, {host.system()} {host.machine()})")
    for package in _PACKAGES:
        table.add(package, _version(package) or "MISSING: pip install " + package)
    return table


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _guarded(run: Callable[[], Check]) -> Check:
    """A check that raises has failed."""
    try:
        return run()
    except Exception as error:
        name = (run.__doc__ or run.__name__).rstrip(".")
        return Check(name, False, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".rstrip(": "))


def _mip() -> Check:
    """integer programs."""
    return _integer_program("integer programs", "cbc")


def _without_device(platform: str) -> Callable[[], Check]:
    def check() -> Check:
        from hlo_memopt.targets import available, compile_only

        name = f"{platform} without a device"
        reason = available(platform)
        if reason is not None:
            return Check(name, None, f"not possible: {reason}")
        return Check(name, True, f"compiles for {compile_only(platform).name}; nothing can be run")

    check.__doc__ = f"{platform} without a device."
    return check


def _highs() -> Check:
    """HiGHS solver."""
    from hlo_memopt.schedule.ilp_support import SOLVERS

    if not SOLVERS["highs"].loads():
        install = SOLVERS["highs"].install
        return Check("HiGHS solver", None, f'not installed; to use Options(solver="highs"): {install}')
    return _integer_program("HiGHS solver", "highs")


def _integer_program(name: str, solver: str) -> Check:
    import mip

    from hlo_memopt.schedule.ilp_support import solver_named

    library = solver_named(solver)
    model = mip.Model(sense=mip.MAXIMIZE, solver_name=library.name)
    model.verbose = 0
    x, y = (model.add_var(var_type=mip.INTEGER, lb=0, ub=4) for _ in range(2))
    model += 2 * x + 3 * y <= 12
    model.objective = mip.xsum([3 * x, 4 * y])
    status, _ = library.optimize(model, {"max_seconds": 10})
    value = model.objective_value
    right = status == "OPTIMAL" and value is not None and round(value) == 17
    advice = "" if right else f"; {library.install}"
    told = f"mip with {library.name}: {status.lower()}, {value} (17 expected){advice}"
    return Check(name, right, told)


def _scipy() -> Check:
    """minimum cuts."""
    import numpy as np
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import maximum_flow

    flow = maximum_flow(csr_matrix(np.array([[0, 3, 2], [0, 0, 4], [0, 0, 0]], dtype=np.int32)), 0, 2).flow_value
    return Check("minimum cuts", flow == 5, f"scipy's maximum flow: {flow} (5 expected)")


def _protobuf() -> Check:
    """module protos."""
    from google.protobuf.internal import api_implementation

    from hlo_memopt.hlo import proto

    message = proto.new_module()
    message.name = "probe"
    again = proto.parse_module(proto.serialize(message))
    kind = api_implementation.Type()
    slow = "" if kind == "upb" else "; slow: unset PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION or upgrade protobuf"
    return Check("module protos", again.name == "probe", f"protobuf, implementation {kind}{slow}")


def _devices() -> Check:
    """devices."""
    import jax

    try:
        devices = jax.devices()
    except Exception as error:  # RuntimeError, or AssertionError where no backend at all starts
        reason = " ".join(str(error).split()) or f"JAX_PLATFORMS is {jax.config.jax_platforms!r}"
        return Check("devices", False, f"JAX starts no backend: {reason}; unset JAX_PLATFORMS, or install its plugin")
    kinds = sorted({d.device_kind for d in devices})
    return Check("devices", True, f"{len(devices)} x {jax.default_backend()} ({', '.join(kinds)}), the default backend")


def _probe(rows: list[Any], state: Any) -> tuple[list[Any], Any]:
    """Independent rounds, which XLA:CPU keeps all alive at once, and a state to donate."""
    import jax.numpy as jnp

    return [jnp.bincount(a * 8 + b, length=64) for a in rows for b in rows], state + 1


def _probe_arguments() -> tuple[Any, Any]:
    import jax.numpy as jnp

    return [jnp.arange(20_000, dtype=jnp.int32) % (n + 5) for n in range(3)], jnp.ones(100)


def _hook() -> Check:
    """planning inside jit."""
    import jax
    import jax.numpy as jnp

    import hlo_memopt

    arguments = _probe_arguments()
    step = hlo_memopt.jit(_probe, options=hlo_memopt.Options(strict=True))
    result = hlo_memopt.compare(step, *arguments)
    where = f"the hook on {jax.default_backend()}"
    if result.plan is None or result.plan not in hlo_memopt.plans():
        return Check("planning inside jit", False, f"{where} made no plan; pip install --upgrade jax jaxlib")
    before, after = result.temp_before, result.temp_after
    results = [jax.tree.leaves(c(*arguments)) for c in (result.compiled_before, result.compiled_after)]
    equal = all(map(jnp.array_equal, *results))
    told = f"{where} made a plan; temp {size(before)} -> {size(after)} {change(before, after)} (reported by XLA)"
    return Check("planning inside jit", equal and after <= before, f"{told}, results {'equal' if equal else 'DIFFER'}")


def _donation() -> Check:
    """donated arguments."""
    import hlo_memopt
    from hlo_memopt.errors import DonationLostError

    options = hlo_memopt.Options(strict=True)
    try:
        result = hlo_memopt.compare(_probe, *_probe_arguments(), options=options, donate_argnums=1)
    except DonationLostError as error:
        return Check("donated arguments", None, f"such functions are compiled untouched: {error}")
    kept = result.compiled_after.memory_analysis().alias_size_in_bytes > 0
    return Check("donated arguments", kept, "kept in rewritten modules" if kept else "lost in rewritten modules")


def _cache() -> Check:
    """persistent compilation cache."""
    import jax

    folder = jax.config.jax_compilation_cache_dir
    if not folder or not jax.config.jax_enable_compilation_cache:
        return Check("persistent compilation cache", None, "not in use")
    if "://" in folder:
        return Check("persistent compilation cache", None, folder)
    probe = os.path.realpath(folder)
    while not os.path.exists(probe):
        probe = os.path.dirname(probe)
    ok = os.path.isdir(probe) and os.access(probe, os.W_OK)
    detail = folder if ok else f"{folder}: cannot be written; choose another folder"
    return Check("persistent compilation cache", ok, detail)


def _plugins() -> Iterator[Check]:
    cards = glob.glob("/dev/nvidia[0-9]*")
    for name, (packages, install) in _PLUGINS.items():
        found = [f"{p} {v}" for p in packages if (v := _version(p))]
        detail = ", ".join(found) if found else f"no plugin; to compile for it: {install}"
        if name == "CUDA" and cards and not found:
            detail = f"{len(cards)} NVIDIA card(s) here, but no plugin: {install}"
        yield Check(f"{name} plugin", None, detail)


def _environment() -> Iterator[Check]:
    for variable in _VARIABLES:
        value = os.environ.get(variable)
        if value:
            yield Check(variable, None, value)
    for flag, meaning in _FLAGS.items():
        if f"--{flag}=" in os.environ.get("XLA_FLAGS", ""):
            yield Check(f"--{flag}", None, meaning)
