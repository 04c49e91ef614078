from __future__ import annotations

import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from streamrl.extensions.advisor import reading
from streamrl.extensions.advisor.facts import (
    Call,
    Load,
    Request,
    SampledGroup,
    SampledRollout,
    Step,
)
from streamrl.extensions.advisor.reading import (
    LEAST_GROUPS,
    LEAST_STEPS,
    SKIPPED,
    fractions_of,
    hops_of,
    is_of_loop,
    loads_of,
    pauses_of,
    read_facts,
    recent_rollouts,
    requests_of,
    sampled_group,
    steady_versions,
    step_of,
    time_account,
    tokens_by_fate,
)
from streamrl.run.monitoring.time_account import KEPT
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import (
    Fate,
    InferenceMetadata,
    Metric,
    Rollout,
    Turn,
)
from streamrl.system.errors import ConfigError
from tests.support.advice import DEMONSTRATIONS, run_of
from tests.support.build import floats, policy_version, rollout, tokens

ENV = "copy-digits"
SERVER = "inference-0"


def metric(source: str, time_s: float, step: int | None = None, **values: float) -> Metric:
    prefix = source.partition("-")[0]
    named = {f"{prefix}/{name}": value for name, value in values.items()}
    return Metric(source=source, time_s=time_s, step=step, values=named)


def sampled(
    sample: int, *calls: tuple[float, float, int], group: str = "g0", **fields: Any
) -> Rollout:
    """A rollout with these calls: when each began and ended, and the tokens of its answer."""
    turns = list[Turn]()
    for begun, ended, count in calls:
        how = InferenceMetadata(server=SERVER, temperature=1.0, latency_s=ended - begun)
        turns += [
            Turn(message="?", role="user", tokens=tokens(1, 2), timestamp=begun),
            Turn(
                message="!",
                role="assistant",
                tokens=tokens(*[3] * count),
                logprobs=floats(*[-0.5] * count),
                inference_metadata=how,
                timestamp=ended,
            ),
        ]
    return rollout(ENV, group, sample, turns=turns, **fields)


# ---- which versions count ------------------------------------------------------------------------


def test_the_first_steps_of_a_run_do_not_count():
    announced = {version: float(version) for version in range(40)}
    assert list(steady_versions("r", announced, 0)) == list(range(SKIPPED, 40))


def test_what_was_before_a_long_pause_does_not_count():
    announced = {version: version + (100.0 if version >= 20 else 0.0) for version in range(40)}
    assert list(steady_versions("r", announced, 0)) == list(range(20, 40))


def test_a_run_with_too_few_steps_is_told_how_many_it_needs():
    announced = {version: float(version) for version in range(SKIPPED + LEAST_STEPS)}
    with pytest.raises(ConfigError, match=r"has 9 steps .* needs 10; .* has 15 steps"):
        steady_versions("r", announced, 0)


# ---- metrics -------------------------------------------------------------------------------------


def test_a_step_has_its_times_without_the_wait_for_the_version_before():
    seen = metric("learner-lead", 10.0, 3, step_s=2.0, publish_s=0.75, publish_wait_s=0.25)
    assert step_of(seen, announced_s=9.875) == Step(2.0, 0.5, 0.375)


def test_the_way_between_parts_is_known_where_the_learner_waited_for_a_batch():
    built = [metric("batcher", time_s, k, tokens_total=9) for k, time_s in enumerate((1.0, 2.0))]
    trained = {
        0: metric("learner-lead", 1.5, 0, step_s=0.3, publish_s=0.1, idle_s=0.5),  # began at 1.1
        1: metric("learner-lead", 2.9, 1, step_s=0.3, publish_s=0.1, idle_s=0.1),  # held before
    }
    assert hops_of(built, trained) == [pytest.approx(0.1)]


def test_a_load_begins_some_time_after_the_announcement_and_is_a_pause():
    loaded = metric("inference-0", 9.0, 4, heard_s=0.125, pull_s=0.25, swap_s=0.5)
    started = metric("inference-0", 1.0, 0, heard_s=0.125, pull_s=0.25, start_s=60.0)
    assert loads_of([loaded, started]) == [Load(0.375, 0.5)]
    pauses = pauses_of([loaded, started], {4: 8.0})
    assert pauses == {"inference-0": [(8.375, 8.875)]}


def test_an_adapter_is_loaded_without_a_pause_and_serves_when_it_is():
    values = {"heard_s": 0.125, "pull_s": 0.25, "swap_s": 0.5, "pause_s": 0.0}
    assert loads_of([metric(SERVER, 9.0, 4, **values)]) == [Load(0.875, 0.0)]


@pytest.mark.parametrize(
    ("source", "counts"),
    [
        ("learner-lead", True),
        ("learner-sharper", False),  # a second learner of the same batches
        ("learner-lead-process-1", False),
        ("inference-0", True),
        ("inference-12", True),
        ("inference-judge-0", False),
        ("inference-tools-0", True),  # the pool of an env
        ("host.inference-0", True),  # a server of the run `host`
        ("host.inference-judge-0", False),
        ("batcher", True),
    ],
)
def test_metrics_are_those_of_the_learner_and_of_the_servers_that_envs_ask(
    source: str, counts: bool
):
    judge = {"replicas": 1, "model": "judge"}
    run = run_of(
        envs={ENV: {"fraction": 0.5}, "add-digits": {"fraction": 0.5, "pool": "tools"}},
        inference={"pools": {"judge": judge, "tools": {"replicas": 1}}},
    )
    name = source.rpartition(".")[2]
    values = {f"{name.partition('-')[0]}/idle_s": 1.0}
    assert is_of_loop(run, Metric(source=source, time_s=1.0, values=values)) == counts


def test_what_the_learner_waits_for_is_known_of_more_steps_than_an_account_keeps():
    """A step takes 1 s, of which the learner waits 0.2 s for the version and 0.1 s for a load."""
    steps = 3 * KEPT
    run = run_of(batcher={"lookahead": 0})
    versions = {number: number + 0.2 for number in range(steps)}
    metrics = list[Metric]()
    for number in range(steps):
        metrics += [
            metric(SERVER, number + 0.3, number, heard_s=0.0, pull_s=0.0, swap_s=0.1),
            metric("learner-lead", number + 1.0, number, step_s=0.7, idle_s=0.3),
        ]
    spent_s = time_account(run, versions, metrics).learner_s
    assert spent_s["version"] == pytest.approx(0.2 * (steps - 1))
    assert spent_s["weights"] == pytest.approx(0.1 * (steps - 1))


def test_fractions_are_those_that_a_curriculum_wanted():
    run = run_of(envs={ENV: {"fraction": 0.5}, "add-digits": {"fraction": 0.5}})
    values = {"batcher/curriculum_stage": 1.0, f"batches/{ENV}/frac_wanted": 0.75}
    seen = Metric(source="batcher", time_s=1.0, step=1, values=values)
    assert fractions_of(run, [seen]) == {ENV: 0.75, "add-digits": 0.0}
    assert fractions_of(run, [metric("batcher", 1.0, 1, tokens_total=9)]) == {}


# ---- rollouts ------------------------------------------------------------------------------------


def test_a_group_has_the_waits_between_calls_and_the_time_after_the_last():
    members = [
        (sampled(0, (10.0, 12.0, 5), (15.0, 16.0, 3), reward=1.0), 20.0),
        (sampled(1, (10.0, 12.0, 4)), 20.0),
        (rollout(ENV, "g0", 2, failure="no"), 20.0),
    ]
    group = sampled_group(members)
    assert [each.calls for each in group.rollouts] == [
        [Call(0.0, 5), Call(3.0, 3)],
        [Call(0, 4)],
        [],
    ]
    assert [each.tokens for each in group.rollouts] == [12, 6, 0]
    assert (group.rollouts[0].reward, group.end_s) == (1.0, 4.0)


def test_a_demonstration_has_tokens_and_asks_for_none():
    run = run_of(envs={ENV: {"fraction": 0.5}, "shown": DEMONSTRATIONS})
    shown = structs.replace(sampled(0, (10.0, 10.1, 5)), environment="shown")
    assert sampled_group([(shown, 20.0)], has_calls=False) == SampledGroup(
        [SampledRollout([], 7, 0.0)], 0.0
    )
    assert requests_of(run, [[(shown, 20.0)]]) == {}


def test_the_first_answers_of_a_group_are_one_request_and_the_others_are_alone():
    members = [
        (sampled(0, (10.0, 12.0, 5), (15.0, 16.0, 3)), 20.0),
        (sampled(1, (10.0, 12.0, 4)), 20.0),
    ]
    assert requests_of(run_of(), [members]) == {
        "generation": {SERVER: [Request(10.0, 12.0, (5, 4)), Request(15.0, 16.0, (3,))]}
    }


# ---- the log -------------------------------------------------------------------------------------


TOPICS = {"policy-versions": 1, "metrics": 1, "fates": 1, f"rollouts.{ENV}": 1}


def write(log: MemoryLog, topic: str, key: str, *records: Any) -> None:
    """Write the records as one transaction."""
    outputs = [to_message(Output(topic, key, record)) for record in records]
    log.writer("w").commit(outputs)


def log_of_steps(steps: int) -> MemoryLog:
    """The log of a run that has made so many steps of 1 s, and has no rollouts yet."""
    log = MemoryLog(TOPICS)
    began_s = time.time() - steps
    for number in range(steps + 1):
        at_s = began_s + number
        write(log, "policy-versions", "lead", structs.replace(policy_version(number), time_s=at_s))
        if number < steps:
            trained = metric("learner-lead", at_s + 1.0, number, step_s=1.0)
            write(log, "metrics", "learner-lead", trained)
    return log


def test_facts_and_what_was_measured_are_read_from_the_log():
    log = MemoryLog({**TOPICS, f"rollouts.{ENV}": 2})
    began_s = time.time() - 30.0
    for number in range(41):
        at_s = began_s + number
        announced = structs.replace(policy_version(number), time_s=at_s)
        write(log, "policy-versions", "lead", announced)
        trained = metric("learner-lead", at_s + 0.9, number, step_s=0.5, idle_s=0.4, publish_s=0.0)
        write(log, "metrics", "learner-lead", trained)
        asked = metric(SERVER, at_s, None, asked_s=0.75 * number, idle_s=0.25 * number)
        write(log, "metrics", SERVER, asked)
        judge = metric("inference-judge-0", at_s, None, asked_s=0.0, idle_s=1.0 * number)
        write(log, "metrics", "inference-judge-0", judge)
        other = metric("learner-sharper", at_s + 0.5, number, step_s=0.1, idle_s=0.9)
        write(log, "metrics", "learner-sharper", other)
    for number in range(30):
        group = f"g{number}"
        begun_s = began_s + number
        for sample in range(8):
            record = sampled(sample, (begun_s, begun_s + 0.5, 10), group=group)
            write(log, f"rollouts.{ENV}", group, record)
        is_batched = number % 3 > 0
        fate = Fate(
            fate="batched" if is_batched else "expired",
            batch=number if is_batched else None,
            environment=ENV,
            partition=0,
            offsets=np.array([number], np.int64),
            tokens=np.array([80], np.int32),
        )
        write(log, "fates", group, fate)
    facts, measured = read_facts(run_of(), log)
    assert (measured.steps, measured.steps_per_s) == (35, pytest.approx(1.0))
    assert measured.tokens_per_s == pytest.approx(30 * 80 / 35)
    assert measured.expired_frac == pytest.approx(1 / 3)
    assert measured.learner["training"] == pytest.approx(0.5, abs=0.01)
    assert measured.servers["sampling"] == pytest.approx(0.75, abs=0.01)
    assert len(facts.steps) == 36 and facts.servers == {"generation": 1}
    assert len(facts.groups[ENV]) == 30
    engine = facts.engines["generation"]
    assert engine.overhead_s + 10 * engine.step_s(8) == pytest.approx(0.5, rel=0.02)


def test_a_run_that_never_made_a_step_is_told_how_many_it_needs():
    with pytest.raises(ConfigError, match="run r has 0 steps that can be measured"):
        read_facts(run_of(), MemoryLog(TOPICS))
    with pytest.raises(ConfigError, match="run r has 0 steps that can be measured"):
        read_facts(run_of(), log_of_steps(0))


def test_a_run_without_metrics_of_its_learner_is_refused():
    log = MemoryLog(TOPICS)
    for number in range(30):
        write(log, "policy-versions", "lead", policy_version(number))
    with pytest.raises(ConfigError, match="no steps of the learner"):
        read_facts(run_of(), log)


def test_a_run_whose_env_only_fails_is_told_which():
    log = log_of_steps(30)
    failed = [rollout(ENV, "g0", sample, failure="no") for sample in range(8)]
    write(log, f"rollouts.{ENV}", "g0", *failed)
    with pytest.raises(ConfigError, match="no whole group of copy-digits in which a rollout has"):
        read_facts(run_of(), log)


def test_a_run_whose_rollouts_have_no_model_calls_is_refused():
    log = log_of_steps(30)
    given = [rollout(ENV, "g0", sample) for sample in range(8)]
    write(log, f"rollouts.{ENV}", "g0", *given)
    with pytest.raises(ConfigError, match="of copy-digits have no model calls, so nothing"):
        read_facts(run_of(), log)


def test_a_run_on_the_servers_of_another_run_has_no_time_of_servers():
    log = log_of_steps(30)
    now_s = time.time()
    members = [sampled(sample, (now_s, now_s + 0.5, 10)) for sample in range(8)]
    write(log, f"rollouts.{ENV}", "g0", *members)
    run = run_of(inference={"replicas": 0, "served_by": ["host"]})
    facts, measured = read_facts(run, log)
    assert measured.servers == {} and facts.servers == {"generation": 1}


def test_of_groups_that_are_large_for_a_partition_some_are_whole(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(reading, "ROLLOUTS", 100)
    run = run_of(
        buffer={"group_size": 60, "max_age": 4},
        envs={ENV: {"fraction": 0.5}, "add-digits": {"fraction": 0.5, "buffer": {"group_size": 4}}},
    )
    log = MemoryLog({f"rollouts.{ENV}": 4, "rollouts.add-digits": 4})
    for number in range(40):
        group = f"g{number}"
        members = [rollout(ENV, group, sample) for sample in range(60)]
        write(log, f"rollouts.{ENV}", group, *members)
    read = Counter(each.group_id for each, _ in recent_rollouts(run, log, 0.0))
    whole = [group for group, count in read.items() if count == 60]
    assert len(whole) == 4 * LEAST_GROUPS  # each comes with a marker


def test_tokens_are_counted_over_the_time_whose_fates_are_read(monkeypatch: pytest.MonkeyPatch):
    log = MemoryLog({"fates": 1})
    columns: dict[str, Any] = {
        "offsets": np.array([0], np.int64),
        "tokens": np.array([80], np.int32),
    }
    for _ in range(50):
        fate = Fate(fate="expired", environment=ENV, partition=0, **columns)
        write(log, "fates", "g", fate)
    now_s = time.time()
    shown = Fate(fate="expired", environment="shown", partition=0, **columns)
    write(log, "fates", "g", shown)  # a demonstration is not sampled
    run = run_of(envs={ENV: {"fraction": 0.5}, "shown": DEMONSTRATIONS})
    tokens, tokens_s = tokens_by_fate(run, log, now_s - 100, now_s + 10)
    assert (tokens, tokens_s) == ({"expired": 50 * 80}, pytest.approx(110))
    monkeypatch.setattr(reading, "FATES", 42)  # a fate and its marker each
    tokens, tokens_s = tokens_by_fate(run, log, now_s - 100, now_s + 10)
    assert (tokens, tokens_s) == ({"expired": 20 * 80}, pytest.approx(10, abs=1.0))
