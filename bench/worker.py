"""Fresh subprocesses for measurements, and progress on a terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def run(module: str, task: dict[str, Any], timeout: float, platform: str = "cpu") -> dict[str, Any]:
    """Run `python -m module --worker TASK`; the last line of its output is the result, {"error": ...} if it failed."""
    env = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    if platform == "cpu":
        env["JAX_PLATFORMS"] = "cpu"
    command = [sys.executable, "-m", module, "--worker", json.dumps(task)]
    try:
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"error": f"no result within {timeout:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    told = done.stderr.strip().splitlines()
    reason = f": {told[-1]}" if told else ""
    if sys.stderr.isatty():
        print(*told[-30:], sep="\n", file=sys.stderr)
    return {"error": f"exit status {done.returncode}{reason}"}


def progress(text: str) -> None:
    """Say what is being measured, on a terminal only."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


def versions() -> str:
    """Python, jax and jaxlib versions and the number of cores, for a table's heading."""
    import jax
    import jaxlib

    python = ".".join(map(str, sys.version_info[:3]))
    return f"Python {python}, jax {jax.__version__}, jaxlib {jaxlib.__version__}, {os.cpu_count()} cores"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A markdown table; the first column is text, the others are numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write(text: str, out: Path | None) -> None:
    """Print a report, or write it to a file."""
    if out is None:
        print(text)
    else:
        out.write_text(text + "\n", encoding="utf-8")


def names(text: str, known: list[str]) -> list[str]:
    """A comma-separated list of models, checked."""
    chosen = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in chosen if name not in known]:
        raise SystemExit(f"no model {', '.join(unknown)}; there are {', '.join(known)}")
    return chosen
