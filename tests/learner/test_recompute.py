"""A run of four batches, again: all of it, from a checkpoint, as the start of a fork, and beside it
by another learner.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from streamrl.config.run_file import RunFile, with_overrides
from streamrl.config.sections.operation import Fork
from streamrl.extensions.recordings.export_model import export_model
from streamrl.extensions.recordings.replay_weights import compare_versions
from streamrl.learner.files import checkpoints
from streamrl.learner.recompute import recompute_version, retrain_all, seed_fork
from streamrl.learner.trainer import open_trainer
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import PolicyVersion
from streamrl.system.errors import CheckpointError, ConfigError, InputGone, VersionMismatch
from streamrl.weights.announcements import announced_hashes
from streamrl.weights.files import describe
from streamrl.weights.pull import pull
from tests.learner.test_process import a_log, batch, learning, metrics, run_of, send, versions
from tests.support.data_path import publish

BATCHES = 4
# A loss that cuts no gradient off: the batches' logprobs are far from the model's, and all of them
# are beyond what `clipped-ratio` trains on.
OTHER = ("learner.loss=cispo", "learner.learning_rate=0.01", "learner.checkpoint_every=3")


class Recording(NamedTuple):
    run: RunFile
    log: MemoryLog


@pytest.fixture(scope="module")
def made(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recording]:
    run = run_of(tmp_path_factory.mktemp("runs"), tiny)
    log = a_log(*map(batch, range(BATCHES)))
    with learning(run, log) as life:
        life.until(lambda: len(metrics(log)) == BATCHES)
    yield Recording(run, log)  # with checkpoints of versions 2 and 4


def copied(made: Recording, directory: Path) -> RunFile:
    """The run in a directory that may be written to."""
    run = made.run.model_copy(update={"runs_dir": str(directory)})
    shutil.copytree(made.run.directory, run.directory)
    return run


def hashes(log: MemoryLog, learner: str = "lead") -> list[str]:
    return [record.sha256 for record in versions(log, learner)]


def test_every_version_comes_out_the_same(made: Recording):
    found = list(retrain_all(made.run, made.log))
    assert [position.version for position in found] == [0, 1, 2, 3, 4]
    assert [position.sha256 for position in found] == hashes(made.log) and len(
        set(hashes(made.log))
    ) == 5


def test_so_they_do_from_a_checkpoint(made: Recording):
    assert [(p.version, p.sha256) for p in retrain_all(made.run, made.log, 2)] == list(
        announced_hashes(made.log, "lead").items()
    )[2:]
    with pytest.raises(
        ConfigError,
        match=r"^--from 3: there is no checkpoint of that version in .*; there: 0, 2, 4$",
    ):
        list(retrain_all(made.run, made.log, 3))


def test_other_settings_are_found_at_the_first_version_that_they_make(made: Recording):
    result = compare_versions(
        announced_hashes(made.log, "lead"),
        retrain_all(
            with_overrides(made.run, ["learner.clip_epsilon=0.1", "learner.beta2=0.9"]), made.log
        ),
    )
    assert result.identical >= 1 and result.difference.startswith("version ")


@pytest.mark.parametrize(("version", "steps"), [(0, []), (1, [1]), (2, []), (3, [1])])
def test_a_version_is_computed_from_the_nearest_checkpoint(
    made: Recording, version: int, steps: list[int]
):
    """Those of versions 2 and 4 are there, and the initial model."""
    seen = list[int]()
    with recompute_version(
        made.run, made.log, version, lambda done, total: seen.append(done)
    ) as policy:
        assert (policy.version, policy.position.sha256) == (version, hashes(made.log)[version])
    assert seen == steps


@pytest.mark.parametrize(("version", "from_store"), [(None, True), (0, False), (3, False)])
def test_a_version_is_exported_whether_it_is_still_stored_or_not(
    made: Recording, version: int | None, from_store: bool, tmp_path: Path
):
    # a copy's versions lie elsewhere than announced
    run = made.run if from_store else copied(made, tmp_path / "runs")
    found = export_model(run, made.log, version, tmp_path / "out")
    assert (found.version, found.from_store) == (
        BATCHES if version is None else version,
        from_store,
    )
    assert describe(tmp_path / "out").sha256 == found.sha256 == hashes(made.log)[found.version]
    assert [path.name for path in tmp_path.iterdir() if path.name != "runs"] == ["out"]


def test_what_cannot_be_computed_is_said(made: Recording, tmp_path: Path):
    with (
        pytest.raises(
            ConfigError, match=r"^version 9 of lead in run small is not announced; the newest is 4$"
        ),
        recompute_version(made.run, made.log, 9),
    ):
        pass
    announced = versions(made.log)
    announced[1] = msgspec.structs.replace(announced[1], sha256="ab" * 32)
    with (
        pytest.raises(VersionMismatch, match=r"^version 1 of lead came out as"),
        recompute_version(made.run, a_log(*announced, batch(0)), 1),
    ):
        pass
    with (
        pytest.raises(InputGone, match="end at version 1: version 3 cannot be computed"),
        recompute_version(
            made.run.model_copy(update={"runs_dir": str(tmp_path)}),
            a_log(*versions(made.log), batch(0)),
            3,
        ),
    ):
        pass


def test_a_fork_goes_on_from_the_parents_policy_and_optimiser(made: Recording, tmp_path: Path):
    """Without a change it makes the parent's versions again, and none before its own first; with
    one it makes others from there.
    """
    for name, overrides, same in (("same", (), True), ("other", OTHER[:2], False)):
        run = with_overrides(made.run, overrides).model_copy(
            update={
                "run": name,
                "runs_dir": str(tmp_path),
                "fork": Fork(run="small", version=3, sha256=hashes(made.log)[3]),
            }
        )
        run.directory.mkdir()
        stored = seed_fork(made.run, run, made.log, 3, lambda done, total: None)
        assert stored.uri.startswith(run.store) and stored.sha256 == hashes(made.log)[3]
        log = a_log(
            *(
                msgspec.structs.replace(v, uri=stored.uri if v.version == 3 else v.uri)
                for v in versions(made.log)[:4]
            ),
            batch(3),
        )
        with learning(run, log) as life:
            life.until(lambda log=log: len(metrics(log)) == 1)
        assert [v.version for v in versions(log)] == [0, 1, 2, 3, 4]
        assert (hashes(log)[4] == hashes(made.log)[4]) is same
        assert (
            describe(pull(versions(log)[3], run.store, tmp_path / f"{name}-3")).sha256
            == hashes(made.log)[3]
        )
        # it can be replayed itself, however many checkpoints are gone
        assert [p.version for p in retrain_all(run, log)] == [3, 4]
        assert (
            compare_versions(announced_hashes(log, "lead"), retrain_all(run, log)).difference == ""
        )
        with (
            pytest.raises(
                ConfigError, match=r"^run \w+ begins at version 3; version 2 is one of run small"
            ),
            recompute_version(run, log, 2),
        ):
            pass


def test_a_fork_without_its_first_checkpoint_says_so(made: Recording, tmp_path: Path):
    run = made.run.model_copy(
        update={
            "run": "f",
            "runs_dir": str(tmp_path),
            "fork": Fork(run="small", version=3, sha256="ab"),
        }
    )
    with (
        pytest.raises(
            CheckpointError,
            match=(
                r"^run f begins with version 3 of small, and its checkpoint in .* is gone; fork"
                r" again"
            ),
        ),
        open_trainer(run),
    ):
        pass


def files(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def test_a_second_learner_joins_and_disturbs_nobody(made: Recording, tmp_path: Path):
    """From the beginning, with another loss: versions of its own from the same batches; nothing of
    the lead's has changed afterwards.
    """
    run = copied(made, tmp_path)
    log = a_log(*versions(made.log), *map(batch, range(BATCHES)))
    before = files(run.directory)
    with learning(run, log, "second", overrides=OTHER) as life:
        life.until(lambda: len(metrics(log, "second")) == BATCHES)
    assert [v.version for v in versions(log, "second")] == [0, 1, 2, 3, 4]
    assert hashes(log, "second")[0] == hashes(log)[0] and not set(hashes(log, "second")[1:]) & set(
        hashes(log)
    )
    assert hashes(log) == hashes(made.log) and metrics(log) == []
    assert before.items() <= files(run.directory).items()
    # by its own settings, and at its end
    assert checkpoints.versions(run.directory / "checkpoints" / "second") == [3, 4]
    assert (
        log.committed_offsets("learner-second") == {("batches", 0): BATCHES}
        and log.committed_offsets("learner-lead") == {}
    )


def test_a_second_learner_can_begin_where_the_lead_was(made: Recording, tmp_path: Path):
    """At version 3, whose weights and optimiser are computed from the checkpoint of version 2; then
    again, when it is started again.
    """
    run = copied(made, tmp_path)
    log = a_log(*versions(made.log), *map(batch, range(BATCHES)))
    with learning(run, log, "same", at=3) as life:
        life.until(lambda: len(metrics(log, "same")) == 1)
    assert [(v.version, v.sha256) for v in versions(log, "same")] == list(
        announced_hashes(made.log, "lead").items()
    )[3:]
    with learning(run, log, "other", at=3, overrides=OTHER) as life:
        life.until(lambda: len(metrics(log, "other")) == 1)
    assert hashes(log, "other")[0] == hashes(log)[3] and hashes(log, "other")[1] != hashes(log)[4]
    first = hashes(log, "other")
    send(log, batch(4))
    with learning(run, log, "other", at=3, overrides=OTHER) as life:
        life.until(
            lambda: 4 in announced_hashes(log, "other") and 5 in announced_hashes(log, "other")
        )
    assert hashes(log, "other")[:2] == first and [v.version for v in versions(log, "other")] == [
        3,
        4,
        5,
    ]


def test_announcements_of_others_are_passed_over():
    log = a_log()
    publish(
        log,
        Output(
            "policy-versions",
            "other",
            PolicyVersion(learner="other", version=7, uri="", size_bytes=0, sha256="x"),
        ),
    )
    assert announced_hashes(log, "lead") == {} and announced_hashes(log, "other") == {7: "x"}
