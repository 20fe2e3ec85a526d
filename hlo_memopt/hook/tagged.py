"""``jit``: ``jax.jit`` of a function renamed so that its modules are known to be ours."""

from __future__ import annotations

import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import jax

from hlo_memopt.hook import seam
from hlo_memopt.hook.registry import TAG, logger, registry
from hlo_memopt.hook.scope import checked
from hlo_memopt.options import Options

# id of a function -> (the function, weakly; tag -> its wrapper). A wrapper lives as long as its function, so that
# ``jit(f)`` written twice shares traces and executables, as with ``jax.jit``.
_wrappers: dict[int, tuple[weakref.ref[Any], dict[str, Callable[..., Any]]]] = {}
_lock = threading.RLock()


def jit(fun: Callable[..., Any] | None = None, *, options: Options | None = None, **jit_kwargs: Any) -> Any:
    """``jax.jit`` whose modules are planned for less temp memory.

    >>> step = hlo_memopt.jit(train_step, donate_argnums=0)

    Args:
      fun: the function; without it, a decorator is returned.
      options: how to plan; the defaults of ``Options``.
      **jit_kwargs: every argument of ``jax.jit``, with its meaning there.

    Returns:
      A ``jax.jit`` object: calls, ``lower``, ``trace``, ``eval_shape``, ``clear_cache`` are JAX's own. Inside an outer
      plain ``jax.jit`` (or scan, grad of a jit, ...) the outer compile decides.
    """
    options = checked(options)
    if fun is None:
        return functools.partial(jit, options=options, **jit_kwargs)
    if not callable(fun) or isinstance(fun, staticmethod) or inspect.isgeneratorfunction(fun):
        jax.jit(fun, **jit_kwargs)  # raises, with JAX's own words
        raise TypeError(f"hlo_memopt.jit needs a function, not {fun!r}")
    seam.install()
    jitted: Any = jax.jit(_wrapper(fun, registry.tag(options)), **jit_kwargs)
    # Outwardly the object is a jit of ``fun``, which it keeps alive: the wrapper does not.
    jitted._hlo_memopt_fun = fun
    jitted.__wrapped__ = fun
    jitted.__name__ = _name(fun)
    jitted.__qualname__ = getattr(fun, "__qualname__", jitted.__name__)
    for key, value in getattr(fun, "__dict__", {}).items():
        jitted.__dict__.setdefault(key, value)
    return jitted


def _wrapper(fun: Callable[..., Any], tag: str) -> Callable[..., Any]:
    with _lock:
        held = _wrappers.get(id(fun))
        if held is None or held[0]() is not fun:
            try:
                reference = weakref.ref(fun, functools.partial(_forget, id(fun)))
            except TypeError:  # no weak references to it: nothing to share by
                return _wrap(fun, lambda: fun, tag)
            held = _wrappers[id(fun)] = (reference, {})
        reference, by_tag = held
        if tag not in by_tag:
            by_tag[tag] = _wrap(fun, reference, tag)
        return by_tag[tag]


def _forget(key: int, reference: weakref.ref[Any], wrappers: dict[int, Any] = _wrappers) -> None:
    """``wrappers`` is bound here: at interpreter exit the module's names may be gone before the last function."""
    held = wrappers.get(key)
    if held is not None and held[0] is reference:
        del wrappers[key]


def _wrap(fun: Callable[..., Any], reference: Callable[[], Any], tag: str) -> Callable[..., Any]:
    """A function that calls ``fun`` while not keeping it alive, with its signature and source, named for our hook."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return reference()(*args, **kwargs)

    functools.update_wrapper(wrapper, fun, updated=())
    wrapper.__name__ = TAG.sub("", _name(fun)) + tag
    wrapper.__qualname__ = getattr(fun, "__qualname__", wrapper.__name__)
    with_code: Any = inspect.unwrap(fun)
    while isinstance(with_code, functools.partial):
        with_code = inspect.unwrap(with_code.func)
    # JAX looks for the source line at the end of the chain of __wrapped__: a stand-in for ``fun`` has it.
    del wrapper.__dict__["__wrapped__"]
    code = getattr(with_code, "__code__", None)
    if code is not None:
        stand_in = types.SimpleNamespace(__code__=code, __name__=with_code.__name__)
        wrapper.__wrapped__ = stand_in  # type: ignore[attr-defined]
    try:
        wrapper.__signature__ = inspect.signature(fun)  # type: ignore[attr-defined]
    except (ValueError, TypeError):
        wrapper.__dict__.pop("__wrapped__", None)
    return wrapper


def _name(fun: Any) -> str:
    """As JAX names a function; objects by their class."""
    name = getattr(fun, "__name__", None)
    if name is None and isinstance(fun, functools.partial):
        return _name(fun.func)
    return type(fun).__name__ if name is None else str(name)


def _hide_from_tracebacks() -> None:
    """Keep the wrapper's frame out of JAX's filtered tracebacks and source locations."""
    try:
        from jax._src import traceback_util

        traceback_util.register_exclusion(__file__)
        from jax.extend import source_info_util

        source_info_util.register_exclusion(__file__)
    except (ImportError, AttributeError) as error:
        logger.debug("our frames stay in JAX's tracebacks: %s", error)


_hide_from_tracebacks()
