"""The steps: networks in plain JAX with Adam, and one program that is a public report. Sized for seconds on a CPU."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Apply = Callable[[Any, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Demo:
    """A step and its first arguments, numpy arrays.

    Attributes:
      summary: what it is, in one line.
      step: its first ``carried`` results are the next step's first arguments; then the loss comes last.
      should_fall: whether XLA's own order on CPU is known to waste memory here.
    """

    summary: str
    step: Callable[..., Any]
    args: tuple[Any, ...]
    carried: int
    should_fall: bool


def make(name: str) -> Demo:
    """The demo of that name; KeyError if there is none."""
    return _MAKERS[name](np.random.default_rng(0))


# -- training ------------------------------------------------------------------------------------------------


def _adam(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
    count = state["count"] + 1
    scale = 1e-3 * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], grads)
    var = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, state["var"], grads)
    params = jax.tree.map(lambda p, m, v: p - scale * m / (jnp.sqrt(v) + 1e-8), params, mean, var)
    return params, {"count": count, "mean": mean, "var": var}


def _training(what: str, apply: Apply, params: Any, x: np.ndarray, y: np.ndarray, should_fall: bool = True) -> Demo:
    def loss_of(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        logits = jax.nn.log_softmax(apply(params, x))
        return -jnp.mean(jnp.take_along_axis(logits, y[..., None], axis=-1))

    def train_step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        params, state = _adam(params, grads, state)
        return params, state, loss

    def zeros() -> Any:
        return jax.tree.map(np.zeros_like, params)

    state = {"count": np.float32(0), "mean": zeros(), "var": zeros()}
    count = sum(leaf.size for leaf in jax.tree.leaves(params)) / 1e6
    batch = " x ".join(map(str, x.shape))
    summary = f"{what}, Adam, f32, batch of {batch}, {count:.1f} million parameters"
    return Demo(summary, train_step, (params, state, x, y), 2, should_fall)


def _images(rng: np.random.Generator, batch: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    x = rng.standard_normal((batch, size, size, 3), np.float32)
    return x, rng.integers(0, 10, batch).astype(np.int32)


def _weights(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32) * np.float32(math.sqrt(2 / math.prod(shape[:-1])))


def _layer(rng: np.random.Generator, *shape: int) -> dict[str, np.ndarray]:
    return {"w": _weights(rng, *shape), "b": np.zeros(shape[-1], np.float32)}


def _conv(p: Any, x: jax.Array, stride: int = 1) -> jax.Array:
    dims = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, p["w"], (stride, stride), "SAME", dimension_numbers=dims) + p["b"]


def _dense(p: Any, x: jax.Array) -> jax.Array:
    return x @ p["w"] + p["b"]


def _pool(x: jax.Array) -> jax.Array:
    window = (1, 2, 2, 1)
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")


# -- networks ------------------------------------------------------------------------------------------------


def _vgg(rng: np.random.Generator) -> Demo:
    blocks = ((16, 2), (32, 2), (64, 3), (128, 3))
    convs, before = [], 3
    for width, depth in blocks:
        convs.append([_layer(rng, 3, 3, before if n == 0 else width, width) for n in range(depth)])
        before = width
    params = {"convs": convs, "dense": [_layer(rng, 6 * 6 * before, 256), _layer(rng, 256, 10)]}

    def apply(params: Any, x: jax.Array) -> jax.Array:
        for block in params["convs"]:
            for p in block:
                x = jax.nn.relu(_conv(p, x))
            x = _pool(x)
        x = x.reshape(x.shape[0], -1)
        return _dense(params["dense"][1], jax.nn.relu(_dense(params["dense"][0], x)))

    return _training("VGG with 10 convolutions", apply, params, *_images(rng, 24, 96))


def _resnet(rng: np.random.Generator) -> Demo:
    widths = (16, 32, 64, 128)
    params: dict[str, Any] = {
        "stem": _layer(rng, 3, 3, 3, widths[0]),
        "blocks": [],
        "head": _layer(rng, widths[-1], 10),
    }
    before = widths[0]
    for width in widths:
        for _ in range(2):
            block = {"a": _layer(rng, 3, 3, before, width), "b": _layer(rng, 3, 3, width, width)}
            block |= {n: {"b": np.zeros(width, np.float32), "w": np.ones(width, np.float32)} for n in ("na", "nb")}
            params["blocks"].append(block | ({"skip": _layer(rng, 1, 1, before, width)} if before != width else {}))
            before = width

    def norm(p: Any, x: jax.Array) -> jax.Array:
        mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
        return (x - mean) * jax.lax.rsqrt(var + 1e-5) * p["w"] + p["b"]

    def apply(params: Any, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(_conv(params["stem"], x))
        for p in params["blocks"]:
            stride = 2 if "skip" in p else 1
            y = jax.nn.relu(norm(p["na"], _conv(p["a"], x, stride)))
            y = norm(p["nb"], _conv(p["b"], y))
            x = jax.nn.relu(y + (_conv(p["skip"], x, stride) if "skip" in p else x))
        return _dense(params["head"], x.mean((1, 2)))

    return _training("ResNet with 17 convolutions and batch norm", apply, params, *_images(rng, 16, 96))


def _unet(rng: np.random.Generator) -> Demo:
    widths = (16, 32, 64, 128)

    def pair(before: int, width: int) -> list[Any]:
        return [_layer(rng, 3, 3, before, width), _layer(rng, 3, 3, width, width)]

    down = [pair(b, w) for b, w in zip((3, *widths), widths, strict=False)]
    up = [pair(a + b, a) for a, b in itertools.pairwise(widths)][::-1]
    params = {"down": down, "up": up, "head": _layer(rng, 1, 1, widths[0], 4)}

    def double(pair: Any, x: jax.Array) -> jax.Array:
        for p in pair:
            x = jax.nn.silu(_conv(p, x))
        return x

    def apply(params: Any, x: jax.Array) -> jax.Array:
        skips = []
        for n, p in enumerate(params["down"]):
            x = double(p, _pool(x) if n else x)
            skips.append(x)
        for p, skip in zip(params["up"], skips[-2::-1], strict=True):
            x = jax.image.resize(x, (*skip.shape[:3], x.shape[-1]), "nearest")
            x = double(p, jnp.concatenate([x, skip], -1))
        return _conv(params["head"], x)

    x, _ = _images(rng, 8, 96)
    labels = rng.integers(0, 4, x.shape[:3]).astype(np.int32)
    return _training("U-Net with 4 levels", apply, params, x, labels)


def _transformer(rng: np.random.Generator) -> Demo:
    vocabulary, width, heads, length, depth = 2048, 128, 4, 128, 4
    params = {
        "embed": _weights(rng, vocabulary, width) * 8,
        "position": _weights(rng, length, width),
        "blocks": [
            {
                "qkv": _layer(rng, width, 3 * width),
                "out": _layer(rng, width, width),
                "up": _layer(rng, width, 4 * width),
                "down": _layer(rng, 4 * width, width),
            }
            for _ in range(depth)
        ],
    }

    def norm(x: jax.Array) -> jax.Array:
        return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)

    def attend(p: Any, x: jax.Array) -> jax.Array:
        q, k, v = jnp.split(_dense(p["qkv"], x).reshape(*x.shape[:2], heads, -1), 3, -1)
        scores = jnp.einsum("blhd,bmhd->bhlm", q, k) / math.sqrt(q.shape[-1])
        scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -1e9)
        mixed = jnp.einsum("bhlm,bmhd->blhd", jax.nn.softmax(scores), v)
        return _dense(p["out"], mixed.reshape(x.shape))

    def apply(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["embed"][tokens] + params["position"]
        for p in params["blocks"]:
            x = x + attend(p, norm(x))
            x = x + _dense(p["down"], jax.nn.gelu(_dense(p["up"], norm(x))))
        return norm(x) @ params["embed"].T

    tokens = rng.integers(0, vocabulary, (8, length + 1)).astype(np.int32)
    return _training("GPT with 4 blocks", apply, params, tokens[:, :-1], tokens[:, 1:])


def _mlp(rng: np.random.Generator) -> Demo:
    params = [_layer(rng, 512, 512) for _ in range(6)] + [_layer(rng, 512, 10)]

    def apply(params: Any, x: jax.Array) -> jax.Array:
        for p in params[:-1]:
            x = jax.nn.relu(_dense(p, x))
        return _dense(params[-1], x)

    x = rng.standard_normal((2048, 512), np.float32)
    labels = rng.integers(0, 10, 2048).astype(np.int32)
    return _training("MLP with 7 layers (a chain: order has little to give)", apply, params, x, labels, False)


def _unrolled(rng: np.random.Generator) -> Demo:
    arrays = [rng.integers(0, 256, 1_000_000, np.uint8) for _ in range(10)]

    def pair_counts(arrays: list[jax.Array]) -> list[jax.Array]:
        pairs = itertools.product(arrays, repeat=2)
        return [jnp.bincount(a.astype(jnp.int32) * 256 + b, length=65536) for a, b in pairs]

    summary = "joint histograms of all pairs of 10 byte arrays of 1,000,000, an unrolled loop of 100 rounds"
    return Demo(summary, pair_counts, (arrays,), 0, True)


_MAKERS: dict[str, Callable[[np.random.Generator], Demo]] = {
    "vgg": _vgg,
    "resnet": _resnet,
    "unet": _unet,
    "transformer": _transformer,
    "mlp": _mlp,
    "unrolled": _unrolled,
}
