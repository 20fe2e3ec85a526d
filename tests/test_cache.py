"""The persistent compilation cache: optimized and plain executables kept apart, and both found again."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import textwrap

import hook_fakes as fakes
import jax
import pytest
from test_hook import X, fresh, planner, warnings_of  # noqa: F401

import hlo_memopt
from hlo_memopt.hook import registry, scope

PROGRAM = """
import contextlib, json, sys
import jax, jax.numpy as jnp
import hlo_memopt, hook_fakes as fakes

def step(x):
    parts = [jnp.sin(x + i) @ x for i in range(4)]
    return parts[0] @ parts[3]

hits = []
jax.monitoring.register_event_listener(lambda name, **kw: hits.append(name) if name.endswith("/cache_hits") else None)
x = jax.ShapeDtypeStruct((64, 64), "float32")
strict = hlo_memopt.Options(strict=True)
report = []
with fakes.installed() as planner:
    for way in sys.argv[1:]:
        planner.calls.clear(), hits.clear()
        if way == "enabled":
            hlo_memopt.enable(strict)
        context = hlo_memopt.optimizing(strict) if way == "optimizing" else contextlib.nullcontext()
        with context:
            fun = hlo_memopt.jit(step, options=strict) if way == "tagged" else jax.jit(step)
            compiled = fun.lower(x).compile()
        hlo_memopt.disable()
        report.append([len(planner.calls), len(hits), fakes.entry_order(compiled.runtime_executable())])
print(json.dumps(report))
"""


def run(cache: pathlib.Path, *ways: str) -> list:
    env = {
        "PATH": "",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), *ways],
        cwd=pathlib.Path(__file__).parent,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_processes_share_a_cache(tmp_path):
    first = run(tmp_path, "plain", "optimizing", "tagged")
    second = run(tmp_path, "tagged", "enabled", "plain")
    (_, _, plain), (_, _, ours) = first[:2]
    assert plain != ours
    assert first == [[0, 0, plain], [1, 0, ours], [1, 0, ours]]
    # Found again, each its own, and the hook was not called.
    assert second == [[0, 1, ours], [0, 1, ours], [0, 1, plain]]


def test_a_cache_key_hook_of_the_users_stays(monkeypatch):
    from jax._src import cache_key

    monkeypatch.setattr(cache_key, "custom_hook", lambda: "mine")
    with hlo_memopt.optimizing():
        inside = cache_key.custom_hook()
        with hlo_memopt.optimizing(hlo_memopt.Options(effort="max")):
            assert cache_key.custom_hook() != inside
    assert cache_key.custom_hook() == "mine"
    assert inside.startswith("mine") and inside != "mine"
    chained = cache_key.custom_hook
    with hlo_memopt.optimizing():
        assert cache_key.custom_hook is chained  # not chained to itself


@pytest.mark.parametrize("cache", [None, "/nowhere"])
def test_without_that_hook_nothing_is_mixed(planner, caplog, monkeypatch, cache):  # noqa: F811
    """A JAX whose cache key we cannot reach: with a cache in use, untagged modules stay plain, said once."""
    from jax._src import cache_key

    monkeypatch.delattr(cache_key, "custom_hook")
    registry.registry._said -= {"no custom_hook", "cache not apart"}
    was = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", cache)
        with hlo_memopt.optimizing():
            decided = [scope.options_for("jit_step") for _ in range(2)]
            tagged = hlo_memopt.jit(fresh())._fun.__name__
            assert scope.options_for(tagged) is not None
    finally:
        jax.config.update("jax_compilation_cache_dir", was)
    assert decided == [hlo_memopt.Options() if cache is None else None] * 2
    assert len(warnings_of(caplog)) == (0 if cache is None else 1)


def test_plain_fallback_is_what_the_cache_gets(planner):  # noqa: F811
    planner.rewrite = fakes.garbage
    compiled = hlo_memopt.jit(fresh()).lower(X).compile()
    assert registry.MARK in compiled.as_text()  # one compile, the module untouched
    assert fakes.entry_order(compiled.runtime_executable()) == fakes.entry_order(
        jax.jit(fresh()).lower(X).compile().runtime_executable()
    )
