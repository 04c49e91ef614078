"""The first batch of a fork is that of its parent, in whatever order things came."""

from __future__ import annotations

import random

import pytest

from streamrl.batcher import process as batcher
from streamrl.batcher.batch_builder import BatchBuilder
from streamrl.buffer import process as buffer
from streamrl.config import topology
from streamrl.config.run_file import RunFile, with_overrides
from streamrl.config.sections.operation import Fork
from streamrl.extensions.recordings.fork import child_run_file
from streamrl.extensions.recordings.fork_topics import copy_inherited
from streamrl.stream.log.codec import encode
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Output
from streamrl.stream.processor.definition import ProcessorState
from streamrl.stream.processor.joiner import open_reader
from streamrl.stream.processor.transaction import process_batch
from streamrl.stream.records import Rollout
from streamrl.system.errors import StreamrlError
from tests.support.build import rollout
from tests.support.data_path import RUN, TOPICS, announce, publish
from tests.support.forks import ENVS, batches, fork, recorded_run


@pytest.fixture(scope="module")
def parent() -> MemoryLog:
    return recorded_run()


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_without_a_change_the_first_batch_is_the_parents_byte_for_byte(
    parent: MemoryLog, version: int
):
    result, log = fork(parent, version=version)
    batch = batches(log)[0]
    assert result.has_batch and batch.number == version
    assert encode(batch) == encode(batches(parent)[version])


SMALL = with_overrides(
    RUN,
    (
        "buffer.group_size=3",
        "buffer.max_window_tokens=400",
        "batcher.lookahead=1",
        "envs.copy.fraction=0.4",
        "envs.add.fraction=0.25",
    ),
)


PARTITIONED = {
    **TOPICS,
    **ENVS,
    **{f"{kind}.{env}": 2 for kind in ("rollouts", "groups") for env in RUN.envs},
}


TAUGHT = with_overrides(
    SMALL,
    (
        "envs.copy.fraction=0",
        "envs.add.fraction=0",
        (
            "batcher.curriculum={kind: stages, stages: [{fractions: {copy: 0.8}, until: {env: copy,"
            " reward: 0.45, batches: 2}}, {fractions: {add: 0.7}}]}"
        ),
    ),
)


def wander(seed: int, run: RunFile = SMALL) -> MemoryLog:
    """A run in which rollouts, failures, versions and the two parts come in any order: groups in
    pieces, aged out, late, held, a batcher behind.
    """
    rng = random.Random(seed)
    log = MemoryLog(PARTITIONED)
    parts = [buffer.make_processor(run), batcher.make_processor(run)]
    folds = [
        ProcessorState(
            part.initial(),
            offsets={(t, p): 0 for t in part.inputs for p in range(log.topics()[t])},
        )
        for part in parts
    ]
    writers = [log.writer(part.name) for part in parts]
    readers = [
        open_reader(log, part, fold.offsets) for part, fold in zip(parts, folds, strict=True)
    ]
    announce(log, 0)
    version = 0
    number = 0
    waiting = list[Rollout]()
    for _ in range(500):
        which = rng.randrange(6)
        if which == 0 and len(batches(log)) > version:
            version += 1
            announce(log, version)
        elif which in (1, 2):
            number += 1
            env = rng.choice(list(RUN.envs))
            oldest = max(0, version - rng.randrange(3))
            for i in range(3):
                how = (
                    {"failure": "x"}
                    if rng.random() < 0.1
                    else {"newest": rng.randint(oldest, version), "reward": rng.random()}
                )
                waiting.append(rollout(env, f"{env}-{number}", i, oldest, **how))
            rng.shuffle(waiting)
            for record in waiting[: rng.randrange(6)]:
                waiting.remove(record)
                publish(log, Output(topology.rollouts(record.environment), record.group_id, record))
        else:
            i = which % 2
            readers[i].set_paused(parts[i].paused(parts[i].config, folds[i].state))
            if messages := readers[i].poll(rng.randint(1, 9), 0):
                process_batch(parts[i], folds[i], messages, 0.0, writers[i].commit)
    return log


@pytest.mark.parametrize(
    ("seed", "parent"), [*((seed, SMALL) for seed in range(8)), (0, TAUGHT), (1, TAUGHT)]
)
def test_so_it_is_in_whatever_order_things_came(seed: int, parent: RunFile):
    log = wander(seed, parent)
    assert len(batches(log)) >= 4
    stages = list[int]()
    for batch in batches(log)[:-1]:
        run = child_run_file(parent, "other", ()).model_copy(
            update={"fork": Fork(run="small", version=batch.number, sha256="ab")}
        )
        new = MemoryLog(PARTITIONED)
        result = copy_inherited(log, new, parent, run, "", True, time_s=1.0)
        # a stage that ends with it may let the groups held make the next one too, there as here
        first = batches(new)
        assert first and [encode(batch) for batch in first] == [
            encode(batch) for batch in batches(log)[batch.number :][: len(first)]
        ]
        assert len(first) == 1 or parent is TAUGHT
        stages.append(result.run.fork.stage if result.run.fork else -1)
    assert stages == sorted(stages) and (stages[0], stages[-1]) == (0, int(parent is TAUGHT))


def test_code_that_no_longer_makes_the_parents_batches_is_found(
    parent: MemoryLog, monkeypatch: pytest.MonkeyPatch
):
    """Else the fork would take other rollouts along, and say nothing."""
    monkeypatch.setattr(BatchBuilder, "batch_is_due", lambda self: self.state.next_batch < 1)
    with pytest.raises(
        StreamrlError,
        match=(
            "^the journal of batcher of run small does not lead to its batch 2: the code has"
            " changed since"
        ),
    ):
        fork(parent)
