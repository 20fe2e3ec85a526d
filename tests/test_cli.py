"""The command line: figures, files, exit statuses, and one line for every error."""

from __future__ import annotations

import json
import os
import pathlib
import pty
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from click.testing import CliRunner

from hlo_memopt.cli import console, optimize_command
from hlo_memopt.cli.main import cli
from hlo_memopt.hlo import proto
from hlo_memopt.hlo.read import read_module

ROWS = 3
SOURCE = pathlib.Path(__file__).name


def pairs(rows):
    """Nine independent rounds; XLA:CPU's own order keeps the indices of all of them alive at once."""
    return [jnp.bincount(a * 8 + b, length=64) for a in rows for b in rows]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The same program as StableHLO, as scheduled proto and as scheduled text, and XLA's temp for it."""
    folder = tmp_path_factory.mktemp("modules")
    lowered = jax.jit(pairs).lower([jax.ShapeDtypeStruct((20_000,), jnp.int32)] * ROWS)
    compiled = lowered.compile()
    (module,) = compiled.runtime_executable().hlo_modules()
    (folder / "f.mlir").write_text(lowered.as_text())
    (folder / "f.pb").write_bytes(module.as_serialized_hlo_module_proto())
    (folder / "f.txt").write_text(compiled.as_text())
    return types.SimpleNamespace(
        mlir=str(folder / "f.mlir"),
        pb=str(folder / "f.pb"),
        txt=str(folder / "f.txt"),
        temp=compiled.memory_analysis().temp_size_in_bytes,
    )


def call(*args, **extra):
    return CliRunner().invoke(cli, [str(a) for a in args], **extra)


def in_process(*args, **extra):
    """The real script in a process of its own, its streams piped."""
    command = [sys.executable, "-m", "hlo_memopt", *map(str, args)]
    return subprocess.run(command, capture_output=True, timeout=120, **extra)


def assert_one_line(result, status, *parts):
    assert result.exit_code == status, (result.stdout, result.stderr)
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("hlo-memopt: "), result.stderr
    assert "Traceback" not in result.stderr
    for part in parts:
        assert str(part) in lines[0], lines[0]


def order(data):
    message = proto.parse_module(data)
    names = {i.id: i.name for c in message.computations for i in c.instructions}
    return {s.key: [names[i] for i in s.value.instruction_ids] for s in message.schedule.sequences}


# -- inspect -------------------------------------------------------------------------------------------------


def test_inspect_of_a_compiled_module_shows_both_figures(files):
    result = call("inspect", files.mlir, "--top", "3")
    assert result.exit_code == 0 and result.stderr == "", result.output
    lines = result.stdout.splitlines()
    temps = [line for line in lines if line.split()[:1] == ["temp"]]
    assert len(temps) == 2 and all(f"{files.temp:,}" in line for line in temps)
    assert "predicted" in temps[0] and "reported by XLA; as predicted" in temps[1]
    assert any("the largest 3 of" in line for line in lines) and any("more" in line for line in lines)
    assert "compiled and scheduled here by XLA:CPU" in lines[1]
    assert "Another order saves temp" in lines[-1] and "lower bound" in lines[-1]
    assert f"{files.mlir}:" in result.stdout  # source lines are the text's own


def test_inspect_of_a_scheduled_module_names_source_lines(files):
    result = call("inspect", files.pb)
    assert result.exit_code == 0 and "scheduled as given" in result.stdout and "reported by XLA;" not in result.stdout
    assert f"{SOURCE}:" in result.stdout and "jit(pairs)/" in result.stdout
    assert "Alive at the peak, by source line" in result.stdout


def test_inspect_json_alone_on_stdout(files):
    result = call("inspect", files.pb, "--json", "-", "--top", "2")
    content = json.loads(result.stdout)
    assert result.exit_code == 0 and result.stderr == ""
    assert content["given"]["temp_bytes"] == content["peak_before_bytes"] == files.temp
    assert len(content["given"]["live"]) == 2 and content["given"]["peak"]["steps"] > 10
    assert content["compiled"] is False and content["temp_reported_bytes"] is None


def test_top_zero_prints_no_lists(files):
    result = call("inspect", files.pb, "--top", "0")
    assert result.exit_code == 0 and "Alive at the peak" not in result.stdout and "Sizes" in result.stdout


# -- optimize ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".pb", ".txt"])
@pytest.mark.parametrize("emit", ["schedule", "control-deps"])
def test_optimize_writes_what_it_promises(files, tmp_path, suffix, emit):
    out, figures = tmp_path / f"out{suffix}", tmp_path / "out.json"
    result = call("optimize", files.pb, "-o", out, "--emit", emit, "--json", figures)
    assert result.exit_code == 0 and result.stderr == "", result.output
    content = json.loads(figures.read_text())
    assert content["peak_after_bytes"] < 0.3 * content["peak_before_bytes"] == 0.3 * files.temp
    assert content["lower_bound_bytes"] <= content["peak_after_bytes"]
    assert {"module", "platform", "instructions", "gap", "fragmentation_bytes", "plan_seconds"} <= set(content)
    assert content["optimal"] in (True, False) and content["options"]["effort"] == "default"
    assert content["output"] == str(out) and content["emit"] == emit
    before, after = pathlib.Path(files.pb).read_bytes(), read_module(out)
    assert order(before) != order(after)
    again = json.loads(call("inspect", out, "--json", "-").stdout)
    assert again["given"]["temp_bytes"] == content["peak_after_bytes"]
    added = control_edges(after) - control_edges(before)
    assert bool(added) is (emit == "control-deps")


def control_edges(data):
    message = proto.parse_module(data)
    return sum(len(i.control_predecessor_ids) for c in message.computations for i in c.instructions)


def test_optimize_text_is_marked_scheduled(files, tmp_path):
    out = tmp_path / "out.hlo"
    assert call("optimize", files.mlir, "-o", out).exit_code == 0
    assert "is_scheduled=true" in out.read_text().splitlines()[0]


def test_what_xla_says_of_the_written_module(files, tmp_path):
    from hlo_memopt.hlo.compile import compile_scheduled_for_cpu

    out = tmp_path / "out.pb"
    content = json.loads(call("optimize", files.mlir, "-o", out, "--json", "-").stdout)
    assert content["compiled"] and content["temp_reported_bytes"] == files.temp
    assert compile_scheduled_for_cpu(out.read_bytes()).temp_bytes == content["peak_after_bytes"]


def test_nothing_gained_is_said_and_the_module_is_left_alone(files, tmp_path):
    first, second = tmp_path / "1.pb", tmp_path / "2.pb"
    call("optimize", files.pb, "-o", first)
    result = call("optimize", first, "-o", second)
    assert result.exit_code == 0 and "the module unchanged" in result.stdout
    assert "as good as any" in result.stdout or "No order that needs less was found" in result.stdout
    assert "lower bound" in result.stdout and second.read_bytes() == first.read_bytes()


def test_control_dependencies_are_written_for_a_good_order_too(files, tmp_path):
    first, second = tmp_path / "1.pb", tmp_path / "2.pb"
    call("optimize", files.pb, "-o", first)
    result = call("optimize", first, "-o", second, "--emit", "control-deps")
    assert result.exit_code == 0 and "its own order as control dependencies" in result.stdout
    before, after = (proto.parse_module(f.read_bytes()) for f in (first, second))
    chained = [
        sum(len(i.control_predecessor_ids) for c in m.computations for i in c.instructions) for m in (before, after)
    ]
    assert chained[1] > chained[0]
    assert sorted(s.key for s in before.schedule.sequences) == sorted(s.key for s in after.schedule.sequences)


def test_without_output_nothing_is_written(files, tmp_path):
    result = call("optimize", files.pb)
    assert result.exit_code == 0 and "Nothing was written" in result.stdout


def test_a_plan_that_fails_the_check_writes_nothing(files, tmp_path, monkeypatch):
    from hlo_memopt.planner.plan import Plan

    def backwards(self, data):
        message = proto.parse_module(data)
        for s in message.schedule.sequences:
            ids = list(s.value.instruction_ids)[::-1]
            del s.value.instruction_ids[:]
            s.value.instruction_ids.extend(ids)
        return proto.serialize(message)

    monkeypatch.setattr(Plan, "apply", backwards)
    out = tmp_path / "out.pb"
    out.write_bytes(b"old")
    result = call("optimize", files.pb, "-o", out)
    assert_one_line(result, 1, files.pb, "did not pass the check", "nothing was written")
    assert out.read_bytes() == b"old" and os.listdir(tmp_path) == ["out.pb"]


def test_a_dump_directory_and_a_choice_in_it(files, tmp_path):
    text = pathlib.Path(files.txt).read_text()
    (tmp_path / "module_0001.jit_f.cpu_after_optimizations.txt").write_text(text)
    small = jax.jit(lambda x: jnp.sort(x) + 1).lower(jnp.ones(9)).compile().as_text()
    (tmp_path / "module_0002.jit_small.cpu_after_optimizations.txt").write_text(small)
    chosen = call("optimize", tmp_path, "--json", "-", "--module", "small")
    assert chosen.exit_code == 0 and "lambda" in json.loads(chosen.stdout)["module"]
    assert chosen.stderr.count("\n") == 1 and "chose" in chosen.stderr
    assert json.loads(call("optimize", tmp_path, "--json", "-").stdout)["module"] == "jit_pairs"
    assert_one_line(call("optimize", tmp_path, "--module", "nosuch"), 2, "nosuch")
    assert_one_line(call("optimize", files.pb, "--module", "x"), 2, "--module")


# -- errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["inspect", "optimize"])
@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "no such file"), (b"", "is empty"), (b"hello", "is text"), (b"HloModule m\n\nENTRY {", ""), (b"\0\1", "")],
)
def test_bad_input(command, content, said, tmp_path):
    path = tmp_path / "input"
    if content is not None:
        path.write_bytes(content)
    assert_one_line(call(command, path), 2, path, said, "; ")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("optimize",), "INPUT"),
        (("frobnicate",), "frobnicate"),
        (("pack",), "INPUT"),
        (("inspect", "x", "--html", "y"), "--html"),
        (("optimize", "x", "--temp-limit", "4GiB"), "--temp-limit is not in this version"),
        (("optimize", "x", "--memory-limit", "4GiB"), "--memory-limit is not in this version"),
        (("optimize", "x", "--recompute", "cheap"), "--recompute cheap is not in this version"),
        (("optimize", "x", "--effort", "huge"), "huge"),
        (("optimize", "x", "--solver", "abacus"), "abacus"),
        (("optimize", "x", "--time-limit", "0"), "positive"),
        (("optimize", "x", "--time-limit", "inf"), "finite"),
        (("optimize", "x", "--platform", "abacus"), "abacus"),
        (("optimize", "x", "-o", "a.json"), ".txt"),
        (("optimize", "x", "-o", "-"), ".txt"),
        (("optimize", "x", "-o", "/nosuchfolder/a.pb"), "folder"),
        (("optimize", "x", "--json", "/"), "is a directory"),
        (("optimize", "x", "-o", "a.pb", "--json", "./a.pb"), "same file"),
        (("inspect", "x", "--top", "-1"), "--top"),
        (("demo", "--model", "gpt9"), "gpt9"),
    ],
)
def test_bad_usage(args, said):
    assert_one_line(call(*args), 2, said, "; ")


def test_unscheduled_module_for_a_platform_without_compiler(files):
    assert_one_line(
        call("optimize", files.mlir, "--platform", "cuda"), 2, files.mlir, "not scheduled", "--platform cpu"
    )


def test_without_a_cpu_backend(files):
    result = in_process("optimize", files.mlir, env={**os.environ, "JAX_PLATFORMS": "cuda"})
    # a plugin of JAX's may write too
    ours = [line for line in result.stderr.splitlines() if line.startswith(b"hlo-memopt:")]
    assert result.returncode == 2 and len(ours) == 1 and b"JAX_PLATFORMS=cuda,cpu" in ours[0]


def test_no_command_prints_help_and_is_bad_usage():
    result = call()
    assert result.exit_code == 2 and "Commands:" in result.stderr and result.stdout == ""


def test_help_offers_what_there_is():
    text = call("--help").stdout
    assert all(c in text for c in ("demo", "inspect", "optimize", "pack", "doctor"))
    assert "--html" not in call("inspect", "--help").stdout
    shown = call("optimize", "--help").stdout
    assert "--emit" in shown and "limit SIZE" not in shown and "--recompute" not in shown
    assert call("--version").stdout.startswith("hlo-memopt")


@pytest.mark.parametrize("error", [RuntimeError("a\nb"), RecursionError("deep"), KeyError("k")])
def test_a_mistake_of_ours_is_one_line_too(files, monkeypatch, error):
    monkeypatch.delenv("HLO_MEMOPT_TRACEBACK", raising=False)

    def fail(*_):
        raise error

    monkeypatch.setattr(optimize_command, "make_plan", fail)
    assert_one_line(call("optimize", files.pb), 1, "internal error", type(error).__name__, "HLO_MEMOPT_TRACEBACK=1")


def test_interrupt(files, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(optimize_command, "make_plan", interrupted)
    result = call("optimize", files.pb)
    assert result.exit_code == 130 and result.stderr.strip() == "hlo-memopt: interrupted" and not result.stdout


# -- the process ---------------------------------------------------------------------------------------------


def test_piped_output_is_plain_and_stdin_is_read(files):
    with open(files.pb, "rb") as stdin:
        result = in_process("inspect", "-", stdin=stdin, env={**os.environ, "COLUMNS": "20", "LC_ALL": "C"})
    assert result.returncode == 0 and result.stderr == b""
    assert b"\x1b" not in result.stdout and b"<stdin>" in result.stdout
    assert f"{files.temp:,}".encode() in result.stdout and "─".encode() not in result.stdout


def test_a_reader_that_goes_away_does_not_end_the_work(files, tmp_path):
    out = tmp_path / "out.pb"
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "hlo_memopt", "optimize", files.pb, "-o", str(out)]
    with os.fdopen(writing, "wb") as stdout:
        result = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, timeout=120)
    assert result.returncode == 0 and result.stderr == b"" and out.exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_full_disk(files):
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "hlo_memopt", "optimize", files.pb]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=120)
    assert result.returncode == 2 and result.stderr.startswith(b"hlo-memopt: <stdout>: cannot be written")
    assert result.stderr.count(b"\n") == 1


def test_json_into_a_pipe_does_not_replace_it(files, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert call("optimize", files.pb, "--json", pipe).exit_code == 0
    assert json.loads(os.read(reader, 1 << 16))["module"] == "jit_pairs"
    os.close(reader)
    assert pipe.is_fifo()
    assert_one_line(call("optimize", files.pb, "-o", str(pipe)), 2, pipe)


def test_terminal_gets_drawn_tables_with_whole_figures(capsys, monkeypatch):
    table = console.Table("Title", ("", "bytes"), frozenset({1}))
    table.add("a [bold]long[/] name " * 8, "123,456,789,012")
    table.add("b", "7")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    console.Out().table(table)
    lines = capsys.readouterr().out.splitlines()
    assert any("123,456,789,012" in line for line in lines) and "[bold]" in "".join(lines)
    short = next(line for line in lines if line.strip().startswith("b "))
    assert short.index("7") == next(line for line in lines if "123,456" in line).index("123,456,789,012") + 14


def test_progress_on_a_terminal_only(files):
    main, other = pty.openpty()
    command = [sys.executable, "-m", "hlo_memopt", "optimize", files.pb]
    env = {**os.environ, "TERM": "xterm"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=other, env=env)
    os.close(other)
    stdout, _ = process.communicate(timeout=120)
    seen = os.read(main, 1 << 16)
    os.close(main)
    assert process.returncode == 0 and b"planning" in seen and b"\x1b" in seen
    assert b"\x1b" not in stdout


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 << 20, "3.0 MiB"),
        (9999 << 20, "9999.0 MiB"),
        (20 << 30, "20.00 GiB"),
    ],
)
def test_size(count, text):
    assert console.size(count) == text
