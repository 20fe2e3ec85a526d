"""From INPUT and --platform to a scheduled module, and from --json and -o to files: what inspect and optimize share."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hlo_memopt.cli.console import Out, note, progress
from hlo_memopt.cli.errors import Failed

if TYPE_CHECKING:
    from hlo_memopt.hlo.graph import Module
    from hlo_memopt.options import Options
    from hlo_memopt.planner.plan import Plan

PLATFORMS = ("cpu", "cuda", "tpu")
_F = TypeVar("_F", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Source:
    """A scheduled module. ``reported_temp``: XLA's figure, where the module was compiled here; else None."""

    name: str
    data: bytes = dataclasses.field(repr=False)
    platform: str
    platform_guessed: bool
    reported_temp: int | None
    num_partitions: int
    num_replicas: int

    @property
    def compiled(self) -> bool:
        """Whether the module came without a schedule and was compiled first."""
        return self.reported_temp is not None

    def describe(self) -> str:
        """How the module came to be, in a few words."""
        how = "compiled and scheduled here by XLA:CPU" if self.compiled else "scheduled as given"
        told = " (told by its contents; --platform to change)" if self.platform_guessed else ""
        return f"for {self.platform}{told}, {how}"


def source_options(command: _F) -> _F:
    """INPUT, --platform, --module, --effort, --solver, --time-limit, --json."""
    decorators = (
        click.argument("source", metavar="INPUT"),
        click.option(
            "--platform",
            type=click.Choice(PLATFORMS),
            help="Whose rules for memory to go by. Default: told by the module's contents; cpu if not scheduled.",
        ),
        click.option(
            "--module", "pattern", metavar="REGEX", help="Which module of a dump directory. Default: the largest."
        ),
        click.option(
            "--effort",
            type=click.Choice(("fast", "default", "max")),
            default="default",
            show_default=True,
            help="How much work the search may do.",
        ),
        click.option(
            "--solver",
            type=click.Choice(("cbc", "highs")),
            default="cbc",
            show_default=True,
            help="Of the integer programs; highs needs pip install 'hlo_memopt[highs]'.",
        ),
        click.option(
            "--time-limit", type=float, metavar="S", help="Seconds after which the search stops with what it has."
        ),
        click.option("--json", "json_path", metavar="FILE", help="Write the figures as JSON; - for standard output."),
    )
    for decorate in reversed(decorators):
        command = decorate(command)
    return command


def make_options(effort: str, solver: str, time_limit: float | None) -> Options:
    """Options, or a usage error."""
    from hlo_memopt.options import Options
    from hlo_memopt.schedule.ilp_support import solver_named

    if time_limit is not None and not math.isfinite(time_limit):
        raise click.UsageError(f"time_limit must be a finite number, not {time_limit}", click.get_current_context())
    try:
        solver_named(solver)
        return Options(effort=effort, solver=solver, time_limit=time_limit)  # type: ignore[arg-type]
    except ValueError as error:
        raise click.UsageError(str(error), click.get_current_context()) from None


def load(source: str, platform: str | None, pattern: str | None) -> Source:
    """Read INPUT; compile it if it has no schedule. Raises `InputError` or `Failed`."""
    from hlo_memopt.hlo.read import read_input

    if pattern is not None and os.path.isfile(source):
        raise click.UsageError("--module chooses in a directory, and INPUT is a file", click.get_current_context())
    with progress(f"reading {source}"):
        given = read_input(source, module=pattern)
        told = _told_platform(given.module) if given.scheduled else None
    if given.note:
        note(f"{given.source}: {given.note}")
    if given.scheduled:
        if platform and told and platform != told:
            note(f"{given.source}: looks like a module of XLA:{told.upper()}, and is taken for {platform} as you say")
        chosen = platform or told or "cpu"
        return Source(
            given.source, given.module, chosen, platform is None, None, given.num_partitions, given.num_replicas
        )
    if platform not in (None, "cpu"):
        problem = f"is not scheduled, and this version compiles for cpu only, not for {platform}"
        advice = "give the scheduled module (XLA_FLAGS=--xla_dump_to=DIR where it runs), or use --platform cpu"
        raise Failed(given.source, problem, advice)
    start_cpu(given.source)
    from hlo_memopt.hlo.compile import compile_for_cpu

    with progress(f"compiling {given.name} with XLA:CPU"):
        compiled = compile_for_cpu(given)
    return Source(
        given.source,
        compiled.module,
        "cpu",
        False,
        compiled.temp_bytes,
        compiled.num_partitions,
        compiled.num_replicas,
    )


def start_cpu(subject: str) -> Any:
    """JAX's CPU device. Other backends, which take seconds and a card's memory, start only if the user named them."""
    import jax

    if not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")
    try:
        return jax.devices("cpu")[0]
    except Exception:  # RuntimeError, or AssertionError where no backend at all starts
        named = jax.config.jax_platforms
        problem = f"JAX starts no CPU backend: JAX_PLATFORMS is {named!r}"
        raise Failed(subject, problem, f"set JAX_PLATFORMS={named},cpu") from None


def _told_platform(data: bytes) -> str | None:
    """The platform whose compiler made a scheduled module, by marks that only it leaves; None: cannot tell."""
    from hlo_memopt.hlo.graph import Module

    module: Module = Module.from_bytes(data)
    for computation_id in module.schedule:
        for instruction in module.computations[computation_id].instructions:
            if any(s.layout is not None and s.layout.tiles for _, s in instruction.shape.leaves()):
                return "tpu"
            if b'"operation_queue_id"' in instruction.backend_config:
                return "cuda"
            if b'"outer_dimension_partitions"' in instruction.backend_config:
                return "cpu"
    return None


def make_plan(source: Source, options: Options) -> Plan:
    """Plan the module; what cannot be planned is a fault of the input."""
    from hlo_memopt.planner.plan import plan_module

    with progress("planning: reading the liveness, searching for an order"):
        return understood(source, lambda: plan_module(source.data, source.platform, options))


_R = TypeVar("_R")


def understood(source: Source, run: Callable[[], _R]) -> _R:
    """``run()``; a ValueError of the liveness model becomes the input's."""
    try:
        return run()
    except ValueError as error:
        advice = f"check that it is a module scheduled for {source.platform}, or report it"
        raise Failed(source.name, f"cannot be analysed: {error}", advice) from error


# -- files ---------------------------------------------------------------------------------------------------


def check_target(path: str | None, option: str, suffixes: tuple[str, ...] = ()) -> None:
    """Refuse, before any work, a file that could not be written after it."""
    if path is None or (path == "-" and not suffixes):
        return
    if suffixes and not path.endswith(suffixes):
        raise Failed(path, f"has a suffix that names no format of {option}", f"end the name in {', '.join(suffixes)}")
    if os.path.isdir(path):
        raise Failed(path, "is a directory", f"give {option} a file name")
    if os.path.exists(path) and not os.path.isfile(path):
        if suffixes:
            raise Failed(path, "is no regular file", f"give {option} a file name")
        return
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(folder):
        raise Failed(path, "cannot be written: its folder does not exist", "create the folder first")
    if not os.access(folder, os.W_OK):
        raise Failed(path, "cannot be written: no permission in its folder", "choose another place")


def write_json(path: str, content: dict[str, Any], out: Out) -> None:
    """One object, to a file (whole or not at all), a device or pipe, or standard output (``-``)."""
    text = json.dumps(content, indent=2, allow_nan=False)
    if path == "-":
        out.text(text)
        return
    if os.path.exists(path) and not os.path.isfile(path):  # /dev/null, /dev/fd/63, a named pipe: not to be replaced
        try:
            with open(path, "w") as stream:
                stream.write(text + "\n")
        except OSError as error:
            raise Failed(path, f"cannot be written ({error.strerror})", "choose another place") from None
        return
    from hlo_memopt.hlo.write import write_atomically

    write_atomically(text.encode() + b"\n", path)


def plan_fields(source: Source, plan: Plan) -> dict[str, Any]:
    """What the JSON of inspect and optimize have in common."""
    return {
        "input": source.name,
        **plan.to_json(),
        "platform_guessed": source.platform_guessed,
        "compiled": source.compiled,
        "temp_reported_bytes": source.reported_temp,
    }
