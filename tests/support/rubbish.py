"""Records that no env of ours would write, by kind: what a broken or hostile producer may send to
`rollouts.copy`. Each says its kind in a header.
"""

from __future__ import annotations

from collections.abc import Callable

import msgpack
import numpy as np

from streamrl.config import topology
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.protocol import Message, Output
from tests.support.build import rollout

ENV = "copy"  # whose topic they are for
KIND = "kind"  # the header
LARGE = 8 * 1024 * 1024 - 200  # bytes, as much as the topic takes: the letter is larger
SCHEMA = (("schema", b"rollout/1"),)
Random = np.random.Generator
Map = dict[str, object]


def raw(change: Callable[[Map], object], number: int) -> bytes:
    """A good rollout of 4 KiB, changed as a map. It does not bear the name of a good producer: for
    each group that is closed, a producer may launch another one.
    """
    good = rollout(ENV, f"bad-{number}", producer="hostile-0")
    encoded = to_message(Output(topology.rollouts(ENV), "b", good)).value or b""
    fields: Map = msgpack.unpackb(encoded, strict_map_key=False)
    fields["metadata"] = {"ballast": "x" * 4096}
    change(fields)
    return msgpack.packb(fields) or b""


def array(dtype: str, shape: list[int], data: bytes) -> msgpack.ExtType:
    return msgpack.ExtType(1, (msgpack.packb([dtype, shape]) or b"") + data)


def turn(fields: Map, name: str, value: object) -> None:
    fields["turns"][1][name] = value  # type: ignore[index]


def nested(depth: int) -> bytes:
    return b"\x81\xa8metadata\x81\xa1x" + b"\x91" * depth + b"\xc0"


KINDS: dict[str, tuple[str, Callable[[int, Random], Message | bytes | None]]] = {
    # name -> what its cause says, and how it is made; bytes travel with the right schema and key
    "random bytes": ("rollout: ", lambda n, random: b"\xc1" + random.bytes(4096)),
    "truncated": (
        "rollout: Input data was truncated",
        lambda n, random: raw(lambda f: None, n)[: int(random.integers(1, 4000))],
    ),
    "wrong schema": (
        "schema header is 'demand/1', expected rollout",
        lambda n, random: Message("", b"k", raw(lambda f: None, n), (("schema", b"demand/1"),)),
    ),
    "no schema": (
        "schema header is '', expected rollout",
        lambda n, random: Message("", b"k", raw(lambda f: None, n)),
    ),
    "wrong type": (
        "Expected `str`, got `int`",
        lambda n, random: raw(lambda f: f.update(group_id=7), n),
    ),
    "missing field": (
        "missing required field `rollout_uid`",
        lambda n, random: raw(lambda f: f.pop("rollout_uid"), n),
    ),
    "wrong dtype": (
        "array with a dtype of",
        lambda n, random: raw(lambda f: turn(f, "logprobs", array("<f8", [3], bytes(24))), n),
    ),
    "float tokens": (
        "must be one-dimensional and unsigned",
        lambda n, random: raw(lambda f: turn(f, "tokens", array("<f4", [3], bytes(12))), n),
    ),
    "nan reward": (
        "a reward is not finite",
        lambda n, random: raw(lambda f: f.update(reward=float("nan")), n),
    ),
    "infinite reward by name": (
        "a reward is not finite",
        lambda n, random: raw(lambda f: f.update(rewards={"x": float("inf")}), n),
    ),
    "huge reward": (
        "a reward is larger than",
        lambda n, random: raw(lambda f: f.update(reward=1e300), n),
    ),
    "huge reward by name": (
        "a reward is larger than",
        lambda n, random: raw(lambda f: f.update(rewards={"x": 1e200}), n),
    ),
    "nan logprobs": (
        "is not finite",
        lambda n, random: raw(
            lambda f: turn(f, "logprobs", array("<f4", [3], b"\0\0\xc0\x7f" * 3)), n
        ),
    ),
    "lengths that do not match": (
        "has shape [2], expected [3]",
        lambda n, random: raw(lambda f: turn(f, "logprobs", array("<f4", [2], bytes(8))), n),
    ),
    "unknown env": (
        "its environment is 'nowhere'",
        lambda n, random: raw(lambda f: f.update(environment="nowhere"), n),
    ),
    "too far ahead": (
        "is further ahead than",
        lambda n, random: raw(lambda f: f.update(newest_policy_version=100), n),
    ),
    "version beyond int32": (
        "are not a span",
        lambda n, random: raw(
            lambda f: f.update(policy_version=2**40, newest_policy_version=2**40), n
        ),
    ),
    "enormous claimed shape": (
        "array claims shape [1099511627776]",
        lambda n, random: raw(lambda f: turn(f, "tokens", array("<u2", [2**40], bytes(6))), n),
    ),
    "enormous claimed list": (
        "rollout: Input data was truncated",
        lambda n, random: b"\x81\xa5turns\xdd\xff\xff\xff\xff",
    ),
    "deep nesting": (
        "rollout: nested too deeply",
        lambda n, random: nested(100_000 if n % 50 == 0 else 5_000),
    ),
    "somewhat deep nesting": (
        "rollout: nested too deeply",
        lambda n, random: raw(
            lambda f: f.update(metadata={"x": msgpack.unpackb(b"\x91" * 40 + b"\xc0")}), n
        ),
    ),
    "empty": ("rollout: Input data was truncated", lambda n, random: b""),
    "null": ("the record is empty", lambda n, random: None),
    "wrong key": (
        "is not the rollout's group_id",
        lambda n, random: Message("", b"another", raw(lambda f: None, n), SCHEMA),
    ),
    "key that is no text": (
        "is not the rollout's group_id",
        lambda n, random: Message("", b"\xff\xfe", raw(lambda f: None, n), SCHEMA),
    ),
    "temperature 0 in float32": (
        "temperature 1e-50 is not within",
        lambda n, random: raw(lambda f: f.update(temperature=1e-50), n),
    ),
    "quotes what a terminal would obey": (
        "\\x1b[2J",
        lambda n, random: Message("", b"k", b"\xc1", (("schema", b"\x1b[2J\n/1"),)),
    ),
}


def bad(name: str, number: int, random: Random) -> Message:
    value = KINDS[name][1](number, random)
    message = (
        value
        if isinstance(value, Message)
        else Message("", f"bad-{number}".encode(), value, SCHEMA)
    )
    return message._replace(
        topic=topology.rollouts(ENV), headers=(*message.headers, (KIND, name.encode()))
    )


def is_rubbish(message: Message) -> bool:
    """Was it made here?"""
    return any(name == KIND for name, _ in message.headers)
