"""Small JAX programs, compiled for CPU with the module caught at our hook's stage, and XLA's own buffer assignment."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.extend.xla
import jax.numpy as jnp

from hlo_memopt.hlo.proto import message_classes, parse_module

_SCHEMA = {
    "BufferAssignmentProto": {"logical_buffers": (1, "*LogicalBuffer"), "buffer_allocations": (3, "*Allocation")},
    "LogicalBuffer": {"id": (1, "int64"), "size": (2, "int64"), "defined_at": (3, "Location")},
    "Location": {"instruction_name": (2, "string"), "shape_index": (3, "*int64"), "instruction_id": (4, "int64")},
    "Allocation": {
        "index": (1, "int64"),
        "size": (2, "int64"),
        "is_thread_local": (3, "bool"),
        "is_entry_computation_parameter": (5, "bool"),
        "maybe_live_out": (7, "bool"),
        "assigned": (9, "*Assigned"),
        "is_tuple": (11, "bool"),
        "is_constant": (12, "bool"),
    },
    "Assigned": {"logical_buffer_id": (1, "int64"), "offset": (2, "int64"), "size": (3, "int64")},
}


@cache
def _assignment_class() -> Any:
    return message_classes("hlo_memopt_tests", _SCHEMA)["BufferAssignmentProto"]


@dataclasses.dataclass
class Compiled:
    """``module``: as the POST_SCHEDULER hook received it; ``temp``: reported by XLA."""

    module: bytes
    temp: int
    assignment: Any
    executable: Any


_caught: dict[str, bytes] = {}
_rewrites: dict[str, Callable[[bytes], bytes | None]] = {}
_counter = 0
_registered = False


def _callback(data: bytes) -> bytes | None:
    name = parse_module(data).name
    for tag in _caught:
        if name.endswith(tag):
            _caught[tag] = data
            rewrite = _rewrites.get(tag)
            return rewrite(data) if rewrite is not None else None
    return None


def compile_caught(
    function: Callable[..., Any], args: tuple, rewrite: Callable[[bytes], bytes | None] | None = None, **jit: Any
) -> Compiled:
    """Compile for CPU; ``rewrite`` stands in the hook's place."""
    global _counter, _registered
    if not _registered:
        jax.extend.xla.register_hlo_module_transformation(
            _callback, name="hlo_memopt_tests", stage=jax.extend.xla.PipelineStage.POST_SCHEDULER, platforms="cpu"
        )
        _registered = True
    _counter += 1
    tag = f"_caught{_counter}x"

    def renamed(*a: Any) -> Any:
        return function(*a)

    renamed.__name__ = getattr(function, "__name__", "f").strip("<>") + tag
    _caught[tag] = b""
    if rewrite is not None:
        _rewrites[tag] = rewrite
    compiled = jax.jit(renamed, **jit).lower(*args).compile()
    data = _caught.pop(tag)
    _rewrites.pop(tag, None)
    assert data, "the hook was not called"
    stats = compiled.memory_analysis()
    assignment = _assignment_class().FromString(stats.serialized_buffer_assignment_proto)
    return Compiled(data, stats.temp_size_in_bytes, assignment, compiled)


# -- programs: name -> (function, argument shapes, jit arguments) --------------------------------------------


def _mlp_step(params, x, y):  # type: ignore[no-untyped-def]
    def loss(params):  # type: ignore[no-untyped-def]
        h = x
        for w, b in params:
            h = jnp.tanh(h @ w + b)
        return jnp.mean((h - y) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def _scan(ws, x):  # type: ignore[no-untyped-def]
    def body(h, w):  # type: ignore[no-untyped-def]
        return jnp.tanh(h @ w), h.sum(0)

    return jax.grad(lambda ws: jax.lax.scan(body, x, ws)[0].sum())(ws)


def _while(x):  # type: ignore[no-untyped-def]
    def cond(s):  # type: ignore[no-untyped-def]
        return s[0] < 10

    def body(s):  # type: ignore[no-untyped-def]
        i, a, b = s
        return i + 1, jnp.sin(b) @ b, a + jnp.cos(a @ a).sum(1)

    return jax.lax.while_loop(cond, body, (0, x, x * 2))


def _cond(p, x):  # type: ignore[no-untyped-def]
    def yes(x):  # type: ignore[no-untyped-def]
        return (x @ x).sum(0), jnp.sin(x)

    def no(x):  # type: ignore[no-untyped-def]
        return jnp.cumsum(x, 0)[3], x

    a, b = jax.lax.cond(p, yes, no, x * 3)
    return a @ b


def _update(cache, x, i):  # type: ignore[no-untyped-def]
    before = cache.sum()
    cache = jax.lax.dynamic_update_slice(cache, x @ x, (i, 0))
    return cache, before + cache.max(), jnp.sort(cache, axis=0)[::-1] @ x


def _scatter(table, ids, x):  # type: ignore[no-untyped-def]
    rows = table[ids]
    return table.at[ids].add(jnp.exp(rows @ x)), (rows * 2).sum()


def _convs(k1, k2, x):  # type: ignore[no-untyped-def]
    def loss(k1, k2):  # type: ignore[no-untyped-def]
        h = x
        for k in (k1, k2):
            h = jax.lax.conv_general_dilated(h, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            h = jax.nn.relu(h)
            h = jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return (h**2).mean()

    return jax.grad(loss, (0, 1))(k1, k2)


def _nested(x):  # type: ignore[no-untyped-def]
    def outer(i, s):  # type: ignore[no-untyped-def]
        a, acc = s

        def inner(j, t):  # type: ignore[no-untyped-def]
            return jnp.tanh(t @ a) + j

        a = jax.lax.fori_loop(0, i + 1, inner, a)
        return a, acc.at[i].set(a.sum(0))

    return jax.lax.fori_loop(0, 8, outer, (x, jnp.zeros((8, x.shape[1]))))


def _random(key, x):  # type: ignore[no-untyped-def]
    a, b = jax.random.split(key)
    noise = jax.random.normal(a, x.shape)
    mask = jax.random.bernoulli(b, 0.5, x.shape)
    return jnp.where(mask, x + noise, 0.0) @ noise.T, noise.astype(jnp.bfloat16)


def _linalg(x):  # type: ignore[no-untyped-def]
    a = x @ x.T + 10 * jnp.eye(x.shape[0])
    lower = jnp.linalg.cholesky(a)
    return jax.scipy.linalg.solve_triangular(lower, x, lower=True), jnp.linalg.eigh(a)[0]


def _unrolled(xs):  # type: ignore[no-untyped-def]
    out = []
    for i in range(4):
        for j in range(i):
            out.append(jnp.bincount(xs[i].astype(jnp.int32) * 256 + xs[j], length=65536))
    return out


def _shared_custom_fusion(a, b):  # type: ignore[no-untyped-def]
    c = jnp.concatenate([jnp.sin(a)] * 3)
    s = jnp.sort(b, 0)
    y = jnp.sort(c, 0) + jnp.sum(s, 0)
    return jnp.sort(y, 1).sum(0) @ s


def _over_a_branch_argument(p, x):  # type: ignore[no-untyped-def]
    a = jnp.sort(x, 0)
    q = jax.lax.cond(p > 0, lambda a: jnp.sin(a)[0], lambda a: jnp.cos(a)[1], a)
    return a * 2 + q


def _loop_over_idle_result(g, t):  # type: ignore[no-untyped-def]
    s = jax.lax.fori_loop(0, 3, lambda i, c: c.at[i].add(t[i]), jnp.sin(g))
    return g - s


def _embedding(table, ids, y):  # type: ignore[no-untyped-def]
    def loss(table):  # type: ignore[no-untyped-def]
        return ((table[ids].sum(1) - y) ** 2).mean()

    return table - 0.1 * jax.grad(loss)(table)


def _barriers(x):  # type: ignore[no-untyped-def]
    for _ in range(3):
        x, y = jax.lax.optimization_barrier((x @ x, jnp.sin(x)))
        x = x + y
    return x


def _effects_in_loops(x):  # type: ignore[no-untyped-def]
    out = []
    for n in range(3):

        def body(i, c):  # type: ignore[no-untyped-def]
            jax.debug.callback(lambda v: None, c.sum(), ordered=False)
            return jnp.tanh(c @ x) + i

        out.append(jax.lax.fori_loop(0, 2, body, jnp.sort(x, n % 2)))
    return out[0] @ out[1] + out[2]


def _f(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple, dict[str, Any]]] = {
    "mlp": (_mlp_step, ([(_f(64, 64), _f(64))] * 4, _f(128, 64), _f(128, 64)), {}),
    "mlp-donated": (_mlp_step, ([(_f(64, 64), _f(64))] * 4, _f(128, 64), _f(128, 64)), {"donate_argnums": 0}),
    "scan": (_scan, (_f(6, 64, 64), _f(32, 64)), {}),
    "while": (_while, (_f(64, 64),), {}),
    "cond": (_cond, (_f(dtype=jnp.bool_), _f(64, 64)), {}),
    "update": (_update, (_f(256, 64), _f(64, 64), _f(dtype=jnp.int32)), {}),
    "update-donated": (_update, (_f(256, 64), _f(64, 64), _f(dtype=jnp.int32)), {"donate_argnums": 0}),
    "scatter": (_scatter, (_f(512, 64), _f(100, dtype=jnp.int32), _f(64, 64)), {"donate_argnums": 0}),
    "convs": (_convs, (_f(3, 3, 3, 16), _f(3, 3, 16, 32), _f(4, 32, 32, 3)), {}),
    "nested": (_nested, (_f(32, 32),), {}),
    "random": (_random, (_f(2, dtype=jnp.uint32), _f(64, 48)), {}),
    "linalg": (_linalg, (_f(48, 48),), {}),
    "shared-custom-fusion": (_shared_custom_fusion, (_f(64, 64), _f(64, 64)), {}),
    "over-branch-argument": (_over_a_branch_argument, (_f(), _f(64, 64)), {}),
    "loop-over-idle-result": (_loop_over_idle_result, (_f(64, 64), _f(64, 64)), {}),
    "embedding": (_embedding, (_f(2000, 32), _f(16, 8, dtype=jnp.int32), _f(16, 32)), {}),
    "barriers": (_barriers, (_f(64, 64),), {}),
    "effects": (_effects_in_loops, (_f(32, 32),), {}),
    "unrolled": (_unrolled, ([_f(1000, dtype=jnp.uint8)] * 4,), {}),
}
