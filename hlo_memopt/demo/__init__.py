"""Small, self-contained training steps in plain JAX, and the run of one that ``hlo-memopt demo`` prints."""

from __future__ import annotations

NAMES = ("vgg", "resnet", "unet", "transformer", "mlp", "unrolled")
DEFAULT = "vgg"
