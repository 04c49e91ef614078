from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from streamrl.buffer import closing
from streamrl.extensions.recordings.replay import (
    RecordedOutputs,
    differences,
    first_difference,
    replay,
)
from streamrl.stream.log import partitions_reader
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Message, Output
from streamrl.stream.records import ScoredGroup
from tests.support.build import group
from tests.support.data_path import TOPICS, parts, play
from tests.support.groups import scored_group


@pytest.fixture
def recording() -> MemoryLog:
    log = MemoryLog(TOPICS)
    play(log)
    return log


def test_a_run_replays_bit_for_bit(recording: MemoryLog):
    buffer, batcher = (replay(recording, part)[0] for part in parts())
    assert (buffer.difference, batcher.difference) == ("", "")
    assert buffer.identical["groups"] == 40 and batcher.identical["batches"] >= 4


def test_one_ulp_of_one_advantage_is_found(recording: MemoryLog, monkeypatch: pytest.MonkeyPatch):
    def off_by_one_ulp(*arguments: Any) -> ScoredGroup:
        group = original(*arguments)
        if group.group_id != "copy-3":
            return group
        bits = group.advantages.copy()
        bits[1] = np.nextafter(bits[1], np.float32(9))
        fields = {name: getattr(group, name) for name in group.__struct_fields__}
        return ScoredGroup(**{**fields, "advantages": bits})

    original = closing.score_group
    monkeypatch.setattr(closing, "score_group", off_by_one_ulp)
    result, _ = replay(recording, parts()[0])
    assert (
        result.difference.startswith("groups.copy[0]@")
        and "advantages[1]: recorded" in result.difference
    )


def test_other_settings_give_another_run(recording: MemoryLog):
    buffer = parts()[0]
    other = replace(
        buffer, step=lambda config, *rest: buffer.step(replace(config, advantage="grpo"), *rest)
    )
    assert "advantages[0]: recorded" in replay(recording, other)[0].difference


def test_it_can_stop_at_a_batch(recording: MemoryLog):
    result, fold = replay(recording, parts()[1], stop_at=lambda fold: fold.state.next_batch == 2)
    assert fold.state.next_batch == 2 and result.identical["batches"] == 2


def test_outputs_that_are_deleted_while_it_runs_are_no_difference(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(partitions_reader, "FETCH_BYTES", 1)
    monkeypatch.setattr(partitions_reader, "AHEAD_BYTES", 1)
    log = MemoryLog({"groups.copy": 1})
    messages = [Message("groups.copy", f"g{i}".encode(), b"", ()) for i in range(1500)]
    log.append(messages, False)
    recorded = RecordedOutputs(log)
    assert recorded.has_all_of("groups.copy") and recorded.next(messages[0]) is not None
    log.delete_before({("groups.copy", 0): 1400})
    assert any(recorded.next(message) is None for message in messages[1:])
    assert not recorded.has_all_of("groups.copy")


def test_differences_name_field_and_index():
    one = group(name="g")
    other = group(name="g", reward=0.5)
    assert list(differences(one, other, "")) == [
        "rewards[0]: recorded 0.0, replayed 0.5",
        "rewards[1]: recorded 0.0, replayed 0.5",
    ]
    assert list(differences(np.array([0.0], np.float32), np.array([-0.0], np.float32), "x")) == [
        "x[0]: recorded 0.0, replayed -0.0"
    ]
    assert (
        next(differences(group(sizes=(1,)), group(sizes=(1, 1)), ""))
        == "offsets: recorded int64[1], replayed int64[2]"
    )


def test_a_message_that_cannot_be_read_differs_too():
    message = to_message(Output("groups.copy", "g", scored_group(group())))
    assert "cannot be read" in first_difference(message, message._replace(value=b"\xc1"))
