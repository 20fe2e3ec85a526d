"""The state that the hook's parts share: tags, compiles in progress, plans made. Thread-safe."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import logging
import re
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hlo_memopt.options import Options

if TYPE_CHECKING:
    from hlo_memopt.planner.plan import Plan

logger = logging.getLogger("hlo_memopt")

TAG = re.compile(r"__memopt_([0-9a-f]{10})")
MARK = "hlo_memopt.compile"
_MARK_IN_PROTO = re.compile(re.escape(MARK).encode() + rb"\x12\x06([0-9]{6})")
_PLANS_KEPT = 100


@functools.cache
def salt(options: Options) -> str:
    """Ten hex digits from options and versions: equal in every process and on every host."""
    import jax
    import jaxlib

    from hlo_memopt import __version__

    text = repr((__version__, jax.__version__, jaxlib.__version__, sorted(dataclasses.asdict(options).items())))
    return hashlib.sha256(text.encode()).hexdigest()[:10]


@dataclasses.dataclass(eq=False)
class Compile:
    """One compile of a module that is ours.

    ``number`` marks the module (a frontend attribute), so that the callback, which may run on another thread, knows
    which compile it serves when several modules of one name are compiled at once.
    """

    name: str
    options: Options
    number: int = -1
    marked: bool = False  # the module bears our number
    seen: bool = False  # the callback was called
    raised: bool = False  # the callback failed the compile on purpose, because of ``error``
    platform: str = ""  # as the callback knows it
    aliased: bool = False  # outputs lie in donated arguments
    reloadable: bool = False  # the seam can serialize the executable and load it again
    carried: Any = None  # the module's aliasing, if XLA got it in another form, see ``donation``
    rewritten: bool = False  # XLA got another module from us
    kept: bool = False  # the executable in use is the rewritten one
    plan: Plan | None = None
    seconds: float = 0.0  # wall time of the callback: planning, rewriting, checking
    error: BaseException | None = None


class Registry:
    """Tags known in this process, compiles in progress, plans made."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._options: dict[str, Options] = {}
        self._active: dict[int, Compile] = {}
        self._plans: collections.deque[Plan] = collections.deque(maxlen=_PLANS_KEPT)
        self._said: set[str] = set()
        self._thread = threading.local()

    # Tags.

    def tag(self, options: Options) -> str:
        """The suffix for names of functions to be compiled with ``options``."""
        digits = salt(options)
        with self._lock:
            self._options[digits] = options
        return f"__memopt_{digits}"

    def tagged(self, name: str) -> Options | None:
        """The options that a module's name asks for; None if it has no tag made in this process."""
        found = TAG.findall(name)
        with self._lock:
            return self._options.get(found[-1]) if found else None

    # Compiles in progress.

    @contextlib.contextmanager
    def compiling(self, name: str, options: Options) -> Iterator[Compile]:
        """A compile in progress; its number is the smallest that is free, the same on all hosts as a rule."""
        compile_ = Compile(name, options)
        with self._lock:
            compile_.number = next(n for n in range(len(self._active) + 1) if n not in self._active)
            self._active[compile_.number] = compile_
        for records in getattr(self._thread, "collectors", ()):
            records.append(compile_)
        try:
            yield compile_
        finally:
            with self._lock:
                del self._active[compile_.number]

    def claim(self, data: bytes) -> Compile | None:
        """The compile in progress that a module given to the callback belongs to."""
        with self._lock:
            if not self._active:
                return None
        found = _MARK_IN_PROTO.search(data)
        with self._lock:
            if found is not None:
                compile_ = self._active.get(int(found[1]))
            else:
                # Where modules could not be marked: by name, if that is clear.
                name = module_name(data)
                same = [c for c in self._active.values() if c.name == name and not c.marked and not c.seen]
                compile_ = same[0] if len(same) == 1 else None
            if compile_ is not None:
                compile_.seen = True
            return compile_

    @contextlib.contextmanager
    def collecting(self) -> Iterator[list[Compile]]:
        """The compiles of ours that this thread starts inside."""
        collectors = self._thread.__dict__.setdefault("collectors", [])
        records: list[Compile] = []
        collectors.append(records)
        try:
            yield records
        finally:
            del collectors[next(i for i, c in enumerate(collectors) if c is records)]

    # Plans made.

    def remember(self, plan: Plan) -> None:
        with self._lock:
            self._plans.appendleft(plan)

    def plans(self) -> list[Plan]:
        with self._lock:
            return list(self._plans)

    # Things to be done or said once.

    def once(self, key: str) -> bool:
        """True the first time that it is asked about ``key``."""
        with self._lock:
            new = key not in self._said
            self._said.add(key)
            return new


def module_name(data: bytes) -> str:
    """The name in a serialized HloModuleProto, field 1, which serializers write first; "" if it is not there."""
    if data[:1] != b"\x0a":
        return ""
    length, at, shift = 0, 1, 0
    while at < len(data):
        length |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            break
    return data[at : at + length].decode(errors="replace")


registry = Registry()
