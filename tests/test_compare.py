"""compare: XLA's figures for both compiles, our predictions, and the seconds."""

from __future__ import annotations

import functools
import pathlib

import hook_fakes as fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_hook import X, assert_same, fresh, planner, program  # noqa: F401

import hlo_memopt
from hlo_memopt.hook import callback, registry


def test_figures_are_xlas(planner):  # noqa: F811
    result = hlo_memopt.compare(fresh(), X)
    plain = jax.jit(fresh()).lower(X).compile()
    assert result.temp_before == plain.memory_analysis().temp_size_in_bytes > 0
    assert result.temp_after == result.compiled_after.memory_analysis().temp_size_in_bytes
    assert result.plan is planner.calls[-1] is hlo_memopt.plans()[0]
    assert (result.predicted_before, result.predicted_after) == (200, 100)
    assert 0 < result.plan_seconds < result.compile_seconds_after and result.compile_seconds_before > 0
    assert result.platform == "cpu" and result.error is None
    assert result.saving == pytest.approx(1 - result.temp_after / result.temp_before)
    assert_same(result.compiled_before(X), result.compiled_after(X))
    orders = [fakes.entry_order(c.runtime_executable()) for c in (result.compiled_before, result.compiled_after)]
    assert orders[0] != orders[1]


def test_text_says_who_measured(planner):  # noqa: F811
    text = str(hlo_memopt.compare(fresh(), X))
    assert "reported by XLA" in text and "predicted by hlo_memopt" in text and "step on cpu" in text
    assert "KiB" in text and "not optimized" not in text


def test_shapes_and_arguments_of_jit_and_of_the_function(planner):  # noqa: F811
    def step(state, x, *, scale, mode):
        return state + x @ x * scale if mode == "add" else state

    shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
    result = hlo_memopt.compare(
        step, shape, shape, scale=jnp.float32(2), mode="add", donate_argnums=0, static_argnames="mode"
    )
    for compiled in (result.compiled_before, result.compiled_after):
        assert compiled.memory_analysis().alias_size_in_bytes == X.nbytes


def test_again_is_compiled_again(planner):  # noqa: F811
    body = fresh()
    jitted = jax.jit(body)
    jitted(X)
    results = [hlo_memopt.compare(f, X) for f in (body, body, jitted, jitted)]
    assert len(planner.calls) == 4
    assert len({r.temp_before for r in results}) == len({r.temp_after for r in results}) == 1
    jitted(X)
    assert len(planner.calls) == 4


def test_jitted_functions_keep_their_arguments(planner):  # noqa: F811
    def step(state, n):
        return state @ state * n

    for wrapped in (
        jax.jit(step, donate_argnums=0, static_argnums=1),
        hlo_memopt.jit(step, donate_argnums=0, static_argnums=1, options=hlo_memopt.Options(effort="max")),
    ):
        result = hlo_memopt.compare(wrapped, X, 3)
        assert result.compiled_before.memory_analysis().alias_size_in_bytes == X.nbytes
        orders = [fakes.entry_order(c.runtime_executable()) for c in (result.compiled_before, result.compiled_after)]
        assert callback.loses_donation("cpu") or len(orders[0]) == len(orders[1])
    assert [c.options.effort for c in planner.calls] == ["default", "max"]
    hlo_memopt.compare(wrapped, X, 3, options=hlo_memopt.Options(effort="fast"))
    assert planner.calls[-1].options.effort == "fast"
    with pytest.raises(ValueError, match="leave out donate_argnums"):
        hlo_memopt.compare(wrapped, X, 3, donate_argnums=0)


def test_libraries_jits(planner):  # noqa: F811
    nnx, eqx = pytest.importorskip("flax.nnx"), pytest.importorskip("equinox")

    @nnx.jit
    def nnx_step(model, x):
        return model(x) @ model(x + 1)

    @eqx.filter_jit
    def eqx_step(model, x):
        return jax.vmap(model)(x) @ x

    for fun, model in (
        (nnx_step, nnx.Linear(64, 64, rngs=nnx.Rngs(0))),
        (eqx_step, eqx.nn.MLP(64, 64, 64, 2, key=jax.random.key(0))),
    ):
        result = hlo_memopt.compare(fun, model, X)
        assert result.temp_before > 0 and result.plan is not None and result.plan.module == f"jit_{fun.__name__}"


def test_failure_of_ours_shows(planner):  # noqa: F811
    planner.fail = ZeroDivisionError("no plan today")
    result = hlo_memopt.compare(fresh(), X)
    assert result.plan is None and result.temp_after == result.temp_before
    assert isinstance(result.error, ZeroDivisionError) and "no plan today" in str(result)
    with pytest.raises(hlo_memopt.PlanError, match="no plan today"):
        hlo_memopt.compare(fresh(), X, options=hlo_memopt.Options(strict=True))


def test_platform(planner):  # noqa: F811
    assert hlo_memopt.compare(fresh(), X, platform="cpu").platform == "cpu"
    with pytest.raises(ValueError, match="'rocm' is no backend of this process, whose default is 'cpu'"):
        hlo_memopt.compare(fresh(), X, platform="rocm")
    assert planner.names() == ["jit_step"]


def test_persistent_cache_does_not_answer(planner, tmp_path):  # noqa: F811
    from jax.experimental.compilation_cache import compilation_cache

    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs", "jax_enable_compilation_cache")
    was = {n: getattr(jax.config, n) for n in names}
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        compilation_cache.reset_cache()
        jax.jit(fresh()).lower(X).compile()
        before = sorted(p.name for p in pathlib.Path(tmp_path).iterdir())
        assert before  # the cache works
        for _ in range(2):
            hlo_memopt.compare(fresh(), X)
        assert len(planner.calls) == 2
        assert sorted(p.name for p in pathlib.Path(tmp_path).iterdir() if p.name in before) == before
        assert not [p for p in pathlib.Path(tmp_path).iterdir() if p.name not in before]
        assert jax.config.jax_enable_compilation_cache
        jax.jit(lambda x: x + 17).lower(X).compile()
        assert len(list(pathlib.Path(tmp_path).iterdir())) > len(before)  # and works again
    finally:
        for name, value in was.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_plan_takes_bytes_paths_and_modules(planner, monkeypatch, tmp_path):  # noqa: F811
    compiled = jax.jit(fresh()).lower(X).compile()
    module = compiled.runtime_executable().hlo_modules()[0]
    data = module.as_serialized_hlo_module_proto()
    options = hlo_memopt.Options(effort="fast")
    for given in (data, bytearray(data), module):
        made = hlo_memopt.plan(given, platform="tpu", options=options)
        assert (made.module, made.platform, made.options) == ("jit_step", "tpu", options)
        assert hlo_memopt.plans()[0] is made
    with pytest.raises(TypeError, match="bytes, a path or a jaxlib HloModule"):
        hlo_memopt.plan(3)

    import sys
    import types

    read = types.SimpleNamespace(read_module=lambda path: pathlib.Path(path).read_bytes())
    monkeypatch.setitem(sys.modules, "hlo_memopt.hlo.read", read)
    path = tmp_path / "module.pb"
    path.write_bytes(data)
    assert hlo_memopt.plan(path).module == hlo_memopt.plan(str(path)).module == "jit_step"


def test_plan_class_is_public():
    from hlo_memopt.planner.plan import Plan

    assert hlo_memopt.Plan is Plan
    with pytest.raises(AttributeError, match="no_such_name"):
        hlo_memopt.no_such_name  # noqa: B018
    assert set(hlo_memopt.__all__) <= {*dir(hlo_memopt), "Plan"}


def test_nothing_to_save():
    result = functools.partial(
        hlo_memopt.comparison.Comparison, "f", "cpu", 0, 0, None, None, 1.0, 1.0, 0.0, None, None, None, None
    )()
    assert result.saving == 0 and "-" in str(result)
    assert np.isfinite(result.saving)
    assert registry.registry.once("test_nothing_to_save") is True
    assert registry.registry.once("test_nothing_to_save") is False
