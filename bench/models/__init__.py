"""A registry of training steps: `make(name)` gives a step function, its arguments and the arguments to donate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.models import text, vision
from bench.models.common import Made, Model, unrolled_loop

MODELS: dict[str, Model] = {
    "mlp": vision.MLP,
    "vgg16": vision.VGG16,
    "resnet50": vision.RESNET50,
    "mobilenet": vision.MOBILENET,
    "googlenet": vision.GOOGLENET,
    "densenet121": vision.DENSENET121,
    "unet": vision.UNET,
    "gpt2": text.GPT2,
    "gpt2_scan": text.GPT2_SCAN,
    "bert": text.BERT,
    "vit": vision.VIT,
    "lstm": text.LSTM,
}
EXTRAS: dict[str, Callable[..., Made]] = {"unrolled_loop": unrolled_loop}
"""Programs that are no training step; they take only `real` and `seed`."""


def names() -> list[str]:
    """The names of the training steps, in the order of the tables."""
    return list(MODELS)


def make(name: str, batch: int | None = None, size: int | None = None, *, real: bool = False, seed: int = 0) -> Made:
    """The training step called `name`: (train_step, args, donate_argnums).

    `batch` and `size` (image side or sequence length) default to the model's own. The arguments are
    `jax.ShapeDtypeStruct` trees, or initialized arrays if `real`. The donated arguments come first in `args`;
    the step returns their successors in the same order, then the loss.
    """
    if name in EXTRAS:
        return EXTRAS[name](real=real, seed=seed)
    if name not in MODELS:
        raise ValueError(f"no model {name!r}; there are {', '.join([*MODELS, *EXTRAS])}")
    return MODELS[name].make(batch, size, real=real, seed=seed)


def make_small(name: str, **keywords: Any) -> Made:
    """The same step at the batch and size meant for running on a CPU."""
    model = MODELS[name]
    return model.make(*model.small, **keywords)
