"""Which partition a key belongs to, as Kafka's Java clients choose it."""

from __future__ import annotations

from functools import lru_cache

MASK = 0xFFFFFFFF
SEED = 0x9747B28C
MULTIPLIER = 0x5BD1E995


@lru_cache(4096)
def partition_of(key: str, partitions: int) -> int:
    """murmur2 of the key's bytes, without the sign, modulo the number of partitions."""
    return (murmur2(key.encode("utf-8", "surrogateescape")) & 0x7FFFFFFF) % partitions


def murmur2(data: bytes) -> int:
    """The 32 bits that `Utils.murmur2` of Kafka gives, as an unsigned number."""
    value = SEED ^ len(data)
    whole = len(data) & ~3
    for start in range(0, whole, 4):
        word = int.from_bytes(data[start : start + 4], "little") * MULTIPLIER & MASK
        word = (word ^ word >> 24) * MULTIPLIER & MASK
        value = (value * MULTIPLIER & MASK) ^ word
    if rest := data[whole:]:
        value = (value ^ int.from_bytes(rest, "little")) * MULTIPLIER & MASK
    value = (value ^ value >> 13) * MULTIPLIER & MASK
    return value ^ value >> 15
