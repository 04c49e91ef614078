"""What a processor is, and where it stands."""

from __future__ import annotations

from dataclasses import replace

import pytest

from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.processor.definition import Processor, ProcessorState, from_json, to_json
from streamrl.system.errors import StreamrlError
from tests.support.adder import Config, State, make_processor, step


def of_rollouts() -> Processor[Config, State]:
    inputs = {"rollouts.copy": ("rollout",), "policy-versions": ("policy-version",)}
    return Processor("buffer", inputs, Config(), State, step)


def test_a_shard_reads_the_partitions_that_are_its_own():
    log = MemoryLog({"rollouts.copy": 3, "policy-versions": 1})
    whole = of_rollouts()
    assert len(whole.partitions(log)) == 4 and whole.journal == "journal.buffer"
    shard = replace(whole, takes=lambda topic, partition: "copy" not in topic or partition == 2)
    assert sorted(shard.partitions(log)) == [("policy-versions", 0), ("rollouts.copy", 2)]


def test_an_env_that_was_taken_out_has_rollouts_like_the_others():
    assert of_rollouts().schemas_of("rollouts.gone") == ("rollout",)
    assert of_rollouts().schemas_of("policy-versions") == ("policy-version",)


def test_a_configuration_comes_back_from_the_journal():
    config = Config(hold=7)
    assert (
        to_json(config) == '{"hold":7}' and from_json(to_json(config), make_processor()) == config
    )


def test_a_journal_imports_nothing_that_the_run_file_does_not_name():
    journaled = '{"hold":3,"advantage":"mine:center"}'
    with pytest.raises(StreamrlError, match=r"^journal.adder names 'mine:center', the run file"):
        from_json(journaled, make_processor())
    named = replace(make_processor(), imports=frozenset({"mine:center"}))
    assert from_json(journaled, named) == Config(hold=3)


def test_it_counts_since_its_last_snapshot():
    current = ProcessorState[Config, State](State())
    current.add_entry(5.0)
    current.add_entry(6.0)
    assert (current.sequence, current.unsaved_since_s) == (1, 5.0)
    current.events_since_snapshot = 9
    current.set_snapshot(offset=3, state_bytes=40)
    assert (current.snapshot_offset, current.snapshot_bytes) == (3, 40)
    assert (current.events_since_snapshot, current.unsaved_since_s) == (0, None)


def test_what_is_deleted_is_not_read_and_nothing_is_read_twice():
    current = ProcessorState[Config, State](State(), offsets={("a", 0): 5, ("b", 0): 9})
    current.skip_removed({("a", 0): 8, ("b", 0): 3, ("elsewhere", 0): 4})
    assert current.offsets == {("a", 0): 8, ("b", 0): 9}
