"""MLP and image models: equinox (MLP, ViT), flax.linen (VGG, GoogLeNet, DenseNet, U-Net), dm-haiku (the rest)."""

from __future__ import annotations

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp

from bench.models.common import Array, Model, Network, equinox, haiku, linen

CLASSES = 1000


def _images(batch: int, size: int) -> tuple[Array, Array]:
    return Array((batch, size, size, 3)), Array((batch,), CLASSES)


def _mlp(batch: int, size: int) -> Network:
    return equinox(
        lambda key: eqx.nn.MLP(size, CLASSES, size, depth=8, activation=jnp.tanh, key=key),
        Array((batch, size)),
        Array((batch,), CLASSES),
    )


class _VGG16(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
            for _ in range(depth):
                x = nn.relu(nn.Conv(width, (3, 3))(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = x.reshape(x.shape[0], -1)
        for _ in range(2):
            x = nn.relu(nn.Dense(4096)(x))
        return nn.Dense(CLASSES)(x)


class _Inception(nn.Module):
    widths: tuple[int, ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def conv(x: jax.Array, width: int, kernel: int) -> jax.Array:
            return nn.relu(nn.Conv(width, (kernel, kernel))(x))

        w = self.widths
        pooled = nn.max_pool(x, (3, 3), (1, 1), "SAME")
        branches = [
            conv(x, w[0], 1),
            conv(conv(x, w[1], 1), w[2], 3),
            conv(conv(x, w[3], 1), w[4], 5),
            conv(pooled, w[5], 1),
        ]
        return jnp.concatenate(branches, -1)


class _GoogLeNet(nn.Module):
    """The network of 2014, without its auxiliary heads."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def pool(x: jax.Array) -> jax.Array:
            return nn.max_pool(x, (3, 3), (2, 2), "SAME")

        x = pool(nn.relu(nn.Conv(64, (7, 7), (2, 2))(x)))
        x = nn.relu(nn.Conv(64, (1, 1))(x))
        x = pool(nn.relu(nn.Conv(192, (3, 3))(x)))
        for widths in ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)):
            x = _Inception(widths)(x)
        x = pool(x)
        for widths in (
            (192, 96, 208, 16, 48, 64),
            (160, 112, 224, 24, 64, 64),
            (128, 128, 256, 24, 64, 64),
            (112, 144, 288, 32, 64, 64),
            (256, 160, 320, 32, 128, 128),
        ):
            x = _Inception(widths)(x)
        x = pool(x)
        for widths in ((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)):
            x = _Inception(widths)(x)
        return nn.Dense(CLASSES)(x.mean((1, 2)))


class _DenseNet121(nn.Module):
    growth: int = 32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def normed(x: jax.Array) -> jax.Array:
            return nn.relu(nn.BatchNorm(use_running_average=False)(x))

        def conv(x: jax.Array, width: int, kernel: int, stride: int = 1) -> jax.Array:
            return nn.Conv(width, (kernel, kernel), (stride, stride), use_bias=False)(x)

        x = nn.max_pool(normed(conv(x, 2 * self.growth, 7, 2)), (3, 3), (2, 2), "SAME")
        for stage, depth in enumerate((6, 12, 24, 16)):
            if stage:
                x = nn.avg_pool(conv(normed(x), x.shape[-1] // 2, 1), (2, 2), (2, 2))
            for _ in range(depth):
                y = conv(normed(x), 4 * self.growth, 1)
                x = jnp.concatenate([x, conv(normed(y), self.growth, 3)], -1)
        return nn.Dense(CLASSES)(normed(x).mean((1, 2)))


class _UNet(nn.Module):
    """Segmentation into `classes`, with group norm and nearest-neighbour upsampling."""

    widths: tuple[int, ...] = (64, 128, 256, 512)
    classes: int = 3

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def block(x: jax.Array, width: int) -> jax.Array:
            for _ in range(3):
                x = nn.silu(nn.GroupNorm(32)(nn.Conv(width, (3, 3))(x)))
            return x

        skips = []
        for width in self.widths:
            x = block(x, width)
            skips.append(x)
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.silu(nn.GroupNorm(32)(nn.Conv(2 * self.widths[-1], (3, 3))(x)))
        for width, skip in zip(reversed(self.widths), reversed(skips), strict=True):
            x = jax.image.resize(x, (*skip.shape[:3], x.shape[-1]), "nearest")
            x = block(jnp.concatenate([x, skip], -1), width)
        return nn.Conv(self.classes, (1, 1))(x)


def _unet(batch: int, size: int) -> Network:
    net = _UNet()
    return linen(net, Array((batch, size, size, 3)), Array((batch, size, size), net.classes))


def _mobilenet_v2(x: jax.Array) -> jax.Array:
    def conv(x: jax.Array, width: int, kernel: int, stride: int = 1, groups: int = 1, act: bool = True) -> jax.Array:
        x = hk.Conv2D(width, kernel, stride, with_bias=False, feature_group_count=groups)(x)
        x = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.99)(x, is_training=True)
        return jax.nn.relu6(x) if act else x

    x = conv(x, 32, 3, 2)
    for expand, width, depth, stride in (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ):
        for i in range(depth):
            inner = x.shape[-1] * expand
            y = conv(x, inner, 1) if expand > 1 else x
            y = conv(y, inner, 3, stride if i == 0 else 1, groups=inner)
            y = conv(y, width, 1, act=False)
            x = x + y if x.shape == y.shape else y
    return hk.Linear(CLASSES)(conv(x, 1280, 1).mean((1, 2)))


class _ViTBlock(eqx.Module):
    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, width: int, heads: int, key: jax.Array) -> None:
        keys = jax.random.split(key)
        self.norms = [eqx.nn.LayerNorm(width) for _ in range(2)]
        self.attention = eqx.nn.MultiheadAttention(
            heads, width, use_query_bias=True, use_key_bias=True, use_value_bias=True, use_output_bias=True, key=keys[0]
        )
        self.mlp = eqx.nn.MLP(width, width, 4 * width, depth=1, activation=jax.nn.gelu, key=keys[1])

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class _ViT(eqx.Module):
    patches: eqx.nn.Conv2d
    token: jax.Array
    positions: jax.Array
    blocks: list[_ViTBlock]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, size: int, key: jax.Array, *, width: int = 768, depth: int = 12, heads: int = 12) -> None:
        keys = jax.random.split(key, depth + 3)
        self.patches = eqx.nn.Conv2d(3, width, 16, 16, key=keys[0])
        self.token = jnp.zeros((1, width))
        self.positions = 0.02 * jax.random.normal(keys[1], ((size // 16) ** 2 + 1, width))
        self.blocks = [_ViTBlock(width, heads, k) for k in keys[3:]]
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, CLASSES, key=keys[2])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.patches(x.transpose(2, 0, 1)).reshape(self.token.shape[1], -1).T
        x = jnp.concatenate([self.token, x]) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[0]))


MLP = Model(_mlp, 4096, 1024, (1024, 1024))
VGG16 = Model(lambda b, s: linen(_VGG16(), *_images(b, s)), 32, 224, (4, 128))
RESNET50 = Model(
    lambda b, s: haiku(lambda x: hk.nets.ResNet50(CLASSES)(x, is_training=True), *_images(b, s)), 32, 224, (4, 128)
)
MOBILENET = Model(lambda b, s: haiku(_mobilenet_v2, *_images(b, s)), 32, 224, (8, 128))
GOOGLENET = Model(lambda b, s: linen(_GoogLeNet(), *_images(b, s)), 32, 224, (8, 128))
DENSENET121 = Model(lambda b, s: linen(_DenseNet121(), *_images(b, s)), 32, 224, (4, 128))
UNET = Model(_unet, 8, 128, (1, 96))
VIT = Model(lambda b, s: equinox(lambda key: _ViT(s, key), *_images(b, s)), 32, 224, (4, 96))
