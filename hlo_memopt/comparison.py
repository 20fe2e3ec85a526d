"""``compare``: one function compiled plainly and optimized, side by side."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax

from hlo_memopt.hook import scope
from hlo_memopt.hook.registry import Compile, registry
from hlo_memopt.options import Options

if TYPE_CHECKING:
    from hlo_memopt.planner.plan import Plan

_JIT_ARGUMENTS = frozenset(inspect.signature(jax.jit).parameters) - {"fun"}
_cache_lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What XLA reports for the plain and the optimized compile. Sizes in bytes, per device.

    Attributes:
      temp_before, temp_after: XLA's ``temp_size_in_bytes``.
      predicted_before, predicted_after: our model's figures for the same; None if no plan was made.
      compile_seconds_before, compile_seconds_after: lowered module to executable; the latter with planning.
      plan_seconds: of the latter, spent by us: planning, rewriting, checking, first imports.
      plan: the plan; None if none was made.
      error: why the module was compiled untouched; None if it was not, or did not need any change.
      compiled_before, compiled_after: the executables (``jax.stages.Compiled``), to be run.
      device: what was compiled for if it is not there (then nothing can be run); None: a device of this process.
    """

    name: str
    platform: str
    temp_before: int
    temp_after: int
    predicted_before: int | None
    predicted_after: int | None
    compile_seconds_before: float
    compile_seconds_after: float
    plan_seconds: float
    plan: Plan | None = dataclasses.field(repr=False)
    error: BaseException | None
    compiled_before: Any = dataclasses.field(repr=False)
    compiled_after: Any = dataclasses.field(repr=False)
    device: str | None = None

    @property
    def saving(self) -> float:
        """The part of XLA's temp that is gone: 0.4 is 40%."""
        return 1 - self.temp_after / self.temp_before if self.temp_before else 0.0

    def __str__(self) -> str:
        rows = [
            ("", "plain", "optimized", ""),
            ("temp, reported by XLA", _size(self.temp_before), _size(self.temp_after), f"{0.0 - self.saving:+.1%}"),
            ("temp, predicted by hlo_memopt", _size(self.predicted_before), _size(self.predicted_after), ""),
            (
                "compile seconds",
                f"{self.compile_seconds_before:.2f}",
                f"{self.compile_seconds_after:.2f}",
                f"{self.plan_seconds:.2f} of it planning",
            ),
        ]
        where = f" ({self.device}, compiled without one)" if self.device else ""
        lines = [f"{self.name} on {self.platform}{where}"]
        lines += [f"  {label:<30}{before:>14}{after:>14}  {note}".rstrip() for label, before, after, note in rows]
        if self.error is not None:
            lines.append(f"  not optimized: {type(self.error).__name__}: {self.error}")
        return "\n".join(lines)


def compare(
    fun: Callable[..., Any],
    *args: Any,
    platform: str | None = None,
    target: str | None = None,
    options: Options | None = None,
    **kwargs: Any,
) -> Comparison:
    """Compile ``fun`` plainly and optimized, and return what XLA says of both. Nothing is run.

    Args:
      fun: a function, or an object with ``lower`` (of ``jax.jit``, ``flax.nnx.jit``, ``equinox.filter_jit``), which is
        compiled with the arguments that it was made with.
      *args: arrays or ``jax.ShapeDtypeStruct``.
      platform: where to compile; default: JAX's default backend. "cuda" and "tpu" need no device: without one the
        compiler works for ``target``, and arguments without a sharding count as lying on its first device.
      target: of a compile without device: see `targets.compile_only` ("h100", "a100", "v5e", ..., or a file).
      options: how to plan; default: those of ``hlo_memopt.jit`` if ``fun`` comes from it, else ``Options()``.
      **kwargs: what ``jax.jit`` knows goes to it, the rest to ``fun``.
    """
    if options is not None:
        scope.checked(options)
    jit_kwargs = {k: v for k, v in kwargs.items() if k in _JIT_ARGUMENTS}
    fun_kwargs = {k: v for k, v in kwargs.items() if k not in _JIT_ARGUMENTS}
    lowerable: Any = fun
    if not hasattr(fun, "lower"):
        lowerable = jax.jit(fun, **jit_kwargs)
    elif jit_kwargs:
        raise ValueError(f"{fun!r} is jitted already: pass the plain function, or leave out {', '.join(jit_kwargs)}")
    with _chosen(platform, target) as chosen, _no_persistent_cache():
        _warm_up()
        if chosen.place is not None:
            args, fun_kwargs = chosen.place((args, fun_kwargs))
        plain = scope.Scope(None, wins=True)
        before, seconds_before, _ = _compile(lowerable, args, fun_kwargs, plain)
        optimized = scope.Scope(options or Options(), wins=options is not None)
        after, seconds_after, record = _compile(lowerable, args, fun_kwargs, optimized)
    plan = record.plan if record else None
    return Comparison(
        name=str(getattr(fun, "__name__", type(fun).__name__)),
        platform=chosen.platform,
        device=chosen.device,
        temp_before=_temp(before),
        temp_after=_temp(after),
        predicted_before=plan.peak_before if plan else None,
        predicted_after=plan.peak_after if plan else None,
        compile_seconds_before=seconds_before,
        compile_seconds_after=seconds_after,
        plan_seconds=record.seconds if record else 0.0,
        plan=plan,
        error=record.error if record else None,
        compiled_before=before,
        compiled_after=after,
    )


def _compile(
    lowerable: Any, args: tuple[Any, ...], kwargs: dict[str, Any], in_scope: scope.Scope
) -> tuple[Any, float, Compile | None]:
    """Executable, seconds of its compile, and our record of it. A new scope: none of JAX's caches can answer."""
    with scope.inside(in_scope), registry.collecting() as records:
        lowered = lowerable.lower(*args, **kwargs)
        records.clear()  # constants may have been computed on the way
        started = time.perf_counter()
        compiled = lowered.compile()
        seconds = time.perf_counter() - started
    return compiled, seconds, records[-1] if records else None


def _temp(compiled: Any) -> int:
    compiled = getattr(compiled, "compiled", compiled)  # equinox and nnx wrap JAX's object
    return int(compiled.memory_analysis().temp_size_in_bytes)


def _warm_up() -> None:
    """The first compile of a process starts the compiler; no one's seconds."""
    if registry.once("warm"):
        with scope.inside(None):
            jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((8,), "float32")).compile()


@dataclasses.dataclass(frozen=True)
class _Chosen:
    """``place`` puts arguments on ``device``, which is not there (both None: it is)."""

    platform: str
    device: str | None = None
    place: Callable[[Any], Any] | None = None


@contextlib.contextmanager
def _chosen(platform: str | None, target: str | None) -> Iterator[_Chosen]:
    """Make ``platform`` the one to compile for."""
    if platform is None and target is None:
        yield _Chosen(jax.default_backend())
        return
    from hlo_memopt.targets import compile_only, prepare

    name = {"gpu": "cuda"}.get(platform or "", platform or "")
    prepare(name)
    device = None if target is not None else _device(name)
    if device is not None:
        with jax.default_device(device):
            yield _Chosen(name)
    elif name in ("cuda", "tpu"):
        found = compile_only(name, target)
        yield _Chosen(name, found.name, found.place)
    else:
        wanted = f"platform {platform!r}" if platform else f"target {target!r} without a platform"
        raise ValueError(
            f"{wanted} is no backend of this process, whose default is {jax.default_backend()!r}; run on a machine "
            f"that has it, with the plugin installed and JAX_PLATFORMS allowing it, or name cuda or tpu"
        )


def _device(platform: str) -> Any:
    """The first device of a platform, None if this process has none."""
    try:
        return jax.devices(platform)[0]
    except RuntimeError:
        return None


@contextlib.contextmanager
def _no_persistent_cache() -> Iterator[None]:
    """No answers from, nor entries in, the persistent compilation cache; for the process, while it lasts."""
    from jax.experimental.compilation_cache import compilation_cache

    with _cache_lock:
        was = jax.config.jax_enable_compilation_cache
        if not was or not jax.config.jax_compilation_cache_dir:
            yield
            return
        try:
            jax.config.update("jax_enable_compilation_cache", False)
            compilation_cache.reset_cache()
            yield
        finally:
            jax.config.update("jax_enable_compilation_cache", was)
            compilation_cache.reset_cache()


def _size(size: int | None) -> str:
    if size is None:
        return "-"
    if size < 2**20:
        return f"{size / 2**10:.1f} KiB" if size >= 2**10 else f"{size} B"
    return f"{size / 2**20:.1f} MiB"
