from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from streamrl.extensions.advisor import advice
from streamrl.extensions.advisor.advice import WhatIf, advise, limit_of, predict, what_ifs
from streamrl.extensions.advisor.facts import Measured, Step
from streamrl.run.monitoring.time_account import LEARNER_CAUSES, SERVER_CAUSES
from streamrl.system.errors import ConfigError
from tests.support.advice import facts, run_of


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


def test_a_setting_that_cannot_be_is_refused_before_anything_is_simulated():
    with pytest.raises(ConfigError, match="lookahead is 9"):
        what_ifs(run_of(), facts(), ["batcher.lookahead=9"])


def test_a_faster_learner_is_predicted_to_make_more_steps():
    known = facts(steps=[Step(10.0, 0.0, 0.0)])
    outcome = predict(known, WhatIf("", run_of(), 2.0), 1e4)
    assert outcome is not None and outcome.steps_per_s == pytest.approx(1 / 5)


def test_the_table_has_what_was_measured_what_is_simulated_and_what_would_be(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(advice, "MOST_STEPS", 10)
    monkeypatch.setattr(advice, "LEAST_STEPS", 10)
    seen = measured({"data": 0.9})
    limit, table = advise(run_of(), facts(), seen, ["batcher.total_token_budget=300"])
    console = Console(width=160, record=True)
    console.print(table)
    text = console.export_text()
    lines = [line.split("   ")[0].strip() for line in text.splitlines()[1:]]
    assert limit.startswith("limited by sampling")
    assert lines == [
        "measured over 40 steps",
        "simulated",
        "2 more servers",
        "groups of 16",
        "batcher.total_token_budget=300",
        "a learner 2 times as fast",
    ]
    assert "no batch in time" in text  # a group has 400 tokens
