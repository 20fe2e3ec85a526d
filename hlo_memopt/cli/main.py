"""``hlo-memopt``: the group of commands, and how whatever ends them becomes one line and an exit status."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import click

from hlo_memopt.cli.errors import BAD_INPUT, INTERRUPTED, NOT_HELD, Failed

_TRACEBACK = "HLO_MEMOPT_TRACEBACK"
_COMMANDS = {
    "demo": "A real training step, plain and optimized, side by side.",
    "inspect": "Where a module's memory goes.",
    "optimize": "Plan a module's schedule and write the module anew.",
    "pack": "Offsets for the buffers of a CSV file.",
    "doctor": "Versions, what works on this machine, what to install.",
}


class _Commands(click.Group):
    """Imports a command's module when it is asked for; every way out is one line and a status."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"hlo_memopt.cli.{cmd_name}_command").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> NoReturn:  # type: ignore[override]
        extra["standalone_mode"] = False
        extra.setdefault("prog_name", "hlo-memopt")
        sys.exit(_status(lambda: super(_Commands, self).main(args, *rest, **extra)))


@click.group(cls=_Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="hlo_memopt", prog_name="hlo-memopt")
@click.pass_context
def cli(ctx: click.Context) -> int:
    """Less temp memory for JAX programs: XLA's instruction schedule, planned anew.

    INPUT of inspect and optimize: HLO text, HloModuleProto or HloProto (also .gz), StableHLO text or bytecode, a
    directory written by XLA_FLAGS=--xla_dump_to=DIR, or - for standard input.

    Exit status: 0 done; 1 ran, but the result does not hold; 2 bad usage or input.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        return BAD_INPUT
    return 0


def main() -> int:
    """The ``hlo-memopt`` script."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller (>&-)
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (open to the end)
        stream = getattr(sys, name)
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="backslashreplace")
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)


def _status(run: Callable[[], Any]) -> int:
    """Run a command; its exit status. Errors go to standard error, one line each."""
    from hlo_memopt.cli.console import silence_stdout

    try:
        status = run()
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx is not None else "hlo-memopt"
        return _say(f"{_one_line(error.format_message()).rstrip('.')}; see {command} --help", error.exit_code)
    except click.ClickException as error:
        return _say(_one_line(error.format_message()), error.exit_code)
    except Failed as error:
        return _say(_one_line(str(error)), error.status)
    except (KeyboardInterrupt, click.Abort):
        return _say("interrupted", INTERRUPTED)
    except BrokenPipeError:
        silence_stdout()
        return 0
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO) and error.filename is None:
            silence_stdout()
            return _say(f"<stdout>: cannot be written ({error.strerror}); make room, or print elsewhere", BAD_INPUT)
        return _unexpected(error)
    except Exception as error:
        return _unexpected(error)


def _unexpected(error: Exception) -> int:
    """`InputError` (of whatever part found it), else a mistake of ours: also one line, but with a way to see more."""
    from hlo_memopt.hlo.errors import InputError

    if isinstance(error, InputError):
        return _say(_one_line(str(error)), BAD_INPUT)
    if os.environ.get(_TRACEBACK):
        traceback.print_exception(error)
    what = _one_line(f"{type(error).__name__}: {error}").rstrip(": ")
    return _say(f"internal error: {what}; run it again with {_TRACEBACK}=1 and report what it prints", NOT_HELD)


def _say(message: str, status: int) -> int:
    with contextlib.suppress(OSError):
        print(f"hlo-memopt: {message}", file=sys.stderr, flush=True)
    return status


def _one_line(text: str, limit: int = 500) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
