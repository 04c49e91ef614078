from __future__ import annotations

from streamrl.config.run_file import with_overrides
from streamrl.extensions.recordings.processors import processors_of
from tests.support.data_path import RUN


def test_processors_are_the_parts_of_the_run_that_have_journals():
    sharded = with_overrides(RUN, ["buffer.shards=2", "topics.partitions=2"])
    assert list(processors_of(sharded)) == ["buffer-0", "buffer-1", "batcher"]
    sessions = with_overrides(RUN, ["envs.add={fraction: 0.25, sessions: {}}"])
    assert list(processors_of(sessions)) == ["assembler", "buffer", "batcher"]
