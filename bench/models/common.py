"""What all models share: the training step around a loss, and arguments as shapes or as arrays."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Made = tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]
Variables = tuple[Any, Any]
"""(parameters, state): the state holds batch statistics and may be an empty container or None."""


@dataclasses.dataclass(frozen=True)
class Array:
    """Shape of a batch argument; integers are drawn below `below`, floats from a normal distribution."""

    shape: tuple[int, ...]
    below: int | None = None

    def struct(self) -> jax.ShapeDtypeStruct:
        """The argument as a shape."""
        return jax.ShapeDtypeStruct(self.shape, jnp.float32 if self.below is None else jnp.int32)

    def draw(self, rng: np.random.Generator) -> jax.Array:
        """The argument as an array of random values."""
        if self.below is None:
            return jnp.asarray(rng.standard_normal(self.shape, np.float32))
        return jnp.asarray(rng.integers(0, self.below, self.shape, np.int32))


@dataclasses.dataclass(frozen=True)
class Network:
    """A network at a fixed batch and size: how to make its variables, how to apply it, what it is fed."""

    init: Callable[[jax.Array], Variables]
    apply: Callable[[Any, Any, jax.Array], tuple[jax.Array, Any]]
    """(parameters, state, input) -> (logits, new state)"""
    x: Array
    y: Array


def _shapes_of(make: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: jax.eval_shape(make)


@dataclasses.dataclass(frozen=True)
class Model:
    """A network with its default batch and size, and smaller ones (`small`) at which a CPU takes seconds a step."""

    build: Callable[[int, int], Network]
    batch: int
    size: int
    small: tuple[int, int]

    def make(self, batch: int | None = None, size: int | None = None, *, real: bool = False, seed: int = 0) -> Made:
        """(train_step, args, donate_argnums); see `bench.models.make`."""
        network = self.build(batch or self.batch, size or self.size)
        optimizer = optax.adamw(1e-4)

        def init(key: jax.Array) -> tuple[Any, Any, Any]:
            params, state = network.init(key)
            return params, optimizer.init(params), state

        def loss_of(params: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Any]:
            logits, state = network.apply(params, state, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), state

        def update(params: Any, opt_state: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, ...]:
            (loss, state), grads = jax.value_and_grad(loss_of, has_aux=True)(params, state, x, y)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, state, loss

        # The key is made inside, so that shapes need no device; this kind of key compiles three times faster.
        variables = (jax.jit if real else _shapes_of)(lambda: init(jax.random.key(seed, impl="unsafe_rbg")))()
        rng = np.random.default_rng(seed)
        data = tuple(spec.draw(rng) if real else spec.struct() for spec in (network.x, network.y))

        if jax.tree.leaves(variables[2]):

            def train_step(params: Any, opt_state: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, ...]:
                """One step of a network with batch statistics."""
                return update(params, opt_state, state, x, y)

            return train_step, (*variables, *data), (0, 1, 2)

        empty = variables[2]

        def train_step(params: Any, opt_state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, ...]:  # type: ignore
            """One step of a network without state."""
            params, opt_state, _, loss = update(params, opt_state, empty, x, y)
            return params, opt_state, loss

        return train_step, (*variables[:2], *data), (0, 1)


def linen(module: Any, x: Array, y: Array, **keywords: Any) -> Network:
    """A flax.linen module; its batch statistics, if any, are the state."""

    def init(key: jax.Array) -> Variables:
        variables = dict(module.init(key, jnp.zeros(x.shape, x.struct().dtype), **keywords))
        return variables.pop("params"), variables

    def apply(params: Any, state: Any, inputs: jax.Array) -> tuple[jax.Array, Any]:
        if not state:
            return module.apply({"params": params}, inputs, **keywords), state
        return module.apply({"params": params, **state}, inputs, mutable=list(state), **keywords)

    return Network(init, apply, x, y)


def haiku(forward: Callable[[jax.Array], jax.Array], x: Array, y: Array) -> Network:
    """A dm-haiku function."""
    import haiku as hk

    net = hk.transform_with_state(forward)
    return Network(
        lambda key: net.init(key, jnp.zeros(x.shape, x.struct().dtype)),
        lambda params, state, inputs: net.apply(params, state, None, inputs),
        x,
        y,
    )


def equinox(build: Callable[[jax.Array], Callable[[jax.Array], jax.Array]], x: Array, y: Array) -> Network:
    """An equinox module for one example, mapped over the batch."""
    import equinox as eqx

    def is_param(leaf: Any) -> bool:
        return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)

    static = eqx.filter(eqx.filter_eval_shape(lambda: build(jax.random.key(0))), is_param, inverse=True)
    return Network(
        lambda key: (eqx.filter(build(key), eqx.is_array), None),
        lambda params, state, inputs: (jax.vmap(eqx.combine(params, static))(inputs), state),
        x,
        y,
    )


def nnx(build: Callable[[jax.Array], Any], x: Array, y: Array) -> Network:
    """A flax.nnx module without other state than its parameters."""
    from flax import nnx as lib

    graph, _ = lib.split(lib.eval_shape(lambda: build(jax.random.key(0))))
    return Network(
        lambda key: (lib.to_pure_dict(lib.split(build(key))[1]), None),
        lambda params, state, inputs: (lib.merge(graph, params)(inputs), state),
        x,
        y,
    )


def unrolled_loop(*, real: bool = False, seed: int = 0, arrays: int = 10, length: int = 1_000_000) -> Made:
    """The unrolled-loop report: raveled indices and their bincounts for all pairs of ten byte arrays.

    Nothing orders the hundred iterations, and XLA:CPU's default schedule keeps the indices of all of them at once.
    """

    def pair_counts(bytes_: list[jax.Array]) -> list[jax.Array]:
        """Joint histograms of all pairs."""
        return [
            jnp.bincount(a.astype(jnp.int32) * 256 + b, length=65536) for a, b in itertools.product(bytes_, repeat=2)
        ]

    rng = np.random.default_rng(seed)
    inputs = [
        jnp.asarray(rng.integers(0, 256, length, np.uint8)) if real else jax.ShapeDtypeStruct((length,), jnp.uint8)
        for _ in range(arrays)
    ]
    return pair_counts, (inputs,), ()
