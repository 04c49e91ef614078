from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console

from streamrl.config.run_file import RunFile, load
from streamrl.extensions.advisor import advice
from streamrl.extensions.advisor.advice import WhatIf, advise, limit_of, predict, what_ifs
from streamrl.extensions.advisor.facts import Facts, Measured, Step
from streamrl.run.monitoring.cells import DASH
from streamrl.run.monitoring.time_account import LEARNER_CAUSES, SERVER_CAUSES
from streamrl.system.errors import ConfigError
from tests.support.advice import DEMONSTRATIONS, facts, run_of


def measured(learner: dict[str, float], sampling: float = 0.95, **changed: Any) -> Measured:
    fields: dict[str, Any] = {
        "steps": 40,
        "steps_per_s": 2.0,
        "tokens_per_s": 1234.0,
        "expired_frac": 0.125,
        "learner": {**dict.fromkeys(LEARNER_CAUSES, 0.0), **learner},
        "servers": {**dict.fromkeys(SERVER_CAUSES, 0.0), "sampling": sampling},
    }
    return Measured(**{**fields, **changed})


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "MOST_STEPS", 10)
    monkeypatch.setattr(advice, "LEAST_STEPS", 10)


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (measured({"training": 0.8, "data": 0.2}), "the learner trains for 80.0 % of its time"),
        (measured({"weights": 0.5}), "the learner waits for servers to load for 50.0 %"),
        (measured({"data": 0.7}, 0.95), "more or faster servers would help"),
        (measured({"data": 0.7}, 0.4), "more work under way would help"),
    ],
)
def test_what_takes_most_of_the_time_of_the_learner_limits_the_run(seen: Measured, words: str):
    assert words in limit_of(seen)


def test_a_run_whose_servers_are_another_runs_is_told_that_they_are_not_measured():
    seen = measured({"data": 0.7}, servers={})
    assert "waits for data for 70.0 % of its time; what servers do is not" in limit_of(seen)


def test_every_run_is_asked_about_servers_age_groups_and_learner():
    run = run_of()
    asked = what_ifs(run, facts(), ["batcher.lookahead=1"])
    assert [what_if.learner_speed for what_if in asked] == [1.0, 1.0, 1.0, 2.0]
    runs = [what_if.run for what_if in asked]
    assert [each.inference.replicas for each in runs] == [3, 1, 1, 1]
    assert [each.buffer.group_size for each in runs] == [8, 16, 8, 8]
    assert [each.batcher.lookahead for each in runs] == [2, 2, 1, 2]
    assert runs[-1] == run  # max_age is 4 already


def test_an_env_with_a_rule_of_its_own_is_changed_too():
    run = run_of(envs={"copy-digits": {"fraction": 1.0, "buffer": {"max_age": 3}}})
    ages = [what_if.run for what_if in what_ifs(run, facts()) if "age" in what_if.name]
    assert [each.buffer_of("copy-digits").max_age for each in ages] == [4]


def test_servers_that_others_start_are_counted_by_their_answers():
    run = run_of(inference={"replicas": 0})
    known = facts(servers={"generation": 5})
    assert what_ifs(run, known)[0].run.inference.replicas == 7


@pytest.mark.parametrize(
    "file", ["deploy/runs/gsm8k-1gpu.yaml", "deploy/kubernetes/overlays/production/run.yaml"]
)
def test_more_servers_than_the_placement_has_gpus_for_are_a_question_too(file: str):
    run = load(file)
    more = what_ifs(run, facts())[0]
    assert (more.name, more.refusal) == ("2 more servers", "")
    assert more.run.inference.replicas == run.inference.replicas + 2


def test_what_the_run_cannot_have_is_a_row_with_its_reason():
    run = run_of(buffer={"group_size": 32, "min_group_size": 32, "max_age": 4})
    refused = {what_if.name: what_if.refusal for what_if in what_ifs(run, facts())}
    assert refused == {
        "2 more servers": "",
        "groups of 16": "buffer.min_group_size 32 is larger than buffer.group_size 16",
        "a learner 2 times as fast": "",
    }
    assert "groups of 16: buffer.min_group_size 32" in printed(run)


def test_demonstrations_stay_groups_of_one():
    run = run_of(envs={"copy-digits": {"fraction": 0.5}, "shown": DEMONSTRATIONS})
    larger = next(each for each in what_ifs(run, facts()) if each.name == "groups of 16")
    assert larger.refusal == ""
    sizes = [larger.run.buffer_of(env).group_size for env in run.envs]
    assert sizes == [16, 1]


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("envs.add-digits.fraction=0", r"--set envs.add-digits: the run has no such env"),
        ("envs.copy-digits.pool=spare", r"pool=spare: no env has asked .*; choose generation"),
    ],
)
def test_what_is_not_measured_cannot_be_simulated(override: str, why: str):
    run = run_of(inference={"pools": {"spare": {"replicas": 1}}})
    with pytest.raises(ConfigError, match=why):
        what_ifs(run, facts(), [override])


def test_a_setting_that_cannot_be_is_refused_before_anything_is_simulated():
    with pytest.raises(ConfigError, match="lookahead is 9"):
        what_ifs(run_of(), facts(), ["batcher.lookahead=9"])


def test_a_faster_learner_is_predicted_to_make_more_steps():
    known = facts(steps=[Step(10.0, 0.0, 0.0)])
    outcome = predict(known, WhatIf("", run_of(), 2.0), 1e4)
    assert outcome is not None and outcome.steps_per_s == pytest.approx(1 / 5)


def printed(run: RunFile, known: Facts | None = None, overrides: Sequence[str] = ()) -> str:
    """The advice as it is shown."""
    limit, table = advise(run, known or facts(), measured({"data": 0.9}), overrides)
    console = Console(width=160, record=True)
    console.print(limit)
    console.print(table)
    return console.export_text()


def test_others_are_compared_with_the_simulated_run_and_with_nothing_if_it_makes_no_step(
    few_steps: None,
):
    run = run_of(batcher={"total_token_budget": 300})  # a group has 400 tokens
    text = printed(run, overrides=["batcher.total_token_budget=1600"])
    assert "simulated: no batch in time" in text
    (other,) = [line for line in text.splitlines() if "total_token_budget" in line]
    assert other.split()[2] == DASH and " x " not in text


def test_an_env_of_which_nothing_was_found_is_named_and_no_batch_waits_for_it(few_steps: None):
    run = run_of(envs={"copy-digits": {"fraction": 0.5}, "add-digits": {"fraction": 0.5}})
    text = printed(run)
    assert "simulated without add-digits, of which" in text and "x 1.00" in text


def test_the_table_has_what_was_measured_what_is_simulated_and_what_would_be(
    few_steps: None,
):
    text = printed(run_of(), overrides=["batcher.total_token_budget=300"])
    lines = [line.split("  ")[0].strip() for line in text.splitlines()]
    assert lines[0].startswith("limited by sampling")
    assert lines[3:] == [
        "measured over 40 steps",
        "simulated",
        "2 more servers",
        "groups of 16",
        "batcher.total_token_budget=300: no batch in time",  # a group has 400 tokens
        "a learner 2 times as fast",
    ]
