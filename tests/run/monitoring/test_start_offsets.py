"""What is read of a run that may be weeks old."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from streamrl.config.run_file import parse
from streamrl.config.sections.batches import Target
from streamrl.run.monitoring.run_view import TOPICS, RunView
from streamrl.run.monitoring.start_offsets import (
    LAST_EVALS,
    LAST_FATES,
    LAST_METRICS,
    MOST_METRICS,
    batches_start,
    has_progress,
    start_offsets,
    tail_start,
)
from streamrl.run.monitoring.status import read_view
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Message, Output, end_offset
from streamrl.stream.records import Fate, Metric
from tests.run.orchestrator.script import batch
from tests.support.build import evaluation, policy_version, rollout

WATCHED = {(topic, 0): 0 for topic in TOPICS}
RUN = parse({"run": "r", "envs": {"copy": {}}})


def run_log(metrics: Iterable[Message], versions: int = 1, **partitions: int) -> MemoryLog:
    """The log of a run with these metrics, whose learner has announced so many versions. Of each
    version nine other learners have announced one, too.
    """
    log = MemoryLog({**dict.fromkeys(TOPICS, 1), **partitions})
    for version in range(versions):
        for learner in (RUN.learner.name, *["other"] * 9):
            announced = policy_version(version, learner)
            log.append([to_message(Output("policy-versions", learner, announced))], marker=False)
    log.append([*metrics], marker=False)
    return log


def metric(source: str, name: str, value: float, step: int | None = None) -> Message:
    record = Metric(source=source, time_s=100.0, step=step, values={name: value})
    return to_message(Output("metrics", source, record))


def reward(step: int) -> Message:
    return metric("batcher", "batches/copy/reward/mean", 0.5, step)


def busy(count: int) -> list[Message]:
    """What parts publish every second."""
    return [metric("env-copy-0", "env/rollouts_per_s", 1.0)] * count


ACTIVE = metric("orchestrator", "orchestrator/active_s", 60.0)


def test_the_batches_that_a_verdict_needs_are_found_from_the_end():
    log = MemoryLog({"batches": 1})
    target = Target(env="copy", reward=1.0, batches=2)
    for number in range(40):
        made = batch(number, {"copy" if number < 30 else "add": [1.0]})
        log.append([to_message(Output("batches", str(number), made))], marker=True)
    # 8 offsets, a marker behind each record, hold no batch with the env; 32 hold six
    assert batches_start(log, target) == 80 - 32
    assert batches_start(MemoryLog({"batches": 1}), target) == 0


def test_a_new_run_is_read_from_its_beginning_and_batches_where_there_is_a_target():
    log = run_log([], versions=0, batches=1)
    assert start_offsets(log, RunView("lead")) == WATCHED
    target = Target(env="copy", reward=1.0)
    assert start_offsets(log, RunView("lead"), target) == {**WATCHED, ("batches", 0): 0}


def test_of_long_metrics_the_last_ones_are_read_that_tell_batch_and_active_time():
    far = run_log([*busy(2 * MOST_METRICS), reward(7), ACTIVE, *busy(LAST_METRICS)])
    end = end_offset(far, "metrics", 0)
    assert start_offsets(far, RunView("lead"))["metrics", 0] == end - 4 * LAST_METRICS
    near = run_log([*busy(2 * MOST_METRICS), reward(7), ACTIVE, *busy(LAST_METRICS - 2)])
    end = end_offset(near, "metrics", 0)
    assert start_offsets(near, RunView("lead"))["metrics", 0] == end - LAST_METRICS
    none = run_log(busy(2 * MOST_METRICS))
    assert start_offsets(none, RunView("lead"))["metrics", 0] == MOST_METRICS


def test_what_follows_the_records_that_are_enough_is_not_read():
    log = run_log([*busy(50), reward(7), ACTIVE, reward(8)])
    scratch = RunView("lead")
    assert tail_start(log, ("metrics", 0), 40, scratch, has_progress) == 53 - 40
    assert scratch.batch == 7


def test_all_metrics_are_read_that_a_sink_has_not_written():
    log = run_log([*busy(2 * LAST_METRICS), reward(7), ACTIVE])
    end = end_offset(log, "metrics", 0)
    for unwritten in (0, 5):
        assert start_offsets(log, RunView("lead"), None, unwritten)["metrics", 0] == unwritten
    assert start_offsets(log, RunView("lead"), None, end)["metrics", 0] == end - LAST_METRICS


def test_the_newest_version_is_known_before_metrics_are_read_that_have_its_step():
    """A metric whose step is far above the newest known version is not believed."""
    log = run_log([*busy(2 * LAST_METRICS), reward(1_999), ACTIVE], versions=2_000)
    view = RunView(RUN.learner.name)
    start = start_offsets(log, view)
    assert view.version == 1_999
    assert start["policy-versions", 0] == 20_000 - 16  # 4 have none of the learner, 16 have one
    view = read_view(RUN, log)
    assert (view.batch, view.rewards) == (1_999, {"copy": {1_999: 0.5}})


def test_of_many_fates_the_last_ones_are_read():
    record = Fate(fate="expired", environment="copy", partition=0, offsets=np.array([0]))
    log = run_log([])
    log.append([to_message(Output("fates", "g", record))] * (LAST_FATES + 5), marker=False)
    assert start_offsets(log, RunView("lead"))["fates", 0] == 5
    assert read_view(RUN, log).fates["copy"]["expired"] == LAST_FATES


def test_of_many_answers_of_evaluations_the_last_ones_are_read():
    log = run_log([])
    result = to_message(Output("evals", "held", evaluation(version=20)))
    answer = to_message(Output("evals", "held", rollout()))
    log.append([*[answer] * (LAST_EVALS + 4), result], marker=False)
    assert start_offsets(log, RunView("lead"))["evals", 0] == 5
    assert read_view(RUN, log).evals["held"].version == 20
