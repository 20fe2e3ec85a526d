"""XLA's and MLIR's parsers in a process of their own.

They end the process (a failed CHECK, a stack overflow) or loop for ever on some inputs: a dot of one operand, a
partition-id of the wrong type, flipped bits in MLIR bytecode. A child takes that fate, and the user gets one error.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any, NamedTuple

from hlo_memopt.hlo.errors import InputError, one_line, parser_message

TEXT, PROTO, STABLEHLO = "HLO text", "a module proto", "StableHLO"
_SECONDS, _SECONDS_PER_MB = 90, 10
_REJECTED = 3  # the child's exit status when it has something to say
_CODE = """
import json, sys, types
sys.path[:], package = json.loads(sys.argv[1])
sys.modules["hlo_memopt"] = types.ModuleType("hlo_memopt")  # spare the package's own imports: jax takes a second
sys.modules["hlo_memopt"].__path__ = [package]
from hlo_memopt.hlo.isolated import _child
_child(sys.argv[2])
"""


class Parsed(NamedTuple):
    """``module``: a serialized HloModuleProto that jaxlib read, or wrote."""

    module: bytes
    name: str
    scheduled: bool
    num_partitions: int = 1
    num_replicas: int = 1


def parse(kind: str, data: bytes, file: str, *, isolated: bool = True) -> Parsed:
    """Read ``data`` with jaxlib, in a child if ``isolated``. Raises `InputError`."""
    if not isolated or not sys.executable:
        return _parse_here(kind, data, file)
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    paths = [os.path.abspath(p) for p in sys.path]
    command = [sys.executable, "-I", "-c", _CODE, json.dumps([paths, package]), kind]
    try:
        limit = _SECONDS + _SECONDS_PER_MB * len(data) / 1e6
        # XLA_FLAGS with a flag that this jaxlib does not know would end the child, and a dump flag make it dump
        environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
        done = subprocess.run(command, input=data, capture_output=True, timeout=limit, env=environment)
    except subprocess.TimeoutExpired:
        raise InputError(file, f"is {kind} on which XLA's parser hangs", "it is damaged: dump it again") from None
    except OSError:  # no child can be started here
        return _parse_here(kind, data, file)
    head, _, tail = done.stdout.partition(b"\n")
    if done.returncode == 0:
        return Parsed(tail, *json.loads(head))
    if done.returncode == _REJECTED:
        raise InputError(file, *json.loads(head))
    said = done.stderr.decode(errors="replace")
    failed = re.search(r"Check failed: (.*)", said)
    if done.returncode > 0 and not failed and done.returncode < 128:  # not a crash: the child did not get that far
        last = one_line(said.strip().rsplit("\n", 1)[-1], 150)
        raise InputError(file, f"could not be read in a child process ({last})", "run hlo-memopt doctor")
    reason = f": {one_line(failed.group(1), 150)}" if failed else ""
    raise InputError(file, f"is {kind} that breaks XLA's parser{reason}", "it is damaged: dump it again")


def _child(kind: str) -> None:
    try:
        result = _parse_here(kind, sys.stdin.buffer.read(), "")
        answer: list[Any] = list(result[1:])
        out, status = json.dumps(answer).encode() + b"\n" + result.module, 0
    except InputError as error:
        out, status = json.dumps([error.problem, error.advice]).encode() + b"\n", _REJECTED
    sys.stdout.buffer.write(out)
    sys.stdout.buffer.flush()
    os._exit(status)


def _parse_here(kind: str, data: bytes, file: str) -> Parsed:
    if kind == STABLEHLO:
        from hlo_memopt.hlo.stablehlo import convert

        return convert(data, file)
    from jaxlib import _hlo

    try:
        if kind == TEXT:
            module = _hlo.hlo_module_from_text(data.decode())
            data = module.as_serialized_hlo_module_proto()
        else:
            module = _hlo.HloModule.from_serialized_hlo_module_proto(data)
        return Parsed(data, module.name, module.schedule() is not None)
    except Exception as error:
        newer = "dump it again, or upgrade jaxlib if a newer XLA wrote it"
        raise InputError(file, f"is {kind} that XLA does not accept: {parser_message(error)}", newer) from None
