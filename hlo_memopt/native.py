"""Inner loops compiled with numba: imported when first needed, its cache used where there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def compiled(function: Callable[..., Any], helpers: Iterable[Callable[..., Any]] = ()) -> Callable[..., Any]:
    """``function``, compiled (seconds) or read from numba's cache.

    ``helpers``: the functions of its module that it calls, each before those that call it; the module's names are bound
    to what they compile to. Raises ImportError where numba does not load.
    """
    import numba

    for helper in helpers:
        function.__globals__[helper.__name__] = numba.njit(helper)
    try:
        cached = numba.njit(cache=True)(function)
    except RuntimeError:  # no directory to keep it in
        return numba.njit(function)

    def run(*arguments: Any) -> Any:
        try:
            return cached(*arguments)
        except OSError:  # the cache could not be written; what was compiled is there all the same
            return cached(*arguments)

    return run
