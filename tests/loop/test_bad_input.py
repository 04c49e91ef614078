"""10,000 malformed records of many kinds among good ones, through a real broker and real processes of buffer and batcher.

Each is put aside with its cause, every good rollout is trained on, nobody dies, and no memory is kept of what was refused.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgpack
import numpy as np
import psutil
import pytest
import yaml

from streamrl import config, topics
from streamrl.config import RunFile
from streamrl.replay.audit import audit
from streamrl.replay.letters import letters
from streamrl.replay.show import parts_of
from streamrl.stream.codec import to_message
from streamrl.stream.kafka import KafkaLog
from streamrl.stream.log import Message, Output
from tests.build import rollout
from tests.data_path import announce, wait_for_batches

ROUNDS, BAD_A_ROUND, GROUPS = 10, 1000, 40  # 40 groups of 2 rollouts of 5 tokens an env are its half of a batch of 800 tokens
SETTINGS = {
    "envs": {"copy": {"fraction": 0.5}, "add": {"fraction": 0.5}},
    "buffer": {"group_size": 2, "max_age": 2, "max_invalid_frac": 1},  # this is what it is about: read on whatever comes
    "batcher": {"total_token_budget": 4 * 5 * GROUPS, "max_seq_len": 10, "lookahead": 1},
    "model": {"max_seq_len": 10},
    "topics": {"partitions": 2},
}
GROWTH_MIB = 12  # of a part while it refuses some 60 MiB
SCHEMA = (("schema", b"rollout/1"),)
Random = np.random.Generator
Map = dict[str, object]


# ---- kinds ------------------------------------------------------------------------------------------------------------------------------


def raw(change: Callable[[Map], object], number: int) -> bytes:
    """A good rollout of 4 KiB, changed as a map."""
    fields: Map = msgpack.unpackb(to_message(Output("rollouts.copy", "b", rollout("copy", f"bad-{number}", 0))).value or b"", strict_map_key=False)
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
    "truncated": ("rollout: Input data was truncated", lambda n, random: raw(lambda f: None, n)[: int(random.integers(1, 4000))]),
    "wrong schema": (
        "schema header is 'demand/1', expected rollout",
        lambda n, random: Message("", b"k", raw(lambda f: None, n), (("schema", b"demand/1"),)),
    ),
    "no schema": ("schema header is '', expected rollout", lambda n, random: Message("", b"k", raw(lambda f: None, n))),
    "wrong type": ("Expected `str`, got `int`", lambda n, random: raw(lambda f: f.update(group_id=7), n)),
    "missing field": ("missing required field `rollout_uid`", lambda n, random: raw(lambda f: f.pop("rollout_uid"), n)),
    "wrong dtype": ("array with a dtype of", lambda n, random: raw(lambda f: turn(f, "logprobs", array("<f8", [3], bytes(24))), n)),
    "float tokens": ("must be one-dimensional and unsigned", lambda n, random: raw(lambda f: turn(f, "tokens", array("<f4", [3], bytes(12))), n)),
    "nan reward": ("a reward is not finite", lambda n, random: raw(lambda f: f.update(reward=float("nan")), n)),
    "infinite reward by name": ("a reward is not finite", lambda n, random: raw(lambda f: f.update(rewards={"x": float("inf")}), n)),
    "huge reward": ("a reward is larger than", lambda n, random: raw(lambda f: f.update(reward=1e300), n)),
    "huge reward by name": ("a reward is larger than", lambda n, random: raw(lambda f: f.update(rewards={"x": 1e200}), n)),
    "nan logprobs": ("is not finite", lambda n, random: raw(lambda f: turn(f, "logprobs", array("<f4", [3], b"\0\0\xc0\x7f" * 3)), n)),
    "lengths that do not match": (
        "has shape [2], expected [3]",
        lambda n, random: raw(lambda f: turn(f, "logprobs", array("<f4", [2], bytes(8))), n),
    ),
    "unknown env": ("rollout says environment 'nowhere'", lambda n, random: raw(lambda f: f.update(environment="nowhere"), n)),
    "too far ahead": ("is further ahead than", lambda n, random: raw(lambda f: f.update(newest_policy_version=100), n)),
    "version beyond int32": ("are not a span", lambda n, random: raw(lambda f: f.update(policy_version=2**40, newest_policy_version=2**40), n)),
    "enormous claimed shape": (
        "array claims shape [1099511627776]",
        lambda n, random: raw(lambda f: turn(f, "tokens", array("<u2", [2**40], bytes(6))), n),
    ),
    "enormous claimed list": ("rollout: Input data was truncated", lambda n, random: b"\x81\xa5turns\xdd\xff\xff\xff\xff"),
    "deep nesting": ("rollout: nested too deeply", lambda n, random: nested(100_000 if n % 50 == 0 else 5_000)),
    "somewhat deep nesting": (
        "rollout: nested too deeply",
        lambda n, random: raw(lambda f: f.update(metadata={"x": msgpack.unpackb(b"\x91" * 40 + b"\xc0")}), n),
    ),
    "empty": ("rollout: Input data was truncated", lambda n, random: b""),
    "null": ("the record is empty", lambda n, random: None),
    "wrong key": ("is not the rollout's group_id", lambda n, random: Message("", b"another", raw(lambda f: None, n), SCHEMA)),
    "key that is no text": ("is not the rollout's group_id", lambda n, random: Message("", b"\xff\xfe", raw(lambda f: None, n), SCHEMA)),
    "temperature 0 in float32": ("temperature 1e-50 is not within", lambda n, random: raw(lambda f: f.update(temperature=1e-50), n)),
    "quotes what a terminal would obey": ("\\x1b[2J", lambda n, random: Message("", b"k", b"\xc1", (("schema", b"\x1b[2J\n/1"),))),
}
LARGE = 8 * 1024 * 1024 - 200  # as much as the topic takes: the letter is larger


def bad(name: str, number: int, random: Random) -> Message:
    made = KINDS[name][1](number, random)
    message = made if isinstance(made, Message) else Message("", f"bad-{number}".encode(), made, SCHEMA)
    return message._replace(topic="rollouts.copy", headers=(*message.headers, ("kind", name.encode())))


# ---- the run ----------------------------------------------------------------------------------------------------------------------------


@contextmanager
def parts(path: Path, broker: str) -> Iterator[dict[str, psutil.Popen]]:
    environment = {**os.environ, "STREAMRL_KAFKA": broker}
    command = [sys.executable, "-m", "streamrl.cli"]
    started = {name: psutil.Popen([*command, name, str(path)], env=environment, stderr=path.with_suffix(f".{name}.log").open("wb")) for name in ROLES}
    try:
        yield started
    finally:
        for process in started.values():
            process.terminate()
            process.wait(20)


ROLES = ("buffer", "batcher")


@pytest.fixture
def run(tmp_path: Path, broker: str, run_name: str) -> tuple[RunFile, Path]:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"run": run_name, "runs_dir": str(tmp_path / "runs"), **SETTINGS}))
    made = config.load(path)
    topics.apply(made, {"bootstrap.servers": broker})
    return made, path


def good(number: int, version: int) -> list[Message]:
    """A group of each env."""
    records = [rollout(env, f"{env}-{number}", i, version, reward=(number * 7 + i * 3) % 5 / 4) for env in ("copy", "add") for i in range(2)]
    return [to_message(Output(f"rollouts.{record.environment}", record.group_id, record)) for record in records]


def send(log: KafkaLog, messages: list[Message]) -> None:
    writer = log.plain_writer()
    for message in messages:
        writer.send(message)
    writer.flush(30)
    writer.close()


def test_ten_thousand_malformed_records_stop_nobody(broker: str, run: tuple[RunFile, Path]):
    settings, path = run
    log, random, names = KafkaLog({"bootstrap.servers": broker}, settings.run), np.random.default_rng(0), sorted(KINDS)
    memory: dict[str, list[float]] = {name: [] for name in ROLES}
    with parts(path, broker) as processes:
        for version in range(ROUNDS):
            first = version * BAD_A_ROUND
            mixed = [bad(names[n % len(names)], n, random) for n in range(first, first + BAD_A_ROUND)]
            places = sorted(random.integers(0, BAD_A_ROUND, GROUPS).tolist(), reverse=True)
            for number, place in enumerate(places):
                mixed[place:place] = good(version * GROUPS + number, version)
            announce(log, version)
            send(log, mixed)
            if version == 0:
                send(log, [Message("rollouts.copy", b"large", b"\xc1" + bytes(LARGE), (*SCHEMA, ("kind", b"large")))])
                send(log, [Message("policy-versions", b"lead", b"\xc1", (("schema", b"policy-version/1"),))])
            wait_for_batches(log, version + 1, 60)
            for name, process in processes.items():
                memory[name].append(process.memory_info().rss / 2**20)
        wait_until_taken(log)
        assert {name: process.poll() for name, process in processes.items()} == dict.fromkeys(ROLES)

    sent = Counter(names[n % len(names)] for n in range(ROUNDS * BAD_A_ROUND)) + Counter({"large": 1})
    causes: dict[str, set[str]] = {}
    aside: Counter[str] = Counter()
    for letter in letters(log, "rollouts.copy"):
        kind = dict(letter.message.headers)["kind"].decode()
        aside[kind] += 1
        causes.setdefault(kind, set()).add(letter.cause)
    assert aside == sent and len(KINDS) >= 12 and sum(sent.values()) > 10_000
    assert [(kind, cause) for kind, found in causes.items() if kind in KINDS for cause in found if KINDS[kind][0] not in cause] == []
    assert sum(1 for _ in letters(log, "policy-versions")) == len(ROLES)  # each reader put it aside

    account = audit(log, list(settings.envs), "lead", list(parts_of(settings).values()))
    assert account.balanced and account.problems == []
    assert account.total("invalid") == sum(sent.values())
    assert account.total("batched") == account.published - account.total("invalid") == ROUNDS * GROUPS * 4
    print({name: [round(value) for value in values] for name, values in memory.items()})
    for name, values in memory.items():
        assert max(values[3:]) - values[2] < GROWTH_MIB, f"{name} grew: {values}"


def wait_until_taken(log: KafkaLog, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while any(log.committed("buffer").get(("rollouts.copy", p), 0) < log.end("rollouts.copy", p) for p in range(2)):
        assert time.monotonic() < deadline, f"{log.committed('buffer')}"
        time.sleep(0.1)


def test_a_source_of_rubbish_is_left_alone_and_the_command_line_shows_and_puts_back(broker: str, run: tuple[RunFile, Path]):
    settings, path = run
    path.write_text(path.read_text().replace("max_invalid_frac: 1", "max_invalid_frac: 0.5"))
    log, random = KafkaLog({"bootstrap.servers": broker}, settings.run), np.random.default_rng(0)
    with parts(path, broker):
        announce(log, 0)
        send(log, [bad("too far ahead", n, random) for n in range(1500)])
        said = path.with_suffix(".buffer.log")
        wait_for(lambda: "rollouts.copy sends rubbish and is not read for 30 s" in said.read_text())
        send(log, [bad("too far ahead", n, random) for n in range(2000, 4000)])
        send(log, good(0, 0))
        wait_for(lambda: log.end("groups.add", 0) + log.end("groups.add", 1) > 0)  # the other env goes on
        taken = sum(1 for _ in letters(log, "rollouts.copy"))
        assert 1000 <= taken <= 1500 + 512

    def streamrl(*arguments: str) -> str:
        environment = {**os.environ, "STREAMRL_KAFKA": broker, "COLUMNS": "160"}
        done = subprocess.run([sys.executable, "-m", "streamrl.cli", *arguments], capture_output=True, text=True, timeout=60, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert f"{taken:,}" in streamrl("dead-letters", "list", str(path))
    first = next(letters(log, "rollouts.copy"))
    assert "newest_policy_version: 100" in streamrl("dead-letters", "show", str(path), str(first))
    assert "1 records put back to rollouts.copy" in streamrl("dead-letters", "retry", str(path), str(first))
    assert "nothing to put back" in streamrl("dead-letters", "retry", str(path), str(first))
    assert f"{taken - 1:,} records put back" in streamrl("dead-letters", "retry", str(path), "--all")
    assert "nothing to put back" in streamrl("dead-letters", "retry", str(path), "rollouts.copy")


def wait_for(true: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)
