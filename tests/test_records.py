"""Records on the wire: round trips, and the golden bytes that every later version must
still read.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import msgpack
import numpy as np
import pytest
from msgspec import structs

from streamrl.batcher.assemble import assemble
from streamrl.stream.log import topics
from streamrl.stream.log.codec import decode, encode
from streamrl.stream.records import (
    RECORDS,
    AdapterBase,
    AdapterCheck,
    Demand,
    EnvProgress,
    Fate,
    InferenceMetadata,
    JournalEntry,
    LossWeights,
    Metric,
    PolicyVersion,
    Probe,
    Record,
    RunConfig,
    Scores,
    Server,
    Slice,
    Snapshot,
    Turn,
    VersionSpan,
    Visit,
)
from streamrl.stream.records.compact import compact_ids, compact_logprobs
from tests.support import sessions
from tests.support.build import evaluation, floats, group, rollout, spans, tokens, turns
from tests.support.groups import scored_group

GOLDEN = Path(__file__).parent / "golden"


def examples() -> dict[str, Record]:
    """One of each kind."""
    batch = assemble(
        [group(sizes=(1, 2)), group("add", "g1", sizes=(2,))], 3, 3, row_count=2, max_seq_len=10
    )
    assert batch is not None
    return {
        "rollout": rollout(
            version=1, newest=2, reward=0.5, metadata={"difficulty": "easy", "digits": 2}
        ),
        "env-progress": EnvProgress(
            producer="copy-0", next_problem=7, open_problems=[3, 5], published_groups=5
        ),
        "visit": Visit(
            environment="copy", problem=12, epoch=3, passed=5, rollouts=8, policy_version=4
        ),
        "session-start": sessions.start("s", metadata={"task": "add"}, group_id="g", time_s=1.5),
        "model-call": sessions.call(
            "a",
            [1, 2],
            [3],
            "b",
            request="r#0",
            choice=1,
            fork="template",
            content="",
            tool_calls=[{"id": "c", "type": "function"}],
            time_s=1.5,
        ),
        "session-end": sessions.end(
            "s", failure="no disk", truncation="turns", time_s=1.5, is_last=True
        ),
        "reward": sessions.reward(
            "s",
            0.5,
            call="a",
            scorer="judge",
            scorer_version="2",
            failure="late",
            time_s=1.5,
            rescored=True,
        ),
        "scored-group": scored_group(group(sizes=(1, 2))),
        "batch": batch,
        "scores": Scores(number=3, scorer="scorer-1", reference=-1, logprobs=floats(-0.5, 0.0)),
        "demand": Demand(
            environment="copy",
            wanted_tokens=100,
            held_tokens=20,
            closed_groups={"copy-0": 4},
            missing_tokens=3,
        ),
        "policy-version": PolicyVersion(
            learner="lead",
            version=4,
            uri="file:///w/v4",
            size_bytes=9,
            sha256="ab",
            batch=3,
            probe=Probe(tokens=tokens(1, 2), logprobs=floats(-0.25)),
            time_s=1.5,
            base=AdapterBase(
                uri="file:///w/base",
                size_bytes=99,
                sha256="cd",
                check=AdapterCheck(
                    uri="file:///w/check",
                    size_bytes=9,
                    sha256="ef",
                    probe=Probe(tokens=tokens(3, 4), logprobs=floats(-0.5)),
                ),
            ),
        ),
        "server": Server(
            server_id="inference-0",
            url="http://127.0.0.1:1",
            version=4,
            state="ready",
            heartbeat_s=2.0,
            max_model_len=64,
            seed=7002,
        ),
        "fate": Fate(
            fate="batched",
            environment="copy",
            partition=0,
            offsets=np.array([4, 5]),
            uids=["a", "b"],
            policy_versions=np.array([1, 2], np.int32),
            tokens=np.array([3, 40], np.int32),
            turns=np.array([1, 2], np.int32),
            rewards=np.array([0.5, 1.0], np.float32),
            batch=3,
        ),
        "journal-entry": JournalEntry(
            sequence=2,
            time_s=1.5,
            slices=[Slice(topic="rollouts.copy", partition=0, start=3, end=9, count=5)],
            digest=b"\x01\x02",
            output_count=4,
        ),
        "snapshot": Snapshot(
            sequence=2, positions=[("rollouts.copy", 0, 9)], state=b"\x80", config="{}"
        ),
        "metric": Metric(source="batcher", time_s=1.5, values={"learner/loss": 0.5}, step=3),
        "evaluation": structs.replace(
            evaluation("copy"),
            environment="copy-digits",
            sha256="ab",
            truncated=1,
            repeated=2,
            too_slow=1,
            temperature=0.5,
            max_tokens=3,
            seed=7,
            time_s=1.5,
            seconds=0.5,
        ),
        "run-config": RunConfig(run="quickstart", text="{}", time_s=1.5),
    }


def experts(count: int) -> np.ndarray:
    """Of `count` tokens: two layers, one expert of 300 each."""
    return np.arange(299, 299 + 2 * count, dtype=np.uint16).reshape(count, 2, 1)


def whole() -> dict[str, Record]:
    """Of each kind that the others leave fields of at their defaults: one that has them all."""
    some = floats(0.5, -0.25, 0.0)
    two = floats(0.5, -0.25)
    how = InferenceMetadata(
        server="inference-0",
        temperature=0.5,
        top_p=0.75,
        top_k=20,
        max_tokens=8,
        finish_reason="length",
        version_spans=[VersionSpan(version=1, start=0, end=2)],
        latency_s=0.25,
    )
    turn = Turn(
        message="12",
        role="assistant",
        tokens=compact_ids(np.array([3, 70_000, 5], np.uint32)),
        logprobs=compact_logprobs(floats(-0.5, -0.25, 0.0)),
        reward=0.25,
        rewards={"exact": 0.5},
        token_rewards=some,
        fork=True,
        fork_of=1,
        fork_at=2,
        inference_metadata=how,
        timestamp=1.5,
        loss=LossWeights(policy_gradient=0.5, cross_entropy=2.0, teacher_kl=0.25),
        routed_experts=experts(3),
    )
    short = examples()
    rest = {
        "truncated": True,
        "failure": "it raised",
        "misaligned": "an id is missing",
        "temperature": 0.5,
    }
    return {
        "rollout": structs.replace(
            short["rollout"], turns=[turn], epoch=1, open_sessions=2, **rest
        ),
        "env-progress": structs.replace(
            short["env-progress"],
            replicas=2,
            begins=4,
            turns_from=[3, 0],
            epoch=1,
            forgotten_groups=2,
        ),
        "model-call": structs.replace(
            short["model-call"],
            state={"step": 3},
            kept=4,
            routed_experts=experts(3),
            trained=False,
            lost=True,
        ),
        "scored-group": structs.replace(
            short["scored-group"],
            epoch=1,
            begins_epoch=True,
            uids=["g0-0", "g0-0"],
            branches_from=np.array([0, 1], np.int32),
            branches_at=np.array([0, 1], np.int32),
            **spans([0], [1, 1]),
            token_advantages=two,
            truncated=np.array([0, 1], np.uint8),
            policy_gradient_weights=two,
            cross_entropy_weights=two,
            teacher_kl_weights=two,
        ),
        "batch": structs.replace(
            short["batch"],
            processes=2,
            uids=["g0-0", "g0-0", "g1-0"],
            branches_from=np.array([0, 1, 0], np.int32),
            branches_at=np.array([0, 1, 0], np.int32),
            **spans([1], [0, 1], [1, 1]),
            policy_logprobs=-np.arange(4, dtype=np.float32),
            token_advantages=np.arange(4, dtype=np.float32),
            policy_gradient_weights=np.arange(4, dtype=np.float32),
            cross_entropy_weights=np.arange(4, dtype=np.float32),
            teacher_kl_weights=np.arange(4, dtype=np.float32),
            routed_experts=experts(5),
            prompt_routed_experts=experts(4),
        ),
        "scores": structs.replace(short["scores"], teacher_logprobs=floats(-0.25, 0.0)),
        "demand": structs.replace(short["demand"], granted_groups={"copy-0": 6}, epoch=1),
        "policy-version": structs.replace(
            short["policy-version"], vocab_size=18, skipped=True, lineage=1, replaces="cd"
        ),
        "server": structs.replace(
            short["server"],
            pool="judges",
            model="judge",
            error="no copy",
            in_flight=3,
            mismatch_max_abs=0.5,
            mismatch_tokens=63,
            doubted=True,
        ),
        "fate": structs.replace(short["fate"], cause="of its group"),
        "journal-entry": structs.replace(
            short["journal-entry"],
            snapshot_offset=7,
            config="{}",
            removed=[("rollouts.copy", 0, 3)],
            is_behind=True,
        ),
        "evaluation": structs.replace(short["evaluation"], top_p=0.75, top_k=20),
    }


MADE = {"v1.json": examples, "v1-whole.json": whole}  # file in golden/ -> what is in it
KEPT = [(file, name) for file, make in MADE.items() for name in make()]


@pytest.mark.parametrize(("file", "name"), KEPT)
def test_a_record_comes_back_bit_for_bit(file: str, name: str):
    record = MADE[file]()[name]
    data = encode(record)
    again = decode(f"{name}/1", data)
    assert type(again) is type(record) and encode(again) == data and str(again) == str(record)


def golden(file: str) -> dict[str, bytes]:
    return {
        name: bytes.fromhex(text) for name, text in json.loads((GOLDEN / file).read_text()).items()
    }


@pytest.mark.parametrize(("file", "name"), KEPT)
def test_golden_bytes(file: str, name: str):
    record = MADE[file]()[name]
    kept = golden(file).get(name)
    assert kept is not None, f"run `python -m tests.test_records`: golden/{file} lacks {name}"
    assert encode(record) == kept, (
        f"the bytes of {name} have changed: additive changes only, with a default"
    )
    assert str(decode(f"{name}/1", kept)) == str(record)


@pytest.mark.parametrize("name", RECORDS)
def test_every_field_is_in_golden_bytes(name: str):
    """One that is not could be renamed, and no test would see it."""
    maps = [
        msgpack.unpackb(golden(file)[name], strict_map_key=False)
        for file in MADE
        if name in golden(file)
    ]
    assert maps, f"add {name} to examples() and run `python -m tests.test_records`"
    seen = {field for fields in maps for field in fields}
    unseen = [field for field in RECORDS[name].__struct_fields__ if field not in seen]
    assert unseen == [], (
        f"give the {name} of examples() or whole() these fields with other values than their"
        " defaults, and run `python -m tests.test_records`"
    )
    if name == "rollout":
        (turn,) = maps[-1]["turns"]
        assert turn.keys() == set(Turn.__struct_fields__) and turn[
            "inference_metadata"
        ].keys() == set(InferenceMetadata.__struct_fields__)


def test_a_field_that_was_added_later_is_ignored():
    later = msgpack.packb(
        {**msgpack.unpackb(encode(examples()["demand"])), "invented_later": [1, 2]}
    )
    assert decode("demand/1", later or b"") == examples()["demand"]


def test_arrays_keep_every_bit():
    logprobs = np.array([-0.1, -1e-38, -0.0, -3.4e38], np.float32)
    again = decode(
        "rollout/1",
        encode(
            rollout(
                turns=[
                    Turn(
                        message="",
                        role="assistant",
                        tokens=tokens(1, 2, 3, 65535),
                        logprobs=logprobs,
                    )
                ]
            )
        ),
    )
    (turn,) = again.turns  # type: ignore[attr-defined]
    assert turn.logprobs.tobytes() == logprobs.tobytes() and turn.tokens.tolist() == [
        1,
        2,
        3,
        65535,
    ]


def test_decoding_copies_nothing():
    data = encode(rollout(turns=turns(response=range(1000))))
    array = decode("rollout/1", data).turns[1].tokens  # type: ignore[attr-defined]
    assert not array.flags.owndata and not array.flags.writeable


def test_the_documentation_says_what_is_in_every_topic():
    page = (Path(__file__).parents[1] / "docs" / "records.md").read_text()
    for kind in topics.kinds().values():
        row = next((line for line in page.splitlines() if line.startswith(f"| `{kind.name}")), "")
        missing = sorted(set(kind.records) - set(re.findall(r"[a-z]+(?:-[a-z]+)*", row)))
        assert not missing, f"docs/records.md: the row of `{kind.name}` lacks {', '.join(missing)}"


def write_golden(may_change: bool) -> None:
    """Write the golden bytes of records that have none. Those of others are written again only if
    they may change: after a field with a default was added.
    """
    changed = list[str]()
    for file, make in MADE.items():
        before = golden(file)
        after = {name: encode(record) for name, record in make().items()}
        changed += [f"{file}: {name}" for name in before if before[name] != after.get(name)]
        if changed and not may_change:
            raise SystemExit(
                f"nothing is written: the bytes of {', '.join(changed)} would change; after an"
                " additive change run `python -m tests.test_records --change`"
            )
        text = json.dumps({name: data.hex() for name, data in after.items()}, indent=1)
        (GOLDEN / file).write_text(text + "\n")


if __name__ == "__main__":  # python -m tests.test_records [--change]
    write_golden(may_change="--change" in sys.argv[1:])
