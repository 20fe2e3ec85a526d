"""``optimizing``, ``enable``, ``disable``: whose compiles are ours, and the caches that must know it.

The state is a ``jax.make_user_context``: JAX keeps a value per thread over one for the process, and has it in the keys
of its tracing, lowering and compilation caches, so that what was compiled plainly is compiled anew inside. For the
persistent cache, whose key knows nothing of it, ``jax._src.cache_key.custom_hook`` is chained; without that private
function nothing is rewritten here while a persistent cache is in use (tagged functions need no such help, their
module's name is in the key).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import jax

from hlo_memopt.hook.registry import logger, registry, salt
from hlo_memopt.options import Options


class Scope:
    """A value of the context, compared by identity, which costs nothing in JAX's dispatch.

    ``options`` None: compile plainly. ``wins``: also over the options of tagged functions.
    """

    __slots__ = ("options", "wins")

    def __init__(self, options: Options | None, wins: bool = False) -> None:
        self.options = options
        self.wins = wins

    def __repr__(self) -> str:
        return f"hlo_memopt.optimizing({self.options!r})"


_context: Any = jax.make_user_context(default_value=None)


@functools.cache
def _shared(options: Options) -> Scope:
    """One scope per options, so that entering again finds what was compiled before."""
    return Scope(options)


def options_for(name: str) -> Options | None:
    """How to compile the module ``name`` on this thread; None: plainly."""
    scope: Scope | None = _context.value
    if scope is not None and scope.wins:
        return scope.options
    tagged = registry.tagged(name)
    if tagged is not None or scope is None or scope.options is None:
        return tagged
    return scope.options if _cache_is_apart() else None


def inside(scope: Scope | None) -> contextlib.AbstractContextManager[Any]:
    """A context in which this thread's compiles go by ``scope``."""
    _prepare()
    return _context(scope)


class optimizing(contextlib.ContextDecorator):
    """Every ``jax.jit`` compile of this thread inside is planned, also in libraries (flax.nnx.jit, equinox, ...).

    >>> with hlo_memopt.optimizing():
    ...     state = train_step(state, batch)

    Functions that were compiled before are compiled anew inside, and the other way round afterwards. Scopes nest, the
    innermost counts; one object may be entered again. Also a decorator. Other threads: see ``enable``.
    """

    def __init__(self, options: Options | None = None) -> None:
        self._scope = _shared(checked(options))
        self._local = threading.local()

    def __enter__(self) -> None:
        context = inside(self._scope)
        context.__enter__()
        self._local.__dict__.setdefault("entered", []).append(context)

    def __exit__(self, *exc: Any) -> None:
        self._local.entered.pop().__exit__(*exc)


def enable(options: Options | None = None) -> None:
    """Plan every ``jax.jit`` compile of this process, in all threads, until ``disable``."""
    scope = _shared(checked(options))
    _prepare()
    _context.set_global(scope)


def disable() -> None:
    """End ``enable``. Functions compiled under it stay in JAX's caches for the next time."""
    _context.set_global(None)


def checked(options: Options | None) -> Options:
    if options is None:
        return Options()
    if not isinstance(options, Options):
        raise TypeError(f"options must be hlo_memopt.Options, not {options!r}")
    return options


def _prepare() -> None:
    from hlo_memopt.hook import seam

    seam.install()
    _chain_cache_key()


def _chain_cache_key() -> None:
    """Put our scope into the persistent cache's key, in addition to what a hook of someone else's puts there."""
    try:
        from jax._src import cache_key

        previous: Callable[[], str] = cache_key.custom_hook
    except (ImportError, AttributeError) as error:
        if registry.once("no custom_hook"):
            logger.debug("no way to tell JAX's persistent cache about us: %s", error)
        return
    if getattr(previous, "_hlo_memopt", False):
        return

    @functools.wraps(previous)
    def custom_hook() -> str:
        scope: Scope | None = _context.value
        if scope is None:
            return previous()
        return f"{previous()}|hlo_memopt:{scope.options and salt(scope.options)}:{scope.wins}"

    custom_hook._hlo_memopt = True  # type: ignore[attr-defined]
    cache_key.custom_hook = custom_hook


def _cache_is_apart() -> bool:
    """Whether the persistent cache keeps what is compiled here apart, or is not in use."""
    try:
        from jax._src import cache_key

        if getattr(cache_key.custom_hook, "_hlo_memopt", False):
            return True
    except (ImportError, AttributeError):
        pass
    if not (jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir):
        return True
    if registry.once("cache not apart"):
        logger.warning(
            "modules are compiled as XLA scheduled them: this JAX gives no way to keep them apart in the persistent "
            "compilation cache; unset jax_compilation_cache_dir, or use hlo_memopt.jit"
        )
    return False
