"""The one place where we stand between JAX and the compiler.

``jax._src.compiler.backend_compile_and_load(backend, module, ...)`` is what every compile of JAX ends in once the
persistent cache has not answered: jit, ahead of time, and for topologies without devices. It is private, so it is
wrapped only if it is there and its first arguments are as known (jax 0.10.2 to 0.12); else tagged names and the
checks before a module leaves us must do.

The seam
  * knows on the calling thread whether a module is ours, and marks it with a frontend attribute (in a copy: modules
    may be compiled by two threads), by which the callback knows it on any thread; names stay as they are;
  * has the hook registered by then for the backend in use, which ``jit`` at import time could not do without starting
    backends too early;
  * makes of an executable whose module ``donation`` had to carry one that keeps donated arguments;
  * compiles the untouched module if XLA rejects the rewritten one or forgets donated arguments in it, and, with
    ``verify`` and on TPU, to keep the better;
  * raises what ``strict`` and limits have to raise, as Python exceptions with their cause.

A plain compile after a failure goes into the persistent cache under the key of the optimized one: a failure is as
lasting as the cache, until options or versions change.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
from collections.abc import Callable
from typing import Any

from hlo_memopt.errors import DonationLostError, RejectedError
from hlo_memopt.hook import callback, scope
from hlo_memopt.hook.registry import MARK, Compile, logger, registry
from hlo_memopt.options import Options

_FRONTEND_ATTRIBUTES = "mhlo.frontend_attributes"
_lock = threading.Lock()
_tried = False
_installed = False


def installed() -> bool:
    return _installed


def install() -> None:
    """Wrap JAX's compile function, once. Does nothing where it is not as we know it."""
    global _tried, _installed
    if _tried:
        return
    with _lock:
        if _tried:
            return
        try:
            from jax._src import compiler

            original = compiler.backend_compile_and_load
            first = list(inspect.signature(original).parameters)[:2]
            if first != ["backend", "module"]:
                raise TypeError(f"backend_compile_and_load takes {first}")
            compiler.backend_compile_and_load = _wrap(original)
            _installed = True
        except Exception as error:
            logger.debug("JAX's compile function is not as known, going by modules' names: %s", error)
        _tried = True


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backend_compile_and_load(backend: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        name = _name(module)
        options = None if name is None else scope.options_for(name)
        if name is None or options is None:
            _say_if_inlined(module)
            return original(backend, module, *args, **kwargs)
        reload = _reloading(backend, *args, **kwargs)
        return _compile(lambda m: original(backend, m, *args, **kwargs), backend, module, name, options, reload)

    return backend_compile_and_load


def _reloading(
    backend: Any, executable_devices: Any = None, options: Any = None, host_callbacks: Any = (), **others: Any
) -> Callable[[bytes], Any] | None:
    """How to load an executable of this compile that was serialized; None: it cannot be, or not safely."""
    if executable_devices is None or options is None or host_callbacks or others:
        return None
    if type(backend).__name__ != "Client" or not hasattr(backend, "deserialize_executable"):
        return None  # a compile for a topology without devices
    return lambda data: backend.deserialize_executable(data, executable_devices, options)


def _compile(
    compile_with: Callable[[Any], Any],
    backend: Any,
    module: Any,
    name: str,
    options: Options,
    reload: Callable[[bytes], Any] | None = None,
) -> Any:
    """Compile a module that is ours; ``compile_with`` compiles a module as JAX would have."""
    platform = str(getattr(backend, "platform", ""))
    executable = None
    with registry.compiling(name, options) as record:
        record.reloadable = reload is not None
        failure = _register(backend, platform)
        if failure is None:
            executable, failure = _try(compile_with, module, record, platform)
        if record.carried is not None and executable is not None:
            executable, failure = _restored(executable, record, reload)
    if failure is not None:
        record.error, record.kept = failure, False
        if options.strict:
            raise callback.as_plan_error(name, failure)
        kinds: dict[type[Exception], str] = {DonationLostError: "donation lost", RuntimeError: f"no hook on {platform}"}
        once = kinds.get(type(failure))
        if once is None or registry.once(once):
            callback.warn(name, failure)
    if executable is not None and not (record.rewritten and (options.verify or _doubtful(record))):
        return executable
    plain = compile_with(module)  # no compile in progress for the callback to find: left untouched
    if executable is None:
        return plain
    record.kept = _stat(executable) < _stat(plain)
    if not record.kept:
        logger.info("module %s: XLA's own schedule needs no more temp than ours and is kept", name)
    return executable if record.kept else plain


def _doubtful(record: Compile) -> bool:
    """Whether the plan promises so little that XLA's own figures have to decide."""
    from hlo_memopt.platforms import platform as platform_named

    plan = record.plan
    if plan is None:
        return False
    share = platform_named(record.platform).verify_below
    return bool(share) and plan.peak_after >= plan.peak_before * (1 - share)


def _try(
    compile_with: Callable[[Any], Any], module: Any, record: Compile, platform: str
) -> tuple[Any, Exception | None]:
    """Compile with the hook's help: the executable, if there is one, and what failed on our side, if anything did."""
    try:
        executable = compile_with(_marked(module, record))
    except Exception as error:
        if record.raised and record.error is not None:
            raise callback.as_plan_error(record.name, record.error)  # noqa: B904 (it has a cause of its own)
        if not record.rewritten:
            raise  # the user's own error
        failure = RejectedError(f"XLA did not compile the rewritten module {record.name}: {error}")
        failure.__cause__ = error
        return None, failure
    if record.carried is None and record.rewritten and record.aliased and not _aliases(executable):
        return None, callback.donation_lost(record.platform)
    if not record.seen:
        return executable, RuntimeError(f"XLA on {platform!r} did not call the hook")
    return executable, None


def _restored(executable: Any, record: Compile, reload: Callable[[bytes], Any] | None) -> tuple[Any, Exception | None]:
    """The executable that keeps donation; never the one given, which must not be run. Else what failed."""
    from hlo_memopt.hook import restore

    try:
        if reload is None:
            raise ValueError("the executable cannot be loaded again")
        restored = restore.restore(executable, record.carried, reload)
        if not _aliases(restored):
            raise ValueError("XLA still knows of no donation")
        return restored, None
    except Exception as error:
        failure = callback.donation_lost(record.platform)
        failure.__cause__ = error
        return None, failure


def _aliases(executable: Any) -> bool:
    return _stat(executable, "alias_size_in_bytes") != 0


def _register(backend: Any, platform: str) -> Exception | None:
    try:
        callback.register(platform, str(getattr(backend, "platform_version", "")))
    except Exception as error:
        failure = RuntimeError(f"no hook can be registered with XLA on {platform!r}: {error}")
        failure.__cause__ = error
        return failure
    return None


def _stat(executable: Any, figure: str = "temp_size_in_bytes") -> float:
    """A figure of XLA's own; infinite where it gives none, so that a comparison keeps the plain executable."""
    try:
        return float(getattr(executable.get_compiled_memory_stats(), figure))
    except Exception as error:
        logger.debug("no memory figures from XLA: %s", error)
        return float("inf")


def _name(module: Any) -> str | None:
    try:
        return str(module.operation.attributes["sym_name"].value)
    except Exception as error:
        logger.debug("a module without a name: %s", error)
        return None


def _marked(module: Any, record: Compile) -> Any:
    """A copy of the MLIR module that bears the compile's number; the module itself if the copy does not work out."""
    try:
        from jax.extend.mlir import ir

        with module.context, module.operation.location as location:
            clone = module.operation.clone(ip=False)
            copy = ir.Module.create(location)
            for operation in list(clone.operation.regions[0].blocks[0].operations):
                copy.body.append(operation)
            attributes = module.operation.attributes
            for key in _keys(attributes):
                copy.operation.attributes[key] = attributes[key]
            marks: dict[str, Any] = {MARK: ir.StringAttr.get(f"{record.number:06d}")}
            if _FRONTEND_ATTRIBUTES in attributes:
                present: Any = ir.DictAttr(attributes[_FRONTEND_ATTRIBUTES])
                marks.update({x.name: x.attr for x in present})
            copy.operation.attributes[_FRONTEND_ATTRIBUTES] = ir.DictAttr.get(marks)
            record.marked = True
            return copy
    except Exception as error:
        if registry.once("no mark"):
            logger.debug("cannot mark modules, going by their names: %s: %s", type(error).__name__, error)
        return module


def _keys(attributes: Any) -> list[str]:
    return [getattr(x, "name", x) for x in attributes]  # names or named attributes, by version


def _say_if_inlined(module: Any) -> None:
    """Once, in the debug log: a function of ours inside somebody else's jit is a part of that compile."""
    if not logger.isEnabledFor(logging.DEBUG):
        return
    with contextlib.suppress(Exception):
        names = [str(op.attributes["sym_name"]).strip('"') for op in module.body.operations]
        inner = next((n for n in names if registry.tagged(n) is not None), None)
        if inner is not None and registry.once("inlined"):
            logger.debug("%s is inlined in %s, which XLA compiles as one module, not planned", inner, _name(module))
