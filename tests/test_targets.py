"""The CUDA and TPU compilers without a device: what they report is what we predicted, in the order that we planned."""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp
import pytest

import hlo_memopt
from hlo_memopt.hlo.graph import Module
from hlo_memopt.targets import available, compile_only

STRICT = hlo_memopt.Options(strict=True)
needs = {p: pytest.mark.skipif(available(p) is not None, reason=str(available(p))) for p in ("cuda", "tpu")}
S = jax.ShapeDtypeStruct


def _mlp(weights, x, y):  # type: ignore[no-untyped-def]
    def loss(weights):  # type: ignore[no-untyped-def]
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return ((h - y) ** 2).mean()

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def _wide(x):  # type: ignore[no-untyped-def]
    """Independent pieces, each much larger while it is made than when it is done."""
    parts = [jnp.outer(jnp.sin(x + i), jnp.cos(x * i)).cumsum(axis=0).sum(axis=1) for i in range(6)]
    return sum(jnp.outer(p, q) for p, q in pairwise(parts)).sum()


def _convs(weights, x):  # type: ignore[no-untyped-def]
    h = x
    for w in weights:
        h = jax.nn.relu(jax.lax.conv_general_dilated(h, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
    return (h**2).mean()


def _loop(x, w):  # type: ignore[no-untyped-def]
    def body(c, i):  # type: ignore[no-untyped-def]
        return jnp.tanh(c @ w) + i, (c * i).sum()

    return jax.lax.scan(body, x, jnp.arange(5.0))


CASES = {
    "mlp": (_mlp, ([S((256, 256), jnp.float32)] * 6, S((128, 256), jnp.float32), S((128, 256), jnp.float32)), (0,)),
    "wide": (_wide, (S((1024,), jnp.float32),), ()),
    "convs": (jax.grad(_convs), ([S((3, 3, 8, 8), jnp.float32)] * 4, S((4, 32, 32, 8), jnp.float32)), ()),
    "loop": (_loop, (S((256, 256), jnp.float32), S((256, 256), jnp.float32)), ()),
}


@needs["cuda"]
@pytest.mark.parametrize("name", CASES)
def test_cuda(name: str) -> None:
    """Reported temp is within 1% of what was predicted, before and after, and never larger than plain."""
    function, args, donated = CASES[name]
    found = hlo_memopt.compare(function, *args, platform="cuda", donate_argnums=donated, options=STRICT)
    assert found.platform == "cuda" and "H100" in str(found.device) and found.plan is not None
    assert found.temp_after <= found.temp_before
    for predicted, reported in (
        (found.predicted_before, found.temp_before),
        (found.predicted_after, found.temp_after),
    ):
        assert abs(predicted - reported) <= max(0.01 * reported, 4096)
    assert found.plan.lower_bound <= found.plan.peak_after


@needs["cuda"]
def test_cuda_compiles_our_order() -> None:
    """Where the plan changes something, XLA's final module has the plan's order."""
    function, args, donated = CASES["mlp"]
    args = ([S((256, 256), jnp.float32)] * 10, *args[1:])
    found = hlo_memopt.compare(function, *args, platform="cuda", donate_argnums=donated, options=STRICT)
    (final,) = found.compiled_after.runtime_executable().hlo_modules()
    module = Module.from_bytes(final.as_serialized_hlo_module_proto())
    names = [module.entry.by_id[i].name for i in module.schedule[module.entry.id]]
    plan = next(order for order in found.plan.schedule.values() if set(order) & set(names))
    common = set(plan) & set(names)
    assert len(common) > 0.8 * len(plan)
    assert [n for n in names if n in common] == [n for n in plan if n in common]


@needs["cuda"]
def test_other_cuda_targets() -> None:
    function, args, _ = CASES["wide"]
    found = hlo_memopt.compare(function, *args, platform="cuda", target="a100", options=STRICT)
    assert "A100" in str(found.device) and "A100" in str(found)
    with pytest.raises(ValueError, match="neither one of h100, a100 nor a file"):
        hlo_memopt.compare(function, *args, platform="cuda", target="nosuch")


@needs["tpu"]
def test_tpu() -> None:
    """The compiler assigns on-chip memory after the hook: both ways are compiled, and the better is kept."""
    function, args, donated = CASES["mlp"]
    found = hlo_memopt.compare(function, *args, platform="tpu", donate_argnums=donated, options=STRICT)
    assert found.platform == "tpu" and "TPU" in str(found.device) and found.plan is not None
    assert found.temp_after <= found.temp_before
    with pytest.raises(ValueError, match="does not know target 'v9z'"):
        hlo_memopt.compare(function, *args, platform="tpu", target="v9z")


def test_what_is_missing_is_named(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for platform in ("cuda", "tpu"):
        with pytest.raises(ValueError, match=rf"pip install 'hlo_memopt\[{platform}\]'"):
            compile_only(platform)
    with pytest.raises(ValueError, match="there is no compile-only 'abacus'"):
        compile_only("abacus")


def test_a_target_wants_a_platform() -> None:
    with pytest.raises(ValueError, match="target 'a100' without a platform"):
        hlo_memopt.compare(lambda x: x + 1, S((8,), jnp.float32), target="a100")
