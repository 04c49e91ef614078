from __future__ import annotations

import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax.monitoring
import msgspec
import numpy as np
import pytest

from streamrl.batcher.assemble import assemble
from streamrl.config import run_file
from streamrl.config.run_file import RunFile
from streamrl.learner import inputs, process, trainer
from streamrl.learner.files import checkpoints
from streamrl.learner.probe import batch_tokens
from streamrl.learner.trainer import PolicyTrainer
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Output, Writer
from streamrl.stream.log.retrying import RetryingWriter
from streamrl.stream.records import Batch, Metric, PolicyVersion
from streamrl.system.errors import (
    Fenced,
    InputGone,
    StreamrlError,
    TrainingDiverged,
    TransactionFailed,
    VersionMismatch,
)
from streamrl.weights.announcements import announced_hashes
from streamrl.weights.files import describe
from streamrl.weights.pull import pull
from streamrl.weights.store import Store
from tests.learner import plain_llama
from tests.run.orchestrator.test_resuming import LEARNER
from tests.support.build import group
from tests.support.data_path import publish, published
from tests.support.waiting import patience

# for anything that a learner does: it compiles, and the machine may be busy
PATIENCE_S = patience(180.0)
# recorded for a program from the persistent cache, too
COMPILED = "/jax/core/compile/backend_compile_duration"


def run_of(directory: Path, tiny: Path) -> RunFile:
    return run_file.parse(
        {
            "run": "small",
            "runs_dir": str(directory),
            "envs": {"copy": {}},
            "batcher": {"total_token_budget": 24, "max_seq_len": 16, "row_count": 2},
            "model": {"path": str(tiny), "max_seq_len": 16},
            "learner": {
                "checkpoint_every": 2,
                "probe_tokens": 8,
                "learning_rate": 1e-3,
                "kl": {"coefficient": 0.01},
                "precision": "float32",
                "remat": "none",
                "logprob_chunk": 0,
            },
            "weights": {"keep_versions": 2},
            "inference": {"dtype": "float32"},
        }
    )


def batch(number: int) -> Batch:
    made = assemble(
        [group("copy", f"g{number}", sizes=(2, 3, 1), prompt=2 + number % 2, version=number)],
        number,
        number,
        row_count=2,
        max_seq_len=16,
    )
    assert made is not None
    return made


def a_log(*records: Batch | PolicyVersion) -> MemoryLog:
    log = MemoryLog({"policy-versions": 1, "batches": 1, "metrics": 1})
    send(log, *records)
    return log


def send(log: MemoryLog, *records: Batch | PolicyVersion) -> None:
    publish(
        log,
        *(
            Output("policy-versions" if isinstance(r, PolicyVersion) else "batches", "lead", r)
            for r in records
        ),
    )


def versions(log: MemoryLog, learner: str = "lead") -> list[PolicyVersion]:
    records = published(log, "policy-versions", PolicyVersion)
    return [record for record in records if record.learner == learner]


def metrics(log: MemoryLog, learner: str = "lead") -> list[Metric]:
    return [
        record
        for record in published(log, "metrics", Metric)
        if record.source == f"learner-{learner}"
    ]


@dataclass
class Life:
    """One learner at work in a thread."""

    run: RunFile
    log: MemoryLog
    name: str | None = None
    at: int | None = None
    overrides: tuple[str, ...] = ()
    stop: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            process.main(self.run, self.log, self.stop, self.name, self.at, self.overrides)
        except BaseException as error:
            self.error = error

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self._thread.is_alive(), f"the learner has ended: {self.error!r}"
            assert time.monotonic() < deadline, f"not within {PATIENCE_S} s"
            time.sleep(0.02)

    def end(self) -> BaseException | None:
        """What it died of, if it did so by itself."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), f"the learner does not end within {PATIENCE_S} s"
        return self.error


@contextmanager
def learning(
    run: RunFile,
    log: MemoryLog,
    name: str | None = None,
    at: int | None = None,
    overrides: tuple[str, ...] = (),
) -> Iterator[Life]:
    life = Life(run, log, name, at, overrides)
    try:
        yield life
    finally:
        life.stop.set()
        life.end()
    if life.error is not None:
        raise life.error


def dies_of(run: RunFile, log: MemoryLog, kind: type[StreamrlError]) -> str:
    error = Life(run, log).end()
    assert type(error) is kind, repr(error)
    return str(error)


@contextmanager
def compilations() -> Iterator[list[str]]:
    """One entry for each program that JAX compiles meanwhile."""
    seen: list[str] = []

    def note(event: str, duration_s: float, **about: Any) -> None:
        if event == COMPILED:
            seen.append(str(about.get("fun_name", event)))

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


class Lived(NamedTuple):
    """A life of four versions: batches 0 to 2."""

    run: RunFile
    log: MemoryLog
    begun: list[PolicyVersion]  # announced before there was a batch
    compiled_at_first: list[str]
    compiled_later: list[str]


@pytest.fixture(scope="module")
def lived(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lived]:
    run = run_of(tmp_path_factory.mktemp("runs"), tiny)
    log = a_log()
    with compilations() as compiled, learning(run, log) as life:
        life.until(lambda: len(versions(log)) == 1)
        begun = versions(log)
        send(log, batch(0), batch(1))
        # the second step, and the first checkpoint of a trained state
        life.until(lambda: len(metrics(log)) == 2)
        at_first = list(compiled)
        send(log, batch(2))
        life.until(lambda: len(metrics(log)) == 3)
        later = compiled[len(at_first) :]
    yield Lived(run, log, begun, at_first, later)


def fresh(lived: Lived, directory: Path) -> RunFile:
    """The same settings in an empty directory."""
    return lived.run.model_copy(update={"runs_dir": str(directory)})


def announced_in(lived: Lived, run: RunFile) -> list[PolicyVersion]:
    """As if that run had announced them: its store lies elsewhere."""
    return [
        msgspec.structs.replace(record, uri=record.uri.replace(lived.run.store, run.store))
        for record in versions(lived.log)
    ]


def test_version_0_is_announced_before_any_batch(lived: Lived):
    assert [(record.version, record.batch) for record in lived.begun] == [(0, None)]


def test_batch_k_gives_version_k_plus_1(lived: Lived):
    assert [(record.version, record.batch) for record in versions(lived.log)] == [
        (0, None),
        (1, 0),
        (2, 1),
        (3, 2),
    ]
    assert len({record.sha256 for record in versions(lived.log)}) == 4


def test_the_place_in_batches_is_committed(lived: Lived):
    assert lived.log.committed_offsets("learner-lead") == {("batches", 0): 3}


def test_what_is_announced_can_be_pulled_and_the_oldest_goes(lived: Lived, tmp_path: Path):
    newest = versions(lived.log)[-1]
    directory = pull(newest, lived.run.store, tmp_path / "copy")
    assert describe(directory).sha256 == newest.sha256 and newest.size_bytes == sum(
        file.size_bytes for file in describe(directory).files
    )
    assert Store(f"{lived.run.store}/lead").versions() == [2, 3]


def test_the_probe_is_what_the_announced_weights_say(lived: Lived, tmp_path: Path):
    for record in versions(lived.log)[-2:]:
        assert record.probe is not None and len(record.probe.tokens) == 8
        assert record.batch is not None
        trained = batch_tokens(batch(record.batch), record.version, 8, 16)
        assert record.probe.tokens.tolist() == trained.tolist()
        directory = pull(record, lived.run.store, tmp_path / str(record.version))
        np.testing.assert_allclose(
            record.probe.logprobs,
            plain_llama.next_logprobs(directory, record.probe.tokens.tolist()),
            atol=2e-5,
        )
    first, second = (record.probe for record in versions(lived.log)[-2:])
    assert (
        first is not None and second is not None and first.tokens.tolist() != second.tokens.tolist()
    )


def test_metrics_come_with_every_step(lived: Lived):
    names = (
        "loss policy_loss kl entropy ratio_mean ratio_max clip_fraction grad_norm step_s"
        " learning_rate weight_mean untruncated_weight_mean"
        " tokens_per_s export_s hash_s probe_s announce_s checkpoint_s publish_s publish_wait_s"
        " batch_age_mean batch_age_max idle_s"
    )
    for number, metric in enumerate(metrics(lived.log)):
        assert metric.step == number and {f"learner/{name}" for name in names.split()} <= set(
            metric.values
        )
        assert all(map(math.isfinite, metric.values.values()))
        assert metric.values["learner/batch_age_max"] == 0


def test_checkpoints_are_those_of_every_second_version(lived: Lived):
    directory = lived.run.directory / "checkpoints" / "lead"
    # and, at a clean stop, of the newest; it keeps two
    assert checkpoints.versions(directory) == [2, 3]
    assert checkpoints.latest(directory, 2) == checkpoints.TrainingPosition(
        2, 2, versions(lived.log)[2].sha256
    )


def test_a_clean_stop_leaves_a_checkpoint_so_that_nothing_is_trained_again(
    lived: Lived, tmp_path: Path
):
    run = fresh(lived, tmp_path)
    log = a_log(*map(batch, range(3)), *announced_in(lived, run))
    shutil.copytree(lived.run.directory, run.directory)
    with learning(run, log) as life:
        send(log, batch(3))
        life.until(lambda: len(metrics(log)) == 1)
    assert metrics(log)[0].step == 3 and [record.version for record in versions(log)] == [
        0,
        1,
        2,
        3,
        4,
    ]


def test_nothing_is_compiled_after_the_first_steps(lived: Lived):
    """With export, probe and announcement. That something was compiled before shows that the count
    counts.
    """
    assert len(lived.compiled_at_first) > 0 and lived.compiled_later == []


def test_a_second_life_goes_on_and_announces_nothing_twice(lived: Lived, tmp_path: Path):
    """Killed, from the checkpoint of version 2: batch 2 is trained again, and gives the version 3
    that is announced. Then another learner.
    """
    run = fresh(lived, tmp_path)
    log = a_log(*map(batch, range(3)), *announced_in(lived, run))
    shutil.copytree(lived.run.directory, run.directory)
    shutil.rmtree(run.directory / "checkpoints" / "lead" / "000003")
    with learning(run, log) as life:
        life.until(lambda: len(metrics(log)) == 1)
        assert [record.sha256 for record in versions(log)] == [
            record.sha256 for record in versions(lived.log)
        ]
        send(log, batch(3))
        life.until(lambda: len(metrics(log)) == 2)
    assert [metric.step for metric in metrics(log)] == [2, 3]
    assert [record.version for record in versions(log)] == [0, 1, 2, 3, 4]

    with learning(run, log, "other") as life:
        life.until(lambda: len(metrics(log, "other")) == 4)
    # the run's own is not disturbed
    assert [record.version for record in versions(log)] == [0, 1, 2, 3, 4]
    # a death in between changes nothing
    assert [record.sha256 for record in versions(log, "other")] == [
        record.sha256 for record in versions(log)
    ]
    assert all(record.uri.startswith(f"{run.store}/other/") for record in versions(log, "other"))


def test_another_instance_takes_over(lived: Lived, tmp_path: Path):
    log = a_log()
    life = Life(fresh(lived, tmp_path), log)
    life.until(lambda: len(versions(log)) == 1)
    rival = PolicyVersion(learner="lead", version=1, uri="file:///rival", size_bytes=1, sha256="ab")
    successor = RetryingWriter(log, "learner-lead", "policy-versions")
    successor.commit([to_message(Output("policy-versions", "lead", rival))])
    send(log, batch(0))
    assert isinstance(life.end(), Fenced) and [record.uri for record in versions(log)[1:]] == [
        "file:///rival"
    ]


class Away(MemoryLog):
    """A broker that answers no commit of its second writer."""

    opened = 0

    def writer(self, identity: str, changelog_topic: str = "") -> Writer:
        self.opened += 1
        made = super().writer(identity, changelog_topic)
        if self.opened == 1:
            return made

        def fail(messages: object) -> int:
            raise TransactionFailed("the broker is away")

        if self.opened == 2:
            made.commit = fail
        return made


def test_what_was_trained_while_the_broker_was_away_is_announced_when_it_is_back(
    lived: Lived, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Two commits fail. The learner goes on in the same life, and trains on nothing twice."""
    log = Away({"policy-versions": 1, "batches": 1, "metrics": 1})
    steps = list[int]()
    step = PolicyTrainer.step
    monkeypatch.setattr(
        PolicyTrainer,
        "step",
        lambda policy, taken: steps.append(taken.batch.number) or step(policy, taken),
    )
    with learning(fresh(lived, tmp_path), log) as life:
        life.until(lambda: len(versions(log)) == 1)
        # fences the learner's, without a word: as when its transaction has stood still
        log.writer("learner-lead")
        send(log, batch(0))
        life.until(lambda: len(metrics(log)) == 1)
    assert (
        [record.version for record in versions(log)] == [0, 1] and steps == [0] and log.opened == 3
    )


def other_hash(record: PolicyVersion) -> PolicyVersion:
    return msgspec.structs.replace(record, sha256="ab" * 32)


def test_a_version_that_comes_out_differently_is_announced_as_a_new_lineage(
    lived: Lived, tmp_path: Path
):
    """As on other hardware, or under changed settings. Version 0 came out the same, so it is
    announced once; nothing ends.
    """
    announced = versions(lived.log)
    run = fresh(lived, tmp_path)
    log = a_log(announced[0], other_hash(announced[1]), batch(0), batch(1))
    with learning(run, log) as life:
        life.until(lambda: len(metrics(log)) == 2)
    found = versions(log)[2:]
    assert [
        (record.version, record.lineage, record.replaces, record.sha256) for record in found
    ] == [
        (1, 1, "ab" * 32, announced[1].sha256),
        (2, 0, "", announced[2].sha256),
    ]
    assert announced_hashes(log, "lead") == {
        record.version: record.sha256 for record in announced[:3]
    }
    assert (
        describe(pull(found[0], run.store, tmp_path / "copy")).sha256 == announced[1].sha256
        and found[0].probe is not None
    )
    with learning(run, log) as life:  # and once it has been announced, it is known
        send(log, batch(2))
        life.until(lambda: len(metrics(log)) == 3)
    assert [(record.version, record.lineage) for record in versions(log)[4:]] == [(3, 0)]


def test_where_that_is_asked_for_it_ends_the_run(lived: Lived, tmp_path: Path):
    announced = versions(lived.log)
    run = run_file.with_overrides(fresh(lived, tmp_path), ["learner.on_divergence=stop"])
    log = a_log(announced[0], other_hash(announced[1]), batch(0))
    said = dies_of(run, log, VersionMismatch)
    assert (
        said.startswith(
            f"version 1 of lead came out as {announced[1].sha256}, but {'ab' * 32} was announced"
        )
        and "\n" not in said
    )
    assert len(versions(log)) == 2


def test_a_checkpoint_that_was_never_announced_is_refused(lived: Lived, tmp_path: Path):
    announced = versions(lived.log)
    run = fresh(lived, tmp_path)
    shutil.copytree(lived.run.directory, run.directory)
    log = a_log(*announced[:3], other_hash(announced[3]))
    assert "has weights that lead never announced: it is of another run" in dies_of(
        run, log, VersionMismatch
    )


CLIP_RATIO_MAX = "learner.clip_ratio_max"  # refused with the loss of LEARNER


@pytest.mark.parametrize(
    "changes",
    [
        [
            "learner.learning_rate=0.01",
            "batcher.row_count=3",
            "learner.kl=null",
            f"{CLIP_RATIO_MAX}=3.0",  # of ppo, the loss of before
        ],
        [
            *(f"{path}={value}" for path, value in LEARNER.items() if path != CLIP_RATIO_MAX),
            "weights.keep_versions=3",
        ],
    ],
    ids=["no reference", "all"],
)
def test_other_settings_at_a_resume_go_on_from_the_checkpoint_of_the_clean_stop(
    changes: list[str], lived: Lived, tmp_path: Path
):
    """The batches of before are not trained on again."""
    run = fresh(lived, tmp_path)
    log = a_log(*map(batch, range(3)), *announced_in(lived, run))
    shutil.copytree(lived.run.directory, run.directory)
    now = run_file.with_overrides(run, changes)
    with learning(now, log) as life:
        send(log, batch(3))  # made under the settings of before: two rows
        life.until(lambda: len(metrics(log)) == 1)
    assert Store(f"{run.store}/lead").versions() == [2, 3, 4][-now.weights.keep_versions :]
    assert [(record.version, record.lineage) for record in versions(log)] == [
        (0, 0),
        (1, 0),
        (2, 0),
        (3, 0),
        (4, 0),
    ]


def test_a_store_that_was_emptied_gets_the_newest_version_again(lived: Lived, tmp_path: Path):
    """From the checkpoint of that version; then, without it, from an earlier one."""
    announced = versions(lived.log)
    for missing in ((), ("000003",)):
        run = fresh(lived, tmp_path / str(len(missing)))
        log = a_log(*map(batch, range(3)))
        moved = announced_in(lived, run)
        send(log, *moved)
        shutil.copytree(lived.run.directory, run.directory)
        for name in missing:
            shutil.rmtree(run.directory / "checkpoints" / "lead" / name)
        shutil.rmtree(run.directory / "weights")
        with learning(run, log) as life:
            life.until(lambda run=run: Store(f"{run.store}/lead").versions() == [3])
        assert describe(pull(moved[3], run.store, tmp_path / "copy")).sha256 == announced[3].sha256
        assert len(versions(log)) == 4


def test_under_another_weight_store_the_newest_version_is_announced_there(
    lived: Lived, tmp_path: Path
):
    """Servers take nothing from outside the store that is configured: they would wait for ever."""
    run = fresh(lived, tmp_path)
    shutil.copytree(lived.run.directory, run.directory)
    log = a_log(*map(batch, range(3)), *versions(lived.log))
    with learning(run, log) as life:
        life.until(lambda: len(versions(log)) == 5)
    before, again = versions(log)[3:]
    assert (again.version, again.lineage, again.sha256) == (
        3,
        1,
        before.sha256,
    ) and again.uri.startswith(f"{run.store}/lead/")
    pull(again, run.store, tmp_path / "copy")


def unknown(made: Batch) -> Batch:
    """With an id that the model has no embedding of, and that it was announced not to know."""
    return msgspec.structs.replace(
        made,
        tokens=np.where(np.arange(len(made.tokens)) == 0, 99, made.tokens).astype(
            made.tokens.dtype
        ),
    )


def not_finite(made: Batch) -> Batch:
    """Its loss is infinite: nothing is left of an advantage of 1e38 that is divided by a tiny
    deviation.
    """
    return msgspec.structs.replace(made, advantages=np.full(len(made.uids), 3e38, np.float32))


def too_long(made: Batch) -> Batch:
    return msgspec.structs.replace(made, rows=np.zeros(len(made.uids), np.int32), max_seq_len=8)


def test_no_batch_ends_the_learner(lived: Lived, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An unknown id costs its sequence. What cannot be trained on costs its step; the version is
    announced all the same, with the same weights.
    """
    monkeypatch.setattr(trainer, "MAX_SKIPPED_STEPS", 2)
    run = run_file.with_overrides(fresh(lived, tmp_path), ["learner.normalize_advantages=false"])
    log = a_log()
    rubbish = to_message(Output("batches", "lead", batch(0)))._replace(value=b"rubbish")
    with learning(run, log) as life:
        life.until(lambda: len(versions(log)) == 1)
        log.producer().send(rubbish)
        send(
            log,
            unknown(batch(0)),
            not_finite(batch(1)),
            batch(0),
            too_long(batch(2)),
            batch(3),
        )
        life.until(lambda: len(metrics(log)) == 4)
    assert [(metric.step, metric.values["learner/skipped"]) for metric in metrics(log)] == [
        (0, 0),
        (1, 1),
        (2, 1),
        (3, 0),
    ]
    assert metrics(log)[0].values["learner/masked_sequences"] == 1
    assert all(math.isfinite(value) for metric in metrics(log) for value in metric.values.values())
    found = versions(log)
    assert [(record.version, record.skipped) for record in found] == [
        (0, False),
        (1, False),
        (2, True),
        (3, True),
        (4, False),
    ]
    assert (
        found[1].sha256 == found[2].sha256 == found[3].sha256
        and len({record.sha256 for record in found}) == 3
    )


def test_too_many_steps_in_a_row_that_are_not_finite_end_the_run(
    lived: Lived, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(trainer, "MAX_SKIPPED_STEPS", 1)
    run = run_file.with_overrides(fresh(lived, tmp_path), ["learner.normalize_advantages=false"])
    log = a_log(*(not_finite(batch(number)) for number in range(3)))
    assert dies_of(run, log, TrainingDiverged).startswith(
        "nothing could be trained on in 2 steps in a row, up to batch 1; lower"
        " learner.learning_rate"
    )
    assert [record.version for record in versions(log)] == [0, 1]


def test_batches_that_are_gone_are_said(lived: Lived, tmp_path: Path):
    log = a_log(batch(1))
    said = dies_of(fresh(lived, tmp_path), log, InputGone)
    assert (
        said.startswith("batch 1 came at version 0: batches are missing before offset 1")
        and "\n" not in said
    )
    assert len(versions(log)) == 1


def next_batch(log: MemoryLog) -> object:
    stop = threading.Event()
    timer = threading.Timer(20, stop.set)
    timer.start()
    try:
        return next(inputs.follow_batches_until(log, 0, stop), None)
    finally:
        timer.cancel()


def test_what_cannot_be_read_is_skipped():
    """Rubbish and a record of another kind: then comes the next batch."""
    log = a_log()
    log.producer().send(to_message(Output("batches", "lead", batch(0)))._replace(value=b"rubbish"))
    publish(
        log,
        Output(
            "batches",
            "lead",
            PolicyVersion(learner="lead", version=0, uri="", size_bytes=0, sha256=""),
        ),
    )
    send(log, batch(6))
    made = next_batch(log)
    assert isinstance(made, tuple)
    assert (made[0].number, made[1]) == (6, 3)
    assert [found.number for found, _ in inputs.read_batches(log)] == [6]
