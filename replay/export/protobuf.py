"""The wire format of protocol buffers, as far as a writer needs it: varints, fixed 64-bit integers, what has a length.

A field is a function from its value to its bytes. A message is the concatenation of its fields.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

#: Wire types.
_VARINT, _FIXED64, _LENGTH = 0, 1, 2
_ONE_BYTE = [bytes([value]) for value in range(0x80)]
_UINT64 = 1 << 64


def varint(value: int) -> bytes:
    """An integer of up to 64 bits, 7 bits a byte. A negative one takes ten bytes, as `int64` fields do."""
    if 0 <= value < 0x80:
        return _ONE_BYTE[value]
    value %= _UINT64
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def varint_field(number: int) -> Callable[[int], bytes]:
    """A field of type int32, int64, uint32, uint64, bool or an enum."""
    key = varint(number << 3 | _VARINT)
    return lambda value: key + varint(value)


def fixed64_field(number: int) -> Callable[[int], bytes]:
    """A field of type fixed64."""
    key = varint(number << 3 | _FIXED64)
    pack = struct.Struct("<Q").pack
    return lambda value: key + pack(value)


def bytes_field(number: int) -> Callable[[bytes], bytes]:
    """A field of type bytes, or a message in it."""
    key = varint(number << 3 | _LENGTH)
    return lambda value: key + varint(len(value)) + value


def text_field(number: int) -> Callable[[str], bytes]:
    """A field of type string."""
    encode = bytes_field(number)
    return lambda value: encode(value.encode(errors="replace"))
