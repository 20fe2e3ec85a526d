"""Protocol buffers' wire format, for edits that must leave every other byte alone."""

from __future__ import annotations

from collections.abc import Iterator


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data):
            raise ValueError("truncated")
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            return value, at


def fields(data: bytes) -> Iterator[tuple[int, int | bytes, bytes]]:
    """Number, value and all bytes of each field."""
    at = 0
    while at < len(data):
        start = at
        tag, at = varint(data, at)
        value: int | bytes
        if tag & 7 == 0:
            value, at = varint(data, at)
        else:
            if tag & 7 == 2:
                size, at = varint(data, at)
            elif tag & 7 in (1, 5):
                size = 8 if tag & 7 == 1 else 4
            else:
                raise ValueError("not a message")
            value = data[at : at + size]
            at += size
            if at > len(data):
                raise ValueError("truncated")
        yield tag >> 3, value, data[start:at]


def encoded(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def int_field(field: int, value: int) -> bytes:
    return encoded(field << 3) + encoded(value)


def bytes_field(field: int, value: bytes) -> bytes:
    return encoded(field << 3 | 2) + encoded(len(value)) + value
