"""How many elements a MessagePack value has, counted without decoding any.

A list of empty lists is one byte an element, and 64 bytes an element once it is decoded. So a
record of a hundred megabytes that its sender may write would take gigabytes of its readers.
"""

from __future__ import annotations

# By the first byte of an element: the bytes that it has in all, where they follow from it alone.
SIZES = {
    0xC0: 1,  # nil
    0xC2: 1,  # false
    0xC3: 1,  # true
    0xCA: 5,  # floats
    0xCB: 9,
    0xCC: 2,  # unsigned integers
    0xCD: 3,
    0xCE: 5,
    0xCF: 9,
    0xD0: 2,  # signed integers
    0xD1: 3,
    0xD2: 5,
    0xD3: 9,
    0xD4: 3,  # extensions of 1, 2, 4, 8 and 16 bytes
    0xD5: 4,
    0xD6: 6,
    0xD7: 10,
    0xD8: 18,
    **dict.fromkeys((*range(0x80), *range(0xE0, 0x100)), 1),  # small integers
    **{0xA0 + length: 1 + length for length in range(32)},  # short strings
}
# Where a length follows: how many bytes it has, and how many bytes precede the content after it.
LENGTHS = {
    0xC4: (1, 0),  # bytes
    0xC5: (2, 0),
    0xC6: (4, 0),
    0xC7: (1, 1),  # extensions, whose type precedes their content
    0xC8: (2, 1),
    0xC9: (4, 1),
    0xD9: (1, 0),  # strings
    0xDA: (2, 0),
    0xDB: (4, 0),
}
# Of lists and maps: how many bytes their length has, and how many elements each of it is.
CONTAINERS = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}


def has_more_elements(data: bytes, most: int) -> bool:
    """Whether the value has, or claims to have, more than `most` elements in all of its lists and
    maps. False for bytes that are no MessagePack; decoding them fails.
    """
    position = 0
    left = 1  # elements whose first byte is still to come
    count = 0
    size = len(data)
    while left and position < size:
        first = data[position]
        left -= 1
        if first in SIZES:
            position += SIZES[first]
            continue
        if first in LENGTHS:
            length_bytes, before = LENGTHS[first]
            start = position + 1
            position = start + length_bytes + before
            position += int.from_bytes(data[start : start + length_bytes], "big")
            continue
        if first in CONTAINERS:
            length_bytes, each = CONTAINERS[first]
            start = position + 1
            position = start + length_bytes
            elements = each * int.from_bytes(data[start:position], "big")
        elif first < 0x90:
            position += 1
            elements = 2 * (first & 0x0F)  # a short map
        elif first < 0xA0:
            position += 1
            elements = first & 0x0F  # a short list
        else:
            return False
        left += elements
        count += elements
        if count > most:
            return True
    return False
