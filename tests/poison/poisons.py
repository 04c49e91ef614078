"""What is written, by whom it is read, and how it must end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgpack
import numpy as np
from msgspec import structs

from streamrl.config import run_file, topology
from streamrl.config.run_file import RunFile
from streamrl.stream.log import protocol
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.protocol import Message, Output
from streamrl.stream.records import Metric, ModelCall, PolicyVersion, Record, Reward, Rollout
from tests.poison.chain import VOCAB
from tests.support import rubbish, sessions
from tests.support.build import group, rollout, turns
from tests.support.groups import scored_group

MIB = 1 << 20


class Poison(NamedTuple):
    name: str
    topic: str  # where it lies
    # how each of its records must end: the beginning of it, and behind "..." a part of the rest; "
    # or " between several
    end: str
    make: Callable[[], Sequence[Message]]
    settings: Mapping[str, Any] = MappingProxyType({})

    @property
    def run(self) -> RunFile:
        return run_file.parse(merged(SETTINGS, self.settings))


SETTINGS: dict[str, Any] = {
    "run": "poison",
    "envs": {"copy": {"fraction": 0.5}, "add": {"fraction": 0.5}},
    "buffer": {"group_size": 2, "min_group_size": 2, "max_age": 1, "max_invalid_frac": 1},
    "batcher": {"total_token_budget": 80, "max_seq_len": 10, "lookahead": 1},
    "model": {"max_seq_len": 10},
}


# An env whose rollouts agents make; the others go on beside it.
AGENTS: dict[str, Any] = {
    "envs": {
        sessions.ENV: {"sessions": {"idle_s": 100, "reward_wait_s": 100}},
    }
}


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        name: merged(below[name], value) if isinstance(value, dict) and name in below else value
        for name, value in above.items()
    }
    return {**below, **both}


def rollouts(*records: Rollout) -> list[Message]:
    return [to_message(Output("rollouts.copy", record.group_id, record)) for record in records]


def in_turns(*records: Record) -> list[Message]:
    """In the topic of an env whose rollouts agents make, each with its session as the key."""
    return [
        to_message(
            Output(topology.turns(sessions.ENV), str(getattr(record, "session", "")), record)
        )
        for record in records
    ]


def in_rewards(*records: Reward) -> list[Message]:
    return [
        to_message(Output(topology.turns(sessions.ENV), record.rollout, record))
        for record in records
    ]


def session(call: ModelCall, value: float = 1.0) -> list[Message]:
    """A whole session with this call."""
    name = call.session
    records = in_turns(sessions.start(name), call, sessions.end(name))
    return [*records, *in_rewards(sessions.reward(name, value))]


def not_a_number() -> list[Message]:
    """A call with a logprob that is not a number, which our own code cannot make."""
    good, *_ = in_turns(sessions.call("a", [1], [2]))
    assert good.value is not None
    fields = msgpack.unpackb(good.value, strict_map_key=False)
    fields["logprobs"] = msgpack.ExtType(1, msgpack.packb(["<f4", [1]]) + b"\0\0\xc0\x7f")
    return [good._replace(value=msgpack.packb(fields))]


def changed(change: Callable[[dict[str, Any]], object], uid: int = 0) -> list[Message]:
    """A good rollout, changed as a map."""
    (message,) = rollouts(rollout("copy", "poison", uid))
    fields = msgpack.unpackb(message.value or b"", strict_map_key=False)
    change(fields)
    return [message._replace(value=msgpack.packb(fields))]


def logprob(value: float) -> Callable[[], list[Message]]:
    data = np.array([-0.5, value, -0.5], "<f4").tobytes()
    return lambda: changed(
        lambda fields: rubbish.turn(fields, "logprobs", rubbish.array("<f4", [3], data))
    )


def forked(group_id: str, number: int) -> Rollout:
    """A rollout of two sequences of six tokens each: more than half a row."""
    asked, answered = turns((1, 2), (3, 3, 3, 3))
    return rollout(
        "copy",
        group_id,
        number,
        turns=[asked, answered, structs.replace(asked, fork=True), answered],
    )


def long_rollout(tokens: int, number: int) -> Rollout:
    made = turns()
    sampled = {
        "tokens": np.full(tokens, 3, np.uint32),
        "logprobs": np.full(tokens, -0.5, np.float32),
    }
    return rollout(
        "copy",
        "long",
        number,
        turns=[
            made[0],
            type(made[1])(
                message="",
                role="assistant",
                inference_metadata=made[1].inference_metadata,
                **sampled,
            ),
        ],
    )


def empty_lists() -> list[Message]:
    """8 MB of metadata: as many lists with nothing in them."""
    (message,) = changed(lambda fields: fields.update(metadata={"x": 7}))
    value = message.value or b""
    count = 8 * MIB - 1000
    assert value.count(b"\xa1x\x07") == 1
    return [
        message._replace(
            value=value.replace(
                b"\xa1x\x07", b"\xa1x\xdd" + count.to_bytes(4, "big") + b"\x90" * count
            )
        )
    ]


def shared(groups: str, uids: str) -> list[Message]:
    """The same group, or uids, of two envs."""
    made = [(env, i) for env in ("copy", "add") for i in range(2)]
    records = [
        rollout(env, groups.format(env), i, rollout_uid=uids.format(env, i)) for env, i in made
    ]
    return [
        to_message(Output(topology.rollouts(record.environment), record.group_id, record))
        for record in records
    ]


def announced(key: str, **fields: Any) -> list[Message]:
    record = PolicyVersion(
        **{
            "learner": "lead",
            "version": 0,
            "uri": "",
            "size_bytes": 0,
            "sha256": "",
            "vocab_size": VOCAB,
            **fields,
        }
    )
    return [to_message(Output("policy-versions", key, record))]


def scored(
    change: Callable[[dict[str, Any]], object], schema: bytes = b"scored-group/1"
) -> Callable[[], list[Message]]:
    def make() -> list[Message]:
        record = scored_group(group("copy", "forged"))
        message = to_message(Output("groups.copy", "forged", record))
        fields = msgpack.unpackb(message.value or b"", strict_map_key=False)
        change(fields)
        return [message._replace(value=msgpack.packb(fields), headers=(("schema", schema),))]

    return make


def changed_version(change: Callable[[dict[str, Any]], object]) -> Callable[[], list[Message]]:
    def make() -> list[Message]:
        (message,) = announced("lead", version=1)
        fields = msgpack.unpackb(message.value or b"")
        change(fields)
        return [message._replace(value=msgpack.packb(fields))]

    return make


def infinite_lengths() -> Any:
    return rubbish.array("<f4", [2], np.array([np.inf, 1], "<f4").tobytes())


def packed(offsets: list[int]) -> Any:
    return rubbish.array("<i8", [len(offsets)], np.array(offsets, "<i8").tobytes())


def nan_advantages(fields: dict[str, Any]) -> None:
    fields["advantages"] = rubbish.array("<f4", [2], np.array([np.nan, 1], "<f4").tobytes())


def raw(topic: str, schema: bytes, value: bytes | None = b"\xc1") -> Callable[[], list[Message]]:
    return lambda: [Message(topic, b"k", value, (("schema", schema),))]


def unreadable(kind: str) -> Callable[[], list[Message]]:
    return lambda: [rubbish.bad(kind, 7, np.random.default_rng(0))]


def infinite(rewards: np.ndarray) -> np.ndarray:
    """An advantage function of somebody's that divides by what may be 0."""
    if np.abs(rewards).max() <= 1e16:
        return rewards - rewards.mean()
    with np.errstate(divide="ignore"):
        return rewards / np.float32(0)


LARGE = {
    "buffer": {"max_window_tokens": 20_000_000},
    "batcher": {"max_seq_len": 4_096_000},
    "model": {"max_seq_len": 4_096_000},
}
INFINITE = {"buffer": {"advantage": "tests.poison.poisons:infinite"}}
WIDE = {"batcher": {"row_count": 3, "total_token_budget": 24}}

LONG = "x" * (20 * MIB)  # a name, which was compressed on its way


def unfetchable(topic: str) -> Callable[[], list[Message]]:
    """What a reader gives in place of a record that its client cannot fetch."""
    return lambda: [protocol.unreadable(Message(topic, None, b""), "a client cannot fetch it")]


def spans(fields: dict[str, Any]) -> None:
    fields["turns"][1]["inference_metadata"]["version_spans"] = [[0, 0, 1]] * (2 * MIB)


def many_turns(fields: dict[str, Any]) -> None:
    fields["turns"] += [{"message": "", "role": ""}] * MIB


def with_headers() -> list[Message]:
    """A good rollout with 8 MB of headers, which are held with it."""
    (message,) = rollouts(rollout("copy", "poison", 0))
    return [message._replace(headers=(*message.headers, ("x", bytes(8 * MIB))))]


def wrapped() -> Any:
    """Lengths whose sum is that of the tokens, modulo 2**64."""
    lengths = np.full(4, 2**62, "<i8")
    lengths[0] += 6
    return rubbish.array("<i8", [4], lengths.tobytes())


def experts_of(shape: list[int], others: int) -> Callable[[], list[Message]]:
    """A group of two rollouts whose sampled turns have such experts, each followed by a turn of
    `others` tokens without any.
    """
    data = bytes(math.prod(shape))

    def change(fields: dict[str, Any]) -> None:
        answered = fields["turns"][1]
        answered["tokens"] = rubbish.array("<u2", [shape[0]], bytes(2 * shape[0]))
        answered["logprobs"] = rubbish.array("<u2", [shape[0]], bytes(2 * shape[0]))
        asked = {
            "message": "",
            "role": "user",
            "tokens": rubbish.array("<u2", [others], bytes(2 * others)),
        }
        fields["turns"] += [asked, {**answered}]
        answered["routed_experts"] = rubbish.array("|u1", shape, data)

    return lambda: [message for number in range(2) for message in changed(change, number)]


HOSTILE = [
    Poison(
        "experts of 1 MB a token",
        "rollouts",
        "invalid: ...has 1000000 experts for each token",
        experts_of([1, 1000, 1000], 3_000),
        LARGE,
    ),
    Poison(
        "no experts, of 2**60 layers",
        "rollouts",
        "invalid: ...has 0 experts for each token",
        experts_of([1, 2**60, 0], 3),
    ),
    Poison(
        "experts of one token that fill those of a million",
        "rollouts",
        "filtered: group larger than a record",
        experts_of([1, 64, 64], 1_000_000),
        LARGE,
    ),
    *(
        Poison(
            f"{name} of 20 MB, compressed",
            "rollouts",
            f"invalid: ...`str` of length <= 1000 - at `$.{name}`",
            lambda name=name: changed(lambda fields: fields.update({name: LONG})),
        )
        for name in ("rollout_uid", "group_id", "problem_id", "producer", "environment")
    ),
    *(
        Poison(
            f"two million {what}, compressed",
            "rollouts",
            "invalid: ...more than 500,000 elements",
            lambda change=change: changed(change),
        )
        for what, change in {
            "version spans": spans,
            "turns": many_turns,
            "rewards": lambda fields: fields.update(
                rewards={f"{number:x}": 0.5 for number in range(MIB)}
            ),
            "rewards of a turn": lambda fields: fields["turns"][1].update(
                rewards={f"{number:x}": 0.5 for number in range(MIB)}
            ),
        }.items()
    ),
    Poison(
        "8 MB of headers, compressed", "rollouts", "expired or filtered or batched", with_headers
    ),
    Poison(
        "what cannot be fetched",
        "rollouts",
        "invalid: a client cannot fetch it",
        unfetchable("rollouts.copy"),
    ),
    Poison(
        "what cannot be fetched",
        "groups",
        "dead letter: a client cannot fetch it",
        unfetchable("groups.copy"),
    ),
    Poison(
        "what cannot be fetched",
        "policy-versions",
        "dead letter: a client cannot fetch it",
        unfetchable("policy-versions"),
    ),
    Poison(
        "what cannot be fetched",
        "turns",
        "dead letter: a client cannot fetch it",
        unfetchable(topology.turns(sessions.ENV)),
        AGENTS,
    ),
    Poison(
        "lengths whose sum wraps",
        "groups",
        "dead letter: ...one is 4611686018427387910, not 0 to",
        scored(lambda fields: fields.update(lengths=wrapped())),
    ),
    Poison(
        "name of 20 MB, compressed",
        "groups",
        "dead letter: ...`str` of length <= 1000",
        scored(lambda fields: fields.update(group_id=LONG)),
    ),
    Poison(
        "name of 20 MB, compressed",
        "policy-versions",
        "dead letter: ...`str` of length <= 1000",
        changed_version(lambda fields: fields.update(learner=LONG)),
    ),
    Poison(
        "name of 20 MB, compressed",
        "rewards",
        "dead letter: ...`str` of length <= 1000",
        lambda: in_rewards(sessions.reward(LONG)),
        AGENTS,
    ),
]

DATA_PATH = [
    *HOSTILE,
    Poison(
        "token id of the padded embedding",
        "rollouts",
        "invalid: token id",
        lambda: rollouts(rollout("copy", "p", 0, turns=turns((1, 2), [VOCAB]))),
    ),
    Poison("logprob -9999", "rollouts", "invalid: ...logprob", logprob(-9999.0)),
    Poison("logprob above 0", "rollouts", "invalid: ...logprob", logprob(0.5)),
    Poison("logprob NaN", "rollouts", "invalid: ...is not finite", logprob(float("nan"))),
    Poison("logprob -inf", "rollouts", "invalid: ...is not finite", logprob(float("-inf"))),
    Poison(
        "8 MB of empty lists in metadata",
        "rollouts",
        "invalid: ...metadata has more than",
        empty_lists,
    ),
    Poison(
        "20 MB that were compressed, unreadable",
        "rollouts",
        "invalid",
        lambda: [Message("rollouts.copy", b"k", b"\xc1" + bytes(20 * MIB), rubbish.SCHEMA)],
    ),
    Poison(
        "20 MB that were compressed, readable",
        "rollouts",
        "invalid: ...metadata has more than",
        lambda: changed(lambda fields: fields.update(metadata={"x": "y" * (20 * MIB)})),
    ),
    Poison(
        "rollout above a message",
        "rollouts",
        "filtered or expired",
        lambda: rollouts(long_rollout(1_200_000, 0)),
        LARGE,
    ),
    Poison(
        "group above a message",
        "rollouts",
        "filtered: group larger than",
        lambda: rollouts(*(long_rollout(600_000, i) for i in range(2))),
        LARGE,
    ),
    Poison(
        "group that fits the budget and not the rows",
        "rollouts",
        "filtered: ...rows",
        lambda: rollouts(*(forked("wide", i) for i in range(2))),
        WIDE,
    ),
    Poison(
        "advantage that is infinite",
        "rollouts",
        "filtered: ...scored",
        lambda: rollouts(
            *(rollout("copy", "inf", i, reward=reward) for i, reward in enumerate((1e17, -1e17)))
        ),
        INFINITE,
    ),
    Poison(
        "group and uids that two envs share",
        "rollouts",
        "batched or expired",
        lambda: shared("1", "{1}"),
    ),
    Poison(
        "uids that two envs share", "rollouts", "batched or expired", lambda: shared("{0}-g", "{1}")
    ),
    Poison(
        "another learner's version",
        "policy-versions",
        "passed over",
        lambda: announced("other", learner="other", version=9),
    ),
    Poison(
        "unreadable",
        "policy-versions",
        "dead letter: ",
        raw("policy-versions", b"policy-version/1"),
    ),
    Poison(
        "another schema",
        "policy-versions",
        "dead letter: schema header",
        raw("policy-versions", b"demand/1"),
    ),
    Poison(
        "null",
        "policy-versions",
        "dead letter: the record is empty",
        raw("policy-versions", b"policy-version/1", None),
    ),
    Poison("unreadable", "groups", "dead letter: ", raw("groups.copy", b"scored-group/1")),
    Poison(
        "another schema",
        "groups",
        "dead letter: schema header",
        scored(lambda fields: None, b"rollout/1"),
    ),
    Poison("NaN advantages", "groups", "dead letter: ...is not finite", scored(nan_advantages)),
    Poison(
        "lengths that do not match",
        "groups",
        "dead letter: ...has shape",
        scored(lambda fields: fields.update(uids=["one"])),
    ),
    Poison(
        "rollouts after the end of their topic",
        "groups",
        "dead letter: a record that it refers to is not in the log",
        scored(lambda fields: fields.update(offsets=packed([10**6, 10**12]))),
    ),
    Poison(
        "rollouts before the beginning of a topic",
        "groups",
        "dead letter: ...is no prompt_length, partition or offset",
        scored(lambda fields: fields.update(offsets=packed([-1, -2]))),
    ),
    Poison(
        "rollouts of a partition that there is not",
        "groups",
        "dead letter: a record that it refers to is not in the log",
        scored(lambda fields: fields.update(partition=99)),
    ),
    Poison(
        "rollouts of an env that there is not",
        "groups",
        "dead letter: a record that it refers to is not in the log",
        scored(lambda fields: fields.update(environment="nowhere")),
    ),
    Poison(
        "the rollouts of another group",
        "groups",
        "dead letter: a record that it refers to is not in the log",
        scored(lambda fields: fields.update(offsets=packed([0, 1]))),
    ),
    Poison(
        "a prompt longer than its rollouts",
        "groups",
        "dead letter: ",
        scored(lambda fields: fields.update(prompt_length=10**9)),
    ),
    Poison(
        "lengths that are infinite",
        "groups",
        "dead letter: ...not a list of integers",
        scored(lambda fields: fields.update(lengths=infinite_lengths())),
    ),
    Poison(
        "version that no array holds",
        "policy-versions",
        "dead letter: ...policy version is",
        changed_version(lambda fields: fields.update(version=2**63)),
    ),
    Poison(
        "probe of nothing",
        "policy-versions",
        "dead letter: ...probe: it takes two tokens or more",
        changed_version(
            lambda fields: fields.update(
                probe={
                    "tokens": rubbish.array("<u2", [0], b""),
                    "logprobs": rubbish.array("<f4", [0], b""),
                }
            )
        ),
    ),
    *(
        Poison(kind, "rollouts", f"invalid: ...{cause}", unreadable(kind))
        for kind, (cause, _) in rubbish.KINDS.items()
    ),
    Poison(
        "call of no session",
        "turns",
        "dead letter: ...no open session",
        lambda: in_turns(sessions.call("a", [1], [2])),
        AGENTS,
    ),
    Poison("logprob NaN", "turns", "dead letter: ...is not finite", not_a_number, AGENTS),
    Poison(
        "session under another key",
        "turns",
        "dead letter: ...its key is",
        lambda: [message._replace(key=b"x") for message in in_turns(sessions.start("s"))],
        AGENTS,
    ),
    Poison(
        "null",
        "turns",
        "dead letter: the record is empty",
        lambda: [in_turns(sessions.start("s"))[0]._replace(value=None)],
        AGENTS,
    ),
    Poison(
        "call that continues nothing",
        "turns",
        "passed over",
        lambda: session(sessions.call("a", [1], [2], "x")),
        AGENTS,
    ),
    Poison(
        "reward of 1e30",
        "turns",
        "passed over",
        lambda: session(sessions.call("a", [1], [2]), 1e30),
        AGENTS,
    ),
    Poison(
        "reward of nobody",
        "turns",
        "dead letter: ...waits for a reward",
        lambda: in_rewards(sessions.reward("nobody")),
        AGENTS,
    ),
]


# ---- metrics, which the orchestrator and the dashboard read --------------------------------------


def metric(source: str, values: dict[str, float], key: str = "", **fields: Any) -> Message:
    return to_message(
        Output(
            "metrics",
            key or source,
            Metric(**{"source": source, "time_s": 1.0, "values": values, **fields}),
        )
    )


METRICS = {
    "infinite reward": metric("batcher", {"batches/copy/reward/mean": float("inf")}, step=1),
    "NaN reward": metric("batcher", {"batches/copy/reward/mean": float("nan")}, step=1),
    "a reward that an env claims": metric("env-copy-0", {"batches/copy/reward/mean": 0.75}, step=1),
    "a step far ahead": metric("batcher", {"batches/copy/reward/mean": 0.75}, step=10**12),
    "infinite time": metric(
        "batcher", {"batches/copy/reward/mean": 0.75}, step=1, time_s=float("inf")
    ),
    "a source that is not the key": metric(
        "batcher", {"batches/copy/reward/mean": 0.75}, key="somebody", step=1
    ),
    "unreadable": Message("metrics", b"k", b"\xc1", (("schema", b"metric/1"),)),
}
