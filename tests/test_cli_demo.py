"""``demo`` and ``doctor``."""

from __future__ import annotations

import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_cli import ROWS, assert_one_line, call, pairs

from hlo_memopt.cli import console
from hlo_memopt.demo import NAMES, models
from hlo_memopt.demo import run as demo_run
from hlo_memopt.schedule.ilp_support import SOLVERS

# -- demo ----------------------------------------------------------------------------------------------------


def small_demo(step=pairs, should_fall=True):
    rows = [np.arange(20_000, dtype=np.int32) % (n + 5) for n in range(ROWS)]
    return models.Demo("pairs", step, (rows,), 0, should_fall)


def test_demo_side_by_side(monkeypatch):
    monkeypatch.setattr(models, "make", lambda name: small_demo())
    monkeypatch.setattr(demo_run, "_SECONDS", 0.1)
    result = call("demo", "--model", "unrolled")
    assert result.exit_code == 0, result.output
    assert "reported by XLA" in result.stdout and "predicted" in result.stdout
    assert "temp 781.5 KiB 156.2 KiB -80.0% reported by XLA" in " ".join(result.stdout.split())
    assert "to the bit, 9 arrays, after" in result.stdout and "ratio: median of" in result.stdout


def test_demo_trains_for_real(monkeypatch):
    """Losses and parameters of a small network go on from step to step, and are compared."""

    def tiny(name):
        rng = np.random.default_rng(0)
        params = [models._layer(rng, 16, 64), models._layer(rng, 64, 10)]

        def apply(p, x):
            return models._dense(p[1], jnp.tanh(models._dense(p[0], x)))

        y = rng.integers(0, 10, 32).astype(np.int32)
        return models._training("tiny", apply, params, rng.standard_normal((32, 16), np.float32), y, False)

    monkeypatch.setattr(demo_run, "_SECONDS", 0.1)
    demo = tiny("")
    outcome = demo_run.run(demo, jax.devices("cpu")[0], console.progress)
    assert outcome.different == () and outcome.steps >= 5 and outcome.arrays == 4 * 3 + 2
    step = jax.jit(demo.step)
    args = demo.args
    for _ in range(outcome.steps):
        params, state, loss = step(*args)
        args = (params, state, *args[2:])
    assert outcome.loss_before == outcome.loss_after == pytest.approx(float(loss), rel=1e-6)


def test_demo_that_computes_something_else_fails(monkeypatch):
    real = demo_run.compare

    def wrong(step, *args, **kwargs):
        import dataclasses

        def off_by_a_bit(rows):
            counts = step(rows)
            return [*counts[:-1], counts[-1].at[0].add(1)]

        other = jax.jit(off_by_a_bit).lower(*args).compile()
        return dataclasses.replace(real(step, *args, **kwargs), compiled_after=other)

    monkeypatch.setattr(models, "make", lambda name: small_demo())
    monkeypatch.setattr(demo_run, "_SECONDS", 0.1)
    monkeypatch.setattr(demo_run, "compare", wrong)
    result = call("demo")
    assert "DIFFER" in result.stdout and "in 1 of 9 arrays" in result.stdout
    assert_one_line(result, 1, "demo", "computes other bits", "[8]")


def test_demo_without_the_saving_it_should_show_fails(monkeypatch):
    monkeypatch.setattr(demo_run, "_SECONDS", 0.1)
    monkeypatch.setattr(models, "make", lambda name: small_demo(lambda rows: jnp.sort(rows[0]) + 1))
    assert_one_line(call("demo"), 1, "as much temp")
    monkeypatch.setattr(models, "make", lambda name: small_demo(lambda rows: jnp.sort(rows[0]) + 1, False))
    assert call("demo").exit_code == 0


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_demo_without_the_device(monkeypatch, platform):
    def none(name):
        raise RuntimeError(f"Unknown backend {name}")

    monkeypatch.setattr(jax, "devices", none)
    assert_one_line(call("demo", "--platform", platform), 2, f"hlo_memopt[{platform}]", "--platform cpu")


@pytest.mark.parametrize("name", NAMES)
def test_demo_models_carry_on(name):
    demo = models.make(name)
    results = jax.eval_shape(demo.step, *demo.args)
    carried = jax.tree.map(lambda a: (a.shape, a.dtype), demo.args[: demo.carried])
    assert jax.tree.map(lambda a: (a.shape, a.dtype), tuple(results)[: demo.carried]) == carried
    assert not demo.carried or results[-1].shape == ()


# -- doctor --------------------------------------------------------------------------------------------------


def test_doctor(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " --xla_dump_to=/nowhere")
    result = call("doctor")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert f"jax  {jax.__version__}".split() in [line.split() for line in lines]
    hook = next(line for line in lines if "planning inside jit" in line)
    assert hook.split()[0] == "ok" and "-80.0%" in hook and "results equal" in hook
    highs = next(line for line in lines if "HiGHS solver" in line)
    there = SOLVERS["highs"].loads()
    assert highs.split()[0] == ("ok" if there else "-") and ("17 expected" if there else "pip install") in highs
    assert any("--xla_dump_to" in line for line in lines) and lines[-1].startswith("Everything")


def test_doctor_tells_what_does_not_work(monkeypatch):
    import hlo_memopt

    def broken(*_, **__):
        raise RuntimeError("the hook\nis gone")

    monkeypatch.setattr(hlo_memopt, "compare", broken)
    monkeypatch.setitem(sys.modules, "mip", None)
    result = call("doctor")
    assert result.exit_code == 1
    highs = next(line for line in result.stdout.splitlines() if "HiGHS solver" in line)
    assert highs.split()[0] == "-" and "not installed" in highs and "pip install 'hlo_memopt[highs]'" in highs
    failed = [line for line in result.stdout.splitlines() if "FAILED" in line]
    assert len(failed) == 3 and all("the hook is gone" in line for line in failed[1:])
    assert result.stdout.splitlines()[-1] == "Does not work: integer programs, planning inside jit, donated arguments."
