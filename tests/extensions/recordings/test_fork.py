"""What of a run file a fork may change."""

from __future__ import annotations

import pytest

from streamrl.config import run_file
from streamrl.config.run_file import with_overrides
from streamrl.config.sections.learner import Schedule
from streamrl.config.sections.operation import Fork
from streamrl.extensions.recordings.fork import child_run_file
from streamrl.system.errors import ConfigError
from tests.support.data_path import RUN


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("learner.optimizer=muon", "continues with the state of the parent's optimizer"),
        ("learner.beta1=0.5", "state of the parent's optimizer, made with 0.9"),
        ("learner.beta2=0.5", "state of the parent's optimizer, made with 0.95"),
        ("learner.lora={rank: 8}", "are those of its adapters, or of a whole model"),
        ("model.tiny.hidden=64", "continues with the weights of small"),
        ("model.tiny.alphabet=abc", "vocabulary and tokenizer stay"),
        ("model.max_seq_len=8", "continues with the weights of small"),
        ("fork.version=3", "give --as and --at instead"),
        ("run=x", "give --as and --at instead"),
        ("learner.los=grpo", "did you mean 'loss'"),
    ],
)
def test_what_cannot_be_changed_is_refused(override: str, says: str):
    with pytest.raises(ConfigError, match=says):
        child_run_file(RUN, "other", [override])


def test_the_run_file_of_a_fork_is_a_run_file():
    run = child_run_file(
        RUN, "other", ["learner.learning_rate=0.5", "model.history=keep"]
    ).model_copy(update={"fork": Fork(run="small", version=2, sha256="ab", balance={"": 1.5})})
    assert run_file.parse(run.model_dump(mode="json")) == run
    assert with_overrides(run, []) is run and run.learner.learning_rate == 0.5
    with pytest.raises(ConfigError, match=r"unknown key 'fork.versio'; did you mean 'version'\?"):
        with_overrides(run, ["fork.versio=3"])


def test_a_fork_with_more_steps_than_its_schedule_is_refused_unless_that_is_given():
    """The parent's cosine ends at its 100 steps, so 100 further ones would have a rate of 0."""
    schedule = ["orchestrator.max_steps=100", "learner.schedule.kind=cosine"]
    parent = with_overrides(RUN, schedule)
    assert parent.learner.schedule == Schedule(kind="cosine", steps=100)
    more = "orchestrator.max_steps=200"
    with pytest.raises(ConfigError, match="the learning rate would be 0 from step 100 on"):
        child_run_file(parent, "other", [more])
    longer = child_run_file(parent, "other", [more, "learner.schedule.steps=200"])
    assert longer.learner.schedule == Schedule(kind="cosine", steps=200)
