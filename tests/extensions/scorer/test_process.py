"""A pool of two workers beside the real learner, over a log in memory: the same weights as without
it, hash by hash.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from streamrl.config.run_file import RunFile, parse, with_overrides
from streamrl.extensions.recordings.replay_weights import compare_versions
from streamrl.extensions.scorer import process
from streamrl.extensions.scorer.extension import Scorer
from streamrl.learner.initial import write_tiny
from streamrl.learner.model import model
from streamrl.learner.model.examples import expand, to_ragged
from streamrl.learner.recompute import recompute_version, retrain_all
from streamrl.learner.start import learner_settings
from streamrl.learner.update import Updater
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Output, end_offset
from streamrl.stream.records import Batch, Metric, PolicyVersion, Scores
from streamrl.system.errors import ConfigError, Fenced
from streamrl.weights.announcements import announced_hashes
from streamrl.weights.store import Store
from tests.learner.conftest import CONTEXT, TINY
from tests.learner.test_process import PATIENCE_S, Life, batch, learning, send, versions
from tests.support.data_path import publish, published

BATCHES = 5
# so batches 0 to 2 are measured from the model that the run began with, 3 and 4 from version 3
EVERY = 3
# so that a wrong reference shows
STRONG = {
    "checkpoint_every": 2,
    "probe_tokens": 8,
    "learning_rate": 0.01,
    "precision": "float32",
    "remat": "none",
    "logprob_chunk": 0,
}


def run_of(directory: Path, tiny: Path, by: str, **reference: Any) -> RunFile:
    return parse(
        {
            "run": "small",
            "runs_dir": str(directory),
            "envs": {"copy": {}},
            "batcher": {"total_token_budget": 24, "max_seq_len": 16, "row_count": 2},
            "model": {"path": str(tiny), "max_seq_len": 16},
            "learner": {**STRONG, "kl": {"coefficient": 0.5, "reference": {"by": by, **reference}}},
            "weights": {"keep_versions": 2},
        }
    )


def a_log(*records: Batch | PolicyVersion) -> MemoryLog:
    log = MemoryLog({"policy-versions": 1, "batches": 1, "scores": 1, "metrics": 1})
    send(log, *records)
    return log


def scores(log: MemoryLog) -> list[Scores]:
    return published(log, "scores", Scores)


def measured(log: MemoryLog) -> list[tuple[int | None, dict[str, float]]]:
    """What the lead says of its steps."""
    records = published(log, "metrics", Metric)
    return [(record.step, record.values) for record in records if record.source == "learner-lead"]


def trained(log: MemoryLog) -> int:
    """Batches."""
    return len({step for step, _ in measured(log)})


def hashes(log: MemoryLog) -> list[str]:
    return [record.sha256 for record in versions(log)]


class Worker:
    """One at work in a thread."""

    def __init__(self, run: RunFile, log: MemoryLog, index: int) -> None:
        self.stop = threading.Event()
        self.error = None
        self._arguments = (run, log, self.stop, index)
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            process.main(*self._arguments)
        except BaseException as error:
            self.error = error

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self._thread.is_alive(), f"the worker has ended: {self.error!r}"
            assert time.monotonic() < deadline, f"not within {PATIENCE_S} s"
            time.sleep(0.02)

    def end(self) -> BaseException | None:
        """What it died of, if it did so by itself."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), f"the worker does not end within {PATIENCE_S} s"
        return self.error


@contextmanager
def scoring(run: RunFile, log: MemoryLog, *workers: int) -> Iterator[list[Worker]]:
    made = [Worker(run, log, index) for index in workers]
    try:
        yield made
    finally:
        for worker in made:
            worker.stop.set()
        errors = [worker.end() for worker in made]
    assert errors == [None] * len(errors)


def lived(run: RunFile, log: MemoryLog, workers: int) -> None:
    """Train on all batches there are."""
    with ExitStack() as alive:
        alive.enter_context(scoring(run, log, *range(workers)))
        alive.enter_context(learning(run, log)).until(lambda: trained(log) == BATCHES)


Made = dict[str, tuple[RunFile, MemoryLog]]


@pytest.fixture(scope="module")
def made(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The same batches, with the reference in the learner, and in a pool of two."""
    lives: Made = {}
    for by, workers in (("learner", 0), ("pool", 2)):
        run = run_of(tmp_path_factory.mktemp(by), tiny, by, every=EVERY)
        log = a_log(*map(batch, range(BATCHES)))
        lived(run, log, workers)
        lives[by] = run, log
    return lives


def test_with_a_pool_the_weights_are_those_of_the_learner_alone(made: Made):
    (_, alone), (_, pooled) = made["learner"], made["pool"]
    assert hashes(alone) == hashes(pooled) and len(set(hashes(pooled))) == BATCHES + 1
    kl = [[values["learner/kl"] for _, values in measured(log)] for log in (alone, pooled)]
    assert kl[0] == kl[1] and max(kl[0]) > 1e-6


def test_each_batch_is_scored_once_by_its_worker_and_the_place_is_committed(made: Made):
    _run, log = made["pool"]
    by_number = sorted((s.number, s.scorer, s.reference) for s in scores(log))
    assert by_number == [
        (0, "scorer-0", 0),
        (1, "scorer-1", 0),
        (2, "scorer-0", 0),
        (3, "scorer-1", 3),
        (4, "scorer-0", 3),
    ]
    assert log.committed_offsets("scorer-0") == {("batches", 0): 5} and log.committed_offsets(
        "scorer-1"
    ) == {("batches", 0): 4}
    behind_the_last = end_offset(log, "scores", 0) - 1  # there is a marker
    assert log.committed_offsets("learner-lead") == {
        ("batches", 0): BATCHES,
        ("scores", 0): behind_the_last,
    }
    assert scores(made["learner"][1]) == []


def test_the_scores_are_the_learners_own_logprobs_bit_for_bit(made: Made):
    """Under version 0, asked of the function that the learner asks."""
    run, log = made["pool"]
    updater = Updater(run.learner, run.batcher.rows, run.batcher.max_seq_len)
    with updater.training():
        first = model.load(Path(run.model.path), run.model.max_seq_len)
        for record in [s for s in scores(log) if s.reference == 0]:
            own = to_ragged(
                batch(record.number), updater.scores(first, expand(batch(record.number)))
            )
            assert record.logprobs.tobytes() == own.tobytes() and np.count_nonzero(own) == len(own)


def test_it_is_replayed_from_the_recorded_scores_or_the_reference_again(made: Made):
    """From the beginning, and from the checkpoint of version 4, whose next batch is measured from
    version 3. A pool's replay asks no model.
    """
    for by, (run, log) in made.items():
        result = compare_versions(announced_hashes(log, "lead"), retrain_all(run, log))
        assert (result.difference, result.identical) == ("", BATCHES + 1), by
        assert [p.sha256 for p in retrain_all(run, log, 4)] == hashes(log)[4:]
        with recompute_version(run, log, 3) as policy:
            assert (policy.reference is None) == (
                by == "pool"
            ) and policy.position.sha256 == hashes(log)[3]


def test_killed_workers_and_a_killed_learner_lose_nothing(made: Made, tmp_path: Path):
    """Worker 1 is not there at first; worker 0 goes after batch 0, the learner after version 1.
    Their next lives do the rest, each batch once.
    """
    run, kept = made["pool"]
    run = run.model_copy(update={"runs_dir": str(tmp_path)})
    log = a_log(batch(0), batch(1), batch(2))
    with scoring(run, log, 0) as (zero,), learning(run, log) as life:
        life.until(lambda: trained(log) == 1)
        zero.until(lambda: len(scores(log)) == 2)  # ahead of batch 1, which nobody has scored
    send(log, batch(3), batch(4))
    lived(run, log, 2)
    assert hashes(log) == hashes(kept)
    assert sorted(s.number for s in scores(log)) == list(range(BATCHES))


def test_a_run_goes_on_with_another_number_of_workers(made: Made, tmp_path: Path):
    """What two of them score is not scored once more, and what is there twice is skipped."""
    run, kept = made["pool"]
    run = run.model_copy(update={"runs_dir": str(tmp_path)})
    log = a_log(batch(0), batch(1))
    with scoring(run, log, 0, 1), learning(run, log) as life:
        life.until(lambda: trained(log) == 2)
    wrong = [msgspec.structs.replace(s, logprobs=s.logprobs - 1) for s in scores(log)]
    publish(log, *(Output("scores", str(s.number), s) for s in wrong))
    send(log, batch(2), batch(3), batch(4))
    three = run.model_copy(update={"scorer": Scorer(replicas=3)})
    lived(three, log, 3)
    assert hashes(log) == hashes(kept)
    assert [(s.number, s.scorer) for s in sorted(scores(log)[4:], key=lambda s: s.number)] == [
        (2, "scorer-2"),
        (3, "scorer-0"),
        (4, "scorer-1"),
    ]


def test_the_store_keeps_the_version_that_batches_are_measured_from(made: Made):
    run, _ = made["pool"]
    assert Store(f"{run.store}/lead").versions() == [3, 4, 5]  # and the newest two
    assert Store(f"{made['learner'][0].store}/lead").versions() == [4, 5]


def test_scores_of_another_reference_are_trained_on_as_they_are(made: Made, tmp_path: Path):
    run, kept = made["pool"]
    run = run.model_copy(update={"runs_dir": str(tmp_path)})
    log = a_log(batch(0))
    publish(
        log,
        Output(
            "scores",
            "0",
            msgspec.structs.replace(scores(kept)[0], number=0, scorer="scorer-0", reference=7),
        ),
    )
    with learning(run, log) as life:  # learner.kl.reference was another one when it was scored
        life.until(lambda: len(announced_hashes(log, "lead")) == 2)


def test_scores_of_another_number_of_tokens_cost_the_step(made: Made, tmp_path: Path):
    run, _ = made["pool"]
    run = run.model_copy(update={"runs_dir": str(tmp_path)})
    log = a_log(batch(0))
    publish(
        log,
        Output(
            "scores",
            "0",
            Scores(number=0, scorer="scorer-0", reference=0, logprobs=np.zeros(1, np.float32)),
        ),
    )
    with learning(run, log) as life:
        life.until(lambda: len(versions(log)) == 2)
    assert [record.skipped for record in versions(log)] == [False, True]


def test_another_instance_takes_over(made: Made, tmp_path: Path):
    run, _ = made["pool"]
    run = run.model_copy(update={"runs_dir": str(tmp_path)})
    log = a_log(batch(0), batch(2))
    worker = Worker(with_overrides(run, ["learner.kl.reference={by: pool}"]), log, 0)
    worker.until(lambda: len(scores(log)) == 2)
    log.writer("scorer-0")
    send(log, batch(4))
    assert isinstance(worker.end(), Fenced) and len(scores(log)) == 2


def test_a_worker_without_work_is_refused(tiny: Path, tmp_path: Path):
    error = Worker(run_of(tmp_path, tiny, "learner"), a_log(), 0).end()
    assert isinstance(error, ConfigError) and str(error).startswith(
        "neither learner.kl.reference.by is pool nor is there a learner.teacher"
    )
    error = Worker(run_of(tmp_path, tiny, "pool"), a_log(), 2).end()
    assert (
        isinstance(error, ConfigError)
        and str(error) == "--index 2: scorer.replicas is 2, so the last worker is 1"
    )


def test_a_second_learner_reads_the_runs_scores_or_computes_its_own(made: Made):
    run, log = made["pool"]
    with pytest.raises(
        ConfigError,
        match="^--set learner.kl.reference: the pool, if the run has one, scores under the run's",
    ):
        learner_settings(run, "second", None, ("learner.kl.reference={by: pool, every: 1}",))
    with pytest.raises(ConfigError, match="^--set learner.kl.reference: the pool"):
        learner_settings(made["learner"][0], "second", None, ("learner.kl.reference.by=pool",))
    assert learner_settings(
        run, "second", None, ("learner.loss=grpo", "learner.correction.weights.by=token")
    ).learner.needs_scores
    with learning(run, log, "second") as life:
        life.until(lambda: len(announced_hashes(log, "second")) == BATCHES + 1)
    assert list(announced_hashes(log, "second").values()) == hashes(log)
    with learning(run, log, "third", at=3, overrides=("learner.kl.reference.by=learner",)) as life:
        life.until(lambda: len(announced_hashes(log, "third")) == BATCHES + 1 - 3)
    assert list(announced_hashes(log, "third").values()) == hashes(log)[3:]
    error = Life(run, log, "fourth", 4, ("learner.kl.reference.by=learner",)).end()
    assert isinstance(error, ConfigError) and str(error).startswith(
        "checkpoint 4 holds no reference of version 3: it was made under another"
    )


def test_a_model_of_its_own_is_the_reference(tiny: Path, tmp_path: Path):
    """The same file under another name: the same scores, marked as those of no version."""
    run = run_of(tmp_path, tiny, "pool", path=str(tiny))
    log = a_log(batch(0))
    with scoring(run, log, 0) as (worker,):
        worker.until(lambda: len(scores(log)) == 1)
    assert scores(log)[0].reference == -1 and run.learner.needs_scores


def test_a_teacher_is_scored_by_the_pool_and_distilled_from(tiny: Path, tmp_path: Path):
    """The policy's own divergence is not asked for. The teacher is another model: the batch pulls
    the policy towards it, and the learner trains again from the recorded scores alone.
    """
    other = write_tiny(tmp_path / "teacher", TINY.model_copy(update={"seed": 5}), CONTEXT)
    run = run_of(tmp_path, tiny, "learner").model_copy(update={"run": "distilled"})
    run = with_overrides(run, ["learner.kl=null", f"learner.teacher={other}"])
    assert run.learner.needs_scores and not run.learner.pool_scores_reference
    one = batch(0)
    pulled = np.ones(len(one.tokens), np.float32)
    still = msgspec.structs.replace(one, advantages=np.zeros_like(one.advantages))
    log = a_log(msgspec.structs.replace(still, teacher_kl_weights=pulled))
    with scoring(run, log, 0) as (worker,), learning(run, log) as life:
        worker.until(lambda: len(scores(log)) == 1)
        life.until(lambda: trained(log) == 1)
    (scored,) = scores(log)
    assert scored.reference == -2 and not scored.logprobs.any()
    with process.open_updater(run) as updater:
        taught = updater.scores(model.load(other, 16), expand(one))
        assert scored.teacher_logprobs is not None
        np.testing.assert_allclose(scored.teacher_logprobs, to_ragged(one, taught), atol=1e-6)
    ((_, values),) = measured(log)
    assert values["learner/teacher_kl"] > 0 and values["learner/grad_norm"] > 0
    assert values["learner/policy_loss"] == 0
    with recompute_version(run, log, 1) as policy:
        assert policy.position.sha256 == hashes(log)[1] != hashes(log)[0]


def test_a_second_learner_has_the_teacher_of_the_run(made: Made):
    with pytest.raises(ConfigError, match="^--set learner.teacher: the pool, if the run has"):
        learner_settings(made["pool"][0], "second", None, ("learner.teacher=elsewhere",))
