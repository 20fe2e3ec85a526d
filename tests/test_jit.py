"""hlo_memopt.jit is jax.jit, and optimizing() / enable() reach every compile inside."""

from __future__ import annotations

import concurrent.futures
import functools
import gc
import inspect
import logging
import subprocess
import sys
import textwrap
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_hook import X, assert_same, fresh, planner, program, warnings_of  # noqa: F401

import hlo_memopt
from hlo_memopt.hook import registry, scope, tagged

STRICT = hlo_memopt.Options(strict=True)
jit = functools.partial(hlo_memopt.jit, options=STRICT)


def test_it_is_a_jit_object(planner):  # noqa: F811
    def step(x, y=2):
        """Takes a step."""
        return x * y

    ours, theirs = jit(step), jax.jit(step)
    assert type(ours) is type(theirs)
    assert ours.__wrapped__ is step and (ours.__name__, ours.__doc__) == ("step", "Takes a step.")
    assert ours.__qualname__ == theirs.__qualname__ and ours.__module__ == theirs.__module__
    assert inspect.signature(ours) == inspect.signature(theirs)
    assert ours._jit_info.fun_sourceinfo == theirs._jit_info.fun_sourceinfo
    assert_same(ours(X, y=3), X * 3)
    assert ours.eval_shape(X).shape == X.shape
    assert ours.trace(X).jaxpr.eqns and "__memopt_" in ours.lower(X).as_text()
    assert_same(ours.lower(X).compile()(X), X * 2)


def test_dispatch_is_the_cpp_path(planner):  # noqa: F811
    """After the first call, calls do not come back to Python: no tracing, no cache_miss."""
    step = jit(fresh())
    step(X)
    x = jax.device_put(X)
    step(x)
    assert step._cache_size() >= 1
    calls = []

    def tracer(frame, event, arg):
        if event == "call":
            calls.append(frame.f_code.co_name)

    sys.setprofile(tracer)
    try:
        step(x)
    finally:
        sys.setprofile(None)
    assert calls == []


def test_decorators(planner):  # noqa: F811
    @hlo_memopt.jit
    def bare(x):
        return x + 1

    @hlo_memopt.jit(static_argnames="n", options=STRICT)
    def with_arguments(x, n):
        return x + n if n > 1 else x

    @functools.partial(hlo_memopt.jit, static_argnums=1)
    def through_partial(x, n):
        return x * n if n > 1 else x

    assert_same((bare(X), with_arguments(X, 2), through_partial(X, 3)), (X + 1, X + 2, X * 3))
    assert_same(with_arguments(X, n=1), X)


@pytest.mark.parametrize(
    "static",
    [{"static_argnums": -1}, {"static_argnums": (1,)}, {"static_argnames": "mode"}, {"static_argnames": ["mode"]}],
)
def test_static_arguments(planner, static):  # noqa: F811
    def step(x, mode):
        return x + 1 if mode == "add" else x * 3

    ours = jit(step, **static)
    assert_same((ours(X, "add"), ours(X, "times")), (X + 1, X * 3))
    if "static_argnames" in static or static["static_argnums"] == (1,):
        assert_same(ours(X, mode="add"), X + 1)


def test_donation(planner):  # noqa: F811
    def step(state, x):
        return {"w": state["w"] + x @ x, "n": state["n"] + 1}

    for how in ({"donate_argnums": 0}, {"donate_argnames": "state"}):
        state = {"w": jnp.asarray(X), "n": jnp.zeros(())}
        want = jax.jit(step)(state, X)
        got = hlo_memopt.jit(step, **how)(state, X)
        assert_same(got, want)
        assert state["w"].is_deleted()
    assert len(planner.calls) == 1


def test_other_jit_arguments(planner):  # noqa: F811
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    body = fresh()
    for kwargs in (
        {"in_shardings": place, "out_shardings": place},
        {"keep_unused": True},
        {"inline": True},
        {"compiler_options": {"xla_cpu_enable_fast_math": False}},
    ):
        assert_same(jit(body, **kwargs)(X), jax.jit(body, **kwargs)(X))
    two = jit(lambda x, y: x + 1, keep_unused=True).lower(X, X).compile()
    assert len(two.input_shardings[0]) == 2 and two.memory_analysis().argument_size_in_bytes == 2 * X.nbytes


def test_wrong_use_is_refused_as_by_jax():
    def generator(x):
        yield x

    for wrong in (3, generator, staticmethod(fresh())):
        with pytest.raises(TypeError) as theirs:
            jax.jit(wrong)
        with pytest.raises(TypeError) as ours:
            hlo_memopt.jit(wrong)
        assert str(ours.value) == str(theirs.value)
    with pytest.raises(TypeError, match="no_such"):
        hlo_memopt.jit(fresh(), no_such=1)
    with pytest.raises(TypeError, match=r"hlo_memopt\.Options"):
        hlo_memopt.jit(fresh(), options={"effort": "max"})
    with pytest.raises(TypeError, match=r"hlo_memopt\.Options"):
        hlo_memopt.optimizing("max")


def test_traces_are_shared_as_with_jax(planner):  # noqa: F811
    traces = []

    def step(x):
        traces.append(1)
        return x + 1

    for _ in range(3):
        jit(step)(X)
    assert len(traces) == 1
    assert jit(step)._fun is jit(step)._fun is not hlo_memopt.jit(step)._fun
    hlo_memopt.jit(step)(X)  # other options, another module
    assert len(traces) == 2 and len(planner.calls) == 2


def test_functions_are_not_kept_alive(planner):  # noqa: F811
    step = fresh()
    ours = jit(step)
    ours(X)
    gone, key = weakref.ref(step), id(step)
    del step
    assert_same(ours(X), jax.jit(program)(X))  # the jit object keeps it
    assert gone() is not None and key in tagged._wrappers
    del ours
    gc.collect()
    assert gone() is None and key not in tagged._wrappers


class Model:
    def __init__(self, scale):
        self.scale = scale

    def apply(self, x):
        return x * self.scale

    def __call__(self, x):
        return x + self.scale


class Slotted:
    __slots__ = ()

    def __call__(self, x):
        return x + 1


def test_callables_of_all_kinds(planner):  # noqa: F811
    model = Model(3)
    assert_same(jit(model.apply)(X), X * 3)
    assert_same(jit(model)(X), X + 3)
    assert_same(jit(Slotted())(X), X + 1)
    assert_same(jit(functools.partial(lambda n, x: x * n, 4))(X), X * 4)
    assert_same(jit(lambda x: x - 1)(X), X - 1)
    assert_same(jit(jnp.square)(X), jnp.square(X))
    assert_same(jit(jax.jit(lambda x, n: x * n, static_argnums=1), static_argnums=1)(X, 2), X * 2)
    twice = jit(hlo_memopt.jit(fresh()))
    assert_same(twice(X), jax.jit(program)(X))
    assert planner.names()[-1].count("__memopt_") == 1
    assert "jit_Model__memopt_" in " ".join(planner.names())


def test_nesting(planner):  # noqa: F811
    def body(x):
        return jnp.sin(x @ x).sum()

    step, plain = jit(body), jax.jit(body)
    assert_same(jax.grad(step)(X), jax.grad(plain)(X))
    assert planner.calls and all("body__memopt_" in n for n in planner.names())
    batch = np.stack([X, X + 1])
    assert_same(jax.vmap(step)(batch), jax.vmap(plain)(batch))
    assert_same(jax.jit(jax.value_and_grad(step))(X), jax.jit(jax.value_and_grad(plain))(X))
    assert_same(jit(jax.value_and_grad(step))(X), jax.jit(jax.value_and_grad(plain))(X))

    def loop(fun):
        return jax.lax.scan(lambda c, x: (c + fun(x), c), jnp.zeros(()), batch)

    assert_same(loop(step), loop(plain))
    with jax.disable_jit():
        assert_same(step(X), jnp.sin(X @ X).sum())


def test_inside_an_outer_jit_the_outer_decides(planner, caplog):  # noqa: F811
    inner = jit(fresh())
    registry.registry._said.discard("inlined")
    with caplog.at_level(logging.DEBUG, logger="hlo_memopt"):
        for _ in range(2):
            jax.jit(lambda x: inner(x)[0] + 1)(X)
    assert planner.calls == []
    said = [r.getMessage() for r in caplog.records if "inlined" in r.getMessage()]
    assert len(said) == 1 and "step__memopt_" in said[0]


def test_clear_cache(planner):  # noqa: F811
    step = jit(fresh())
    step(X)
    step.clear_cache()
    step(X)
    assert len(planner.calls) == 2


def test_export(planner):  # noqa: F811
    from jax import export

    step = jit(fresh())
    exported = export.export(step)(jax.ShapeDtypeStruct(X.shape, X.dtype))
    assert_same(exported.call(X), jax.jit(program)(X))
    planner.calls.clear()
    assert_same(jit(exported.call)(X), jax.jit(program)(X))
    assert len(planner.calls) == 1
    pytest.importorskip("flatbuffers")
    assert_same(export.deserialize(exported.serialize()).call(X), jax.jit(program)(X))


def test_tag_is_the_same_in_every_process():
    code = "import hlo_memopt; from hlo_memopt.hook.registry import salt; print(salt(hlo_memopt.Options(effort='max')))"
    out = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PATH": ""}, check=True, capture_output=True
        ).stdout
        for seed in ("1", "2")
    }
    assert out == {registry.salt(hlo_memopt.Options(effort="max")).encode() + b"\n"}
    assert registry.salt(hlo_memopt.Options()) != registry.salt(hlo_memopt.Options(effort="max"))


def test_error_in_the_function_is_the_users(planner):  # noqa: F811
    def step(x):
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        jit(step)(X)


def test_optimizing_compiles_anew_and_back(planner):  # noqa: F811
    step = jax.jit(fresh())
    plain = step(X)
    assert planner.calls == []
    for _ in range(2):
        with hlo_memopt.optimizing(STRICT):
            assert_same(step(X), plain)
        assert_same(step(X), plain)
    assert planner.names() == ["jit_step"]  # compiled once inside; the second time found again
    with hlo_memopt.optimizing(hlo_memopt.Options(effort="max")):
        step(X)
    assert len(planner.calls) == 2 and planner.calls[1].options.effort == "max"


def test_optimizing_nests_and_is_a_decorator(planner):  # noqa: F811
    outer, inner = hlo_memopt.Options(effort="fast"), hlo_memopt.Options(effort="max")

    def now():
        return scope.options_for("jit_any")

    again = hlo_memopt.optimizing(outer)
    with again:
        assert now() is not None and now() == outer
        with hlo_memopt.optimizing(inner), again:
            assert now() == outer
        with again:
            assert now() == outer
        assert now() == outer
    assert now() is None
    assert hlo_memopt.optimizing(inner)(now)() == inner
    with pytest.raises(LookupError), hlo_memopt.optimizing(inner):
        raise LookupError
    assert now() is None


def test_tagged_options_win_over_optimizing(planner):  # noqa: F811
    with hlo_memopt.optimizing(hlo_memopt.Options(effort="max")):
        hlo_memopt.jit(fresh(), options=hlo_memopt.Options(effort="fast"))(X)
    assert [c.options.effort for c in planner.calls] == ["fast"]


def test_enable_reaches_all_threads(planner):  # noqa: F811
    step = jax.jit(fresh())
    plain = step(X)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(step, X).result()
        try:
            hlo_memopt.enable(STRICT)
            assert_same(pool.submit(step, X).result(), plain)
            assert planner.names() == ["jit_step"]
            assert_same(step(X), plain)
            planner.calls.clear()
            hlo_memopt.disable()
            pool.submit(jax.jit(fresh()), X).result()
            jax.jit(fresh())(X)
            step(X)
            assert planner.calls == []
        finally:
            hlo_memopt.disable()


def test_optimizing_does_not_slow_dispatch(planner):  # noqa: F811
    """The value in JAX's key has no Python hash or equality to call."""
    value = scope._shared(STRICT)
    assert type(value).__hash__ is object.__hash__ and type(value).__eq__ is object.__eq__
    assert scope._shared(hlo_memopt.Options(strict=True)) is value


def test_lowered_outside_compiled_inside(planner):  # noqa: F811
    lowered = jax.jit(fresh()).lower(X)
    with hlo_memopt.optimizing(STRICT):
        compiled = lowered.compile()
    assert planner.names() == ["jit_step"]
    assert_same(compiled(X), jax.jit(program)(X))


def test_flax_nnx_and_equinox(planner):  # noqa: F811
    nnx, eqx = pytest.importorskip("flax.nnx"), pytest.importorskip("equinox")
    layer = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    module = eqx.nn.MLP(64, 64, 64, 2, key=jax.random.key(0))

    @nnx.jit
    def nnx_step(model, x):
        return model(x) @ model(x + 1)

    @eqx.filter_jit
    def eqx_step(model, x):
        return jax.vmap(model)(x) @ x

    plain = nnx_step(layer, X), eqx_step(module, X)
    assert planner.calls == []
    with hlo_memopt.optimizing(STRICT):
        assert_same((nnx_step(layer, X), eqx_step(module, X)), plain)
    assert {"jit_nnx_step", "jit_eqx_step"} <= set(planner.names())


def test_sharding_on_several_devices():
    """Two virtual devices: in_shardings, shard_map and collectives; a module's own frontend attributes survive."""
    code = """
    import functools, jax, jax.numpy as jnp, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P
    import hlo_memopt, hook_fakes as fakes
    jax.config.update("jax_num_cpu_devices", 2)
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded, replicated = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())
    def step(x, w):
        return jnp.tanh(x @ w).sum(axis=0), x.T @ x
    x, w = np.arange(128.).reshape(8, 16) / 128, np.ones((16, 16)) / 16
    kw = dict(in_shardings=(sharded, replicated), out_shardings=replicated)
    strict = hlo_memopt.Options(strict=True)
    with fakes.installed() as planner:
        got = hlo_memopt.jit(step, options=strict, **kw)(x, w)
        assert len(planner.calls) == 1, planner.names()
        want = jax.jit(step, **kw)(x, w)
        for a, b in zip(got, want): np.testing.assert_array_equal(a, b)
        body = hlo_memopt.jit(lambda x: jax.lax.psum(jnp.sin(x) @ x.T, "d"), options=strict)
        mapped = jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P())
        other = jax.shard_map(lambda x: jax.lax.psum(jnp.sin(x) @ x.T, "d"), mesh=mesh, in_specs=P("d"), out_specs=P())
        np.testing.assert_array_equal(hlo_memopt.jit(mapped, options=strict)(x), jax.jit(other)(x))
        assert len(planner.calls) == 2, planner.names()
        np.testing.assert_array_equal(mapped(x), jax.jit(other)(x))
    print("fine")
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd="tests", capture_output=True, text=True, check=False
    )
    assert run.stdout == "fine\n", run.stderr


def test_import_is_light():
    heavy = ("numba", "scipy", "mip", "google.protobuf")
    code = f"import sys, hlo_memopt; print([m for m in {heavy} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_jit_starts_no_backend():
    code = """
    import hlo_memopt
    @hlo_memopt.jit
    def step(x): return x
    hlo_memopt.enable()
    from jax._src import xla_bridge
    print(xla_bridge._backends)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert run.stdout == "{}\n"
