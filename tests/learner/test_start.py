"""Where a learner begins: with which settings, and from which checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from streamrl.config import run_file
from streamrl.learner import start
from streamrl.learner.files.checkpoints import TrainingPosition
from streamrl.learner.start import find_start, learner_settings, newest_checkpoint
from streamrl.learner.trainer import ResumePoint, checkpoint_directory
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Log, Output
from streamrl.stream.records import PolicyVersion
from streamrl.system.errors import ConfigError, VersionMismatch
from tests.support.data_path import publish

RUN = run_file.parse({"run": "r", "envs": {"copy-digits": {}}})


def announced(version: int, sha256: str) -> PolicyVersion:
    return PolicyVersion(learner="lead", version=version, uri="", size_bytes=1, sha256=sha256)


@pytest.mark.parametrize(
    ("name", "at", "overrides", "says"),
    [
        (None, 2, (), "--at and --set are for a second learner"),
        ("lead", None, ("learner.loss=ppo",), "--at and --set are for a second learner"),
        ("second", None, ("batcher.max_seq_len=8",), "a second learner can have other settings"),
        ("second", None, ("learner.name=x",), "a second learner can have other settings"),
        ("second", None, ("learner.los=ppo",), "did you mean 'loss'"),
        (
            "second",
            2,
            ("learner.optimizer=lion",),
            "state of the lead's optimizer, made with adamw",
        ),
        ("second", 2, ("learner.beta2=0.5",), "state of the lead's optimizer, made with 0.95"),
        ("../x", None, (), "not a name of lowercase letters"),
    ],
)
def test_a_learner_that_makes_no_sense_is_refused(
    name: str | None, at: int | None, overrides: tuple[str, ...], says: str
):
    with pytest.raises(ConfigError, match=says):
        learner_settings(RUN, name or "lead", at, overrides)


def test_a_second_learner_has_its_own_settings_and_the_lead_those_of_the_run():
    own = learner_settings(RUN, "second", None, ("learner.learning_rate=0.5",))
    assert own.learner.learning_rate == 0.5
    assert learner_settings(RUN, "lead", None, ()).learner == RUN.learner


def test_a_preset_of_a_second_learner_leaves_the_buffer_as_it_is():
    second = learner_settings(RUN, "second", None, ("learner.preset=dapo",))
    assert (second.learner.clip_epsilon_high, second.buffer) == (0.28, RUN.buffer)


def test_a_checkpoint_of_weights_that_were_never_announced_is_of_another_run(
    monkeypatch: pytest.MonkeyPatch,
):
    """Also where the version is announced, but with other weights."""
    asked = list[tuple[Path, int]]()

    def latest(directory: Path, newest: int) -> TrainingPosition:
        asked.append((directory, newest))
        return TrainingPosition(2, 7, "ab")

    monkeypatch.setattr(start.checkpoints, "latest", latest)
    history = [announced(1, "x"), announced(2, "ab"), announced(3, "z")]
    found = newest_checkpoint(RUN, "lead", history)
    assert found is not None and (found.version, found.offset) == (2, 7)
    assert asked == [(checkpoint_directory(RUN, "lead"), 3)]
    with pytest.raises(VersionMismatch, match="has weights that lead never announced"):
        newest_checkpoint(RUN, "lead", [announced(2, "other"), announced(3, "ab")])


def test_a_learner_without_a_checkpoint_has_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(start.checkpoints, "latest", lambda directory, newest: None)
    assert newest_checkpoint(RUN, "lead", []) is None


def test_a_learner_begins_at_its_own_checkpoint_then_at_the_leads_then_as_the_run_began(
    monkeypatch: pytest.MonkeyPatch,
):
    log = MemoryLog({"policy-versions": 1})
    again = structs.replace(announced(2, "cd"), lineage=1)
    versions = (announced(1, "x"), announced(2, "ab"), again)
    publish(log, *(Output("policy-versions", "lead", version) for version in versions))
    own = TrainingPosition(2, 7, "ab")
    leads = ResumePoint(Path("lead"), TrainingPosition(1, 3, "x"))

    def clone(run: run_file.RunFile, log: Log, learner: str, version: int) -> ResumePoint:
        assert (learner, version) == ("lead", 1)
        return leads

    monkeypatch.setattr(start, "clone_lead_checkpoint", clone)
    monkeypatch.setattr(start.checkpoints, "latest", lambda directory, newest: own)
    found = find_start(RUN, log, "lead", 1)
    assert found.announced == {1: versions[0], 2: again}
    assert found.checkpoint == own
    assert found.resume_from == ResumePoint(checkpoint_directory(RUN, "lead"), own)
    monkeypatch.setattr(start.checkpoints, "latest", lambda directory, newest: None)
    assert find_start(RUN, log, "lead", 1)[1:] == (None, leads)
    assert find_start(RUN, log, "lead", None)[1:] == (None, None)
