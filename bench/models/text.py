"""Language models: GPT-2 small (flax.linen, unrolled and scanned), BERT base (flax.nnx), an LSTM (dm-haiku)."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
from flax import nnx

from bench.models import common
from bench.models.common import Array, Model, Network, haiku, linen


class _Block(nn.Module):
    """A pre-norm transformer block with causal attention; returns a pair so that it can be scanned."""

    width: int
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array, _: Any = None) -> tuple[jax.Array, None]:
        qkv = nn.Dense(3 * self.width)(nn.LayerNorm()(x))
        q, k, v = jnp.split(qkv.reshape(*x.shape[:2], self.heads, -1), 3, -1)
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
        scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -1e9)
        y = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
        x = x + nn.Dense(self.width)(y.reshape(x.shape))
        y = nn.Dense(4 * self.width)(nn.LayerNorm()(x))
        return x + nn.Dense(self.width)(nn.gelu(y)), None


class _GPT2(nn.Module):
    """GPT-2 small; the output layer is the embedding."""

    scan: bool
    vocab: int = 50257
    width: int = 768
    depth: int = 12
    heads: int = 12

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocab, self.width)
        x = embed(tokens) + nn.Embed(1024, self.width)(jnp.arange(tokens.shape[1]))
        if self.scan:
            block = nn.scan(_Block, {"params": 0}, split_rngs={"params": True}, length=self.depth)
            x, _ = block(self.width, self.heads)(x)
        else:
            for _ in range(self.depth):
                x, _ = _Block(self.width, self.heads)(x)
        return embed.attend(nn.LayerNorm()(x))


def _gpt2(batch: int, size: int, scan: bool) -> Network:
    net = _GPT2(scan)
    return linen(net, Array((batch, size), net.vocab), Array((batch, size), net.vocab))


class _BertLayer(nnx.Module):
    def __init__(self, width: int, heads: int, rngs: nnx.Rngs) -> None:
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.down(nnx.gelu(self.up(x))))


class _Bert(nnx.Module):
    """BERT base with its masked-language head; a label for each position."""

    vocab = 30522

    def __init__(self, key: jax.Array, *, width: int = 768, depth: int = 12, heads: int = 12) -> None:
        rngs = nnx.Rngs(params=key)
        self.tokens = nnx.Embed(self.vocab, width, rngs=rngs)
        self.positions = nnx.Embed(512, width, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.layers = nnx.List([_BertLayer(width, heads, rngs) for _ in range(depth)])
        self.transform = nnx.Linear(width, width, rngs=rngs)
        self.head_norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.norm(self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1])))
        for layer in self.layers:
            x = layer(x)
        return self.tokens.attend(self.head_norm(nnx.gelu(self.transform(x))))


def _bert(batch: int, size: int) -> Network:
    return common.nnx(_Bert, Array((batch, size), _Bert.vocab), Array((batch, size), _Bert.vocab))


LSTM_VOCAB = 10000


def _lstm(tokens: jax.Array) -> jax.Array:
    x = hk.Embed(LSTM_VOCAB, 512)(tokens.T)
    core = hk.DeepRNN([hk.LSTM(512), hk.LSTM(512)])
    x, _ = hk.dynamic_unroll(core, x, core.initial_state(tokens.shape[0]))
    return hk.Linear(LSTM_VOCAB)(x.swapaxes(0, 1))


GPT2 = Model(lambda b, s: _gpt2(b, s, False), 8, 512, (1, 128))
GPT2_SCAN = Model(lambda b, s: _gpt2(b, s, True), 8, 512, (1, 128))
BERT = Model(_bert, 8, 512, (1, 128))
LSTM = Model(lambda b, s: haiku(_lstm, Array((b, s), LSTM_VOCAB), Array((b, s), LSTM_VOCAB)), 32, 128, (16, 64))
