"""Bytes of a shape, as XLA's buffer size function counts them."""

from __future__ import annotations

from math import prod

from hlo_memopt.hlo.graph import OPAQUE, PRIMITIVE_BITS, TOKEN, Shape
from hlo_memopt.platforms import Platform


def shape_bytes(shape: Shape, platform: Platform) -> int:
    """Bytes of the buffer that holds ``shape``; for a tuple: of its table of pointers, not of its elements."""
    if shape.tuple_shapes is not None:
        return platform.pointer_bytes * len(shape.tuple_shapes)
    if shape.element_type == TOKEN:
        return 0
    if shape.element_type == OPAQUE:
        return platform.pointer_bytes
    layout = shape.layout
    bits = PRIMITIVE_BITS.get(shape.element_type, ("", 0))[1]
    if layout is not None and layout.element_bits:
        bits = layout.element_bits
    elif bits < 8 and not platform.tiled:
        bits = 8
    elements = prod(shape.dims)
    if platform.tiled and layout is not None and layout.tiles:
        elements = _tiled_elements(shape)
    size = (elements * bits + 7) // 8
    if shape.dynamic and not platform.tiled:
        size += 4 * len(shape.dims)  # the run-time sizes of a dynamic shape stand behind its elements
    return size


def _tiled_elements(shape: Shape) -> int:
    """Elements of a tiled layout, padding included: each tile in turn rounds up the minor dimensions."""
    layout = shape.layout
    assert layout is not None
    physical = [shape.dims[d] for d in reversed(layout.minor_to_major)]
    for tile in layout.tiles:
        keep = len(physical) - len(tile)
        if keep < 0:
            physical = [1] * -keep + physical
            keep = 0
        major, minor = physical[:keep], physical[keep:]
        tile_dims = [m if t < 0 else t for t, m in zip(tile, minor, strict=True)]
        counts = [-(-m // t) for m, t in zip(minor, tile_dims, strict=True)]
        physical = [*major, *counts, *tile_dims]
    return prod(physical)
