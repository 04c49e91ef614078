"""The partition of a key is that of Kafka's Java clients."""

from __future__ import annotations

from streamrl.stream.log.partitioner import murmur2, partition_of

# from Kafka's own test (UtilsTest.testMurmur2)
KNOWN = {
    "21": -973932308,
    "foobar": -790332482,
    "a-little-bit-long-string": -985981536,
    "abc": 479470107,
}


def test_hashes_are_those_of_kafkas_own_test():
    assert {key: murmur2(key.encode()) for key in KNOWN} == {
        key: value % 2**32 for key, value in KNOWN.items()
    }


def test_the_partition_of_a_key_is_its_hash_without_the_sign():
    assert {key: partition_of(key, 2**31) for key in KNOWN} == {
        key: value & 0x7FFFFFFF for key, value in KNOWN.items()
    }
    assert partition_of("abc", 6) == 479470107 % 6
