"""Curricula worked by hand, alone and in the batcher: groups of two rollouts, 10 tokens each,
batches of four groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from streamrl.batcher import curriculum
from streamrl.batcher import process as batcher
from streamrl.batcher.assemble import assemble
from streamrl.batcher.curriculum import (
    CurriculumRules,
    CurriculumStage,
    CurriculumState,
    RewardTarget,
    advance,
    curriculum_named,
    fractions_of,
    stage_of,
)
from streamrl.batcher.process import step
from streamrl.batcher.selection import REMAINDER, rebase_deficit
from streamrl.batcher.state import BatcherState
from streamrl.config import run_file
from streamrl.config.run_file import RunFile
from streamrl.extensions.recordings.replay import replay
from streamrl.stream.log.codec import to_event, to_message
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Log, Message, Output
from streamrl.stream.log.reading import read
from streamrl.stream.processor.definition import ProcessorState
from streamrl.stream.processor.joiner import joiner_of
from streamrl.stream.processor.restore import restore
from streamrl.stream.processor.snapshots import serialize_state
from streamrl.stream.processor.transaction import process_batch
from streamrl.stream.records import Batch, Demand, Metric
from streamrl.system.errors import ConfigError
from tests.support.batcher import CONFIG
from tests.support.build import floats, group, group_event, version_event
from tests.support.data_path import TOPICS
from tests.support.groups import group_message

EASY = {"copy": 1.0}
BOTH = {"copy": 0.5, "add": 0.5}
HARD = {"add": 1.0}
ENVS = ("copy", "add")
STEPS = CurriculumRules(
    "stages",
    ENVS,
    (
        CurriculumStage(EASY, until_batch=2),
        CurriculumStage(BOTH, until_batch=4),
        CurriculumStage(HARD),
    ),
)
GOALS = CurriculumRules(
    "stages",
    ENVS,
    (
        CurriculumStage(EASY, until=RewardTarget("copy", 0.5, 2)),
        CurriculumStage(BOTH, until=RewardTarget("add", 0.5, 1)),
        CurriculumStage(HARD),
    ),
)


def batch_of(number: int, **rewards: float) -> Batch:
    batch = assemble(
        [group(env, f"{env}-{number}", reward=reward) for env, reward in rewards.items()],
        number,
        number,
        4,
        10,
    )
    assert batch is not None
    return batch


# ---- the decisions -------------------------------------------------------------------------------


def test_a_number_ends_a_stage():
    assert [stage_of(STEPS, 0, number) for number in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [fractions_of(STEPS, CurriculumState(), number) for number in (0, 2, 4)] == [
        {"copy": 1, "add": 0},
        {"copy": 0.5, "add": 0.5},
        {"copy": 0, "add": 1},
    ]


def test_a_goal_ends_a_stage_when_enough_batches_have_reached_it():
    progress = CurriculumState()
    stages = list[int]()
    for number, rewards in enumerate(
        [
            {"copy": 1.0},
            {"copy": 0.0},
            {"copy": 0.9},
            {"copy": 0.2},
            {"copy": 0.9},
            {"copy": 0.0, "add": 0.6},
        ]
    ):
        progress = advance(GOALS, progress, batch_of(number, **rewards))
        stages.append(progress.stage)
    # copy over two batches: not yet two, 0.5 at once, so from batch 2 on both train; there add has
    # none until the last batch, with 0.6
    assert stages == [0, 1, 1, 1, 1, 2]
    assert progress.rewards == {
        "copy": [pytest.approx(r) for r in (1, 0, 0.9, 0.2, 0.9, 0)],
        "add": [pytest.approx(0.6)],
    }


def test_one_batch_reaches_one_goal_and_whichever_end_comes_first_counts():
    two = CurriculumRules(
        "stages",
        ENVS,
        (
            CurriculumStage(EASY, until=RewardTarget("copy", 0.5, 1)),
            CurriculumStage(BOTH, until=RewardTarget("copy", 0.5, 1)),
            CurriculumStage(HARD),
        ),
    )
    assert advance(two, CurriculumState(), batch_of(0, copy=1.0)).stage == 1
    either = CurriculumRules(
        "stages",
        ENVS,
        (
            CurriculumStage(EASY, until_batch=3, until=RewardTarget("copy", 0.5, 1)),
            CurriculumStage(HARD),
        ),
    )
    assert [
        stage_of(either, advance(either, CurriculumState(), batch_of(0, copy=reward)).stage, 1)
        for reward in (0.0, 1.0)
    ] == [0, 1]
    assert stage_of(either, 0, 3) == 1


def test_rewards_are_remembered_as_long_as_somebody_asks():
    rules = replace(GOALS, batches=1)
    progress = CurriculumState(rewards={"copy": [0.1, 0.2]})
    assert advance(rules, progress, batch_of(5, copy=0.25)).rewards["copy"] == [0.2, 0.25]
    assert progress.rewards == {"copy": [0.1, 0.2]}  # what it was made of stays


def test_a_rollout_that_forked_counts_once():
    """Rewards 0 and 1, the second rollout in two sequences."""
    forked = structs.replace(group(sizes=(1, 1, 1)), uids=["a", "b", "b"], rewards=floats(0, 1, 1))
    batch = assemble([forked], 0, 0, 2, 10)
    assert batch is not None and advance(STEPS, CurriculumState(), batch).rewards == {"copy": [0.5]}


def test_learnability_gives_most_to_what_is_won_half_the_time():
    rules = CurriculumRules("learnability", ("always", "half", "seldom", "new"), least=0.1)
    progress = CurriculumState(
        rewards={"always": [1.0, 1.0], "half": [0.0, 1.0], "seldom": [0.1], "new": []}
    )
    # r (1 - r) is 0, 1/4, 0.09, and 1/4 for the one that has not been seen; 0.6 of a batch is
    # divided so
    assert fractions_of(rules, progress, 0) == pytest.approx(
        {
            "always": 0.1,
            "half": 0.1 + 0.6 * 0.25 / 0.59,
            "seldom": 0.1 + 0.6 * 0.09 / 0.59,
            "new": 0.1 + 0.6 * 0.25 / 0.59,
        }
    )
    assert fractions_of(
        rules, CurriculumState(rewards={env: [1.0] for env in rules.envs}), 0
    ) == pytest.approx(dict.fromkeys(rules.envs, 0.25))
    # the last one, as 1
    assert fractions_of(
        replace(rules, batches=1), CurriculumState(rewards={"half": [0.5, 7.0]}), 0
    )["half"] == pytest.approx(0.1)


def test_ones_own_curriculum_and_what_is_none():
    own = CurriculumRules("tests.batcher.test_curriculum:by_number", ENVS)
    assert fractions_of(own, CurriculumState(), 3) == {"copy": 0.75, "add": 0.0}
    for number, says in (
        (5, "batch 5: batcher.curriculum tests.*by_number gave {'copy': 1.25}"),
        (-1, "batch -1"),
    ):
        with pytest.raises(ValueError, match=says):
            fractions_of(own, CurriculumState(), number)
    with pytest.raises(
        ConfigError, match=r"batcher.curriculum.kind: 'stage' is not known; did you mean 'stages'\?"
    ):
        curriculum_named("stage")


def by_number(rules: CurriculumRules, progress: CurriculumState, batch: int) -> Mapping[str, float]:
    return {"copy": batch / 4}


def test_what_a_share_that_ends_is_owed_goes_to_the_others():
    """Balances add up to nothing before and after; otherwise every later batch would be too
    small.
    """
    assert rebase_deficit(HARD, {"copy": 6.0, "add": -4.0, REMAINDER: -2.0}) == {
        "add": 2.0,
        REMAINDER: -2.0,
    }
    assert rebase_deficit({"copy": 0.5, "add": 0.25}, {"copy": 6.0, "old": -6.0}) == {
        "copy": 3.0,
        "add": -1.5,
        REMAINDER: -1.5,
    }
    assert rebase_deficit(BOTH, {"copy": 0.1, "add": -0.1, REMAINDER: 0.0}) == {
        "copy": 0.1,
        "add": -0.1,
        REMAINDER: 0.0,
    }


# ---- in the batcher ------------------------------------------------------------------------------

SMALL = replace(
    CONFIG,
    fractions={"copy": 0.0, "add": 0.0},
    total_token_budget=40,
    row_count=5,
    max_age=2,
    lookahead=1,
)


def wanted(outputs: Sequence[Output]) -> dict[str, int]:
    """By the last demand of each env."""
    return {
        o.record.environment: o.record.wanted_tokens
        for o in outputs
        if isinstance(o.record, Demand)
    }


def test_batches_and_demand_follow_the_steps():
    """Batches 0 and 1 are of copy alone; the next rollouts can serve batches 0 to 2, of which the
    last is half of add's.
    """
    state, out = step(replace(SMALL, curriculum=STEPS), BatcherState(), [version_event(0)], 0.0)
    assert wanted(out) == {"copy": 40 + 40 + 20, "add": 20}
    groups = [group_event(i, group("copy", f"c{i}")) for i in range(10)]
    state, out = step(replace(SMALL, curriculum=STEPS), state, groups, 0.0)
    assert [len(o.record.group_ids) for o in out if isinstance(o.record, Batch)] == [4, 4]
    assert wanted(out) == {"copy": 0}  # half of batch 2, which it holds
    later = [
        version_event(1),
        *(group_event(i, group("add", f"a{i}", version=1)) for i in range(2)),
    ]
    state, out = step(replace(SMALL, curriculum=STEPS), state, later, 0.0)
    (mixed,) = (o.record for o in out if isinstance(o.record, Batch))
    assert sorted(mixed.group_ids) == ["a0", "a1", "c8", "c9"]
    (values,) = (o.record.values for o in out if isinstance(o.record, Metric))
    assert (
        values["batcher/curriculum_stage"],
        values["batches/copy/frac_wanted"],
        values["batches/add/frac_wanted"],
    ) == (1, 0.5, 0.5)


def test_a_stage_that_is_reached_by_reward_shows_in_the_next_batch():
    config = replace(
        SMALL,
        curriculum=CurriculumRules(
            "stages",
            ENVS,
            (CurriculumStage(EASY, until=RewardTarget("copy", 0.5, 1)), CurriculumStage(HARD)),
        ),
    )
    groups = [group_event(i, group("copy", f"c{i}", reward=0.5)) for i in range(4)] + [
        group_event(i, group("add", f"a{i}")) for i in range(4)
    ]
    _, out = step(config, BatcherState(), [version_event(0), *groups], 0.0)
    assert [
        [name[0] for name in o.record.group_ids] for o in out if isinstance(o.record, Batch)
    ] == [["c"] * 4, ["a"] * 4]


def test_batches_stay_full_when_a_share_ends():
    """Groups of 14 tokens do not divide a budget of 40, so that shares are in debt; when copy ends,
    batches of add alone are as large as can be.
    """
    rules = CurriculumRules(
        "stages",
        ENVS,
        (CurriculumStage({"copy": 0.7, "add": 0.3}, until_batch=3), CurriculumStage(HARD)),
    )
    config = replace(SMALL, curriculum=rules, max_age=20, lookahead=20)
    state = BatcherState()
    sizes = list[int]()
    events = [version_event(0)]
    for i in range(40):
        events += [group_event(i, group(env, f"{env}{i}", sizes=(5, 5))) for env in ENVS]
    state, out = step(config, state, events, 0.0)
    built = [o.record for o in out if isinstance(o.record, Batch)]
    sizes = [int((batch.prompt_lengths[batch.groups] + batch.lengths).sum()) for batch in built]
    assert len(sizes) > 8 and set(sizes) == {28}
    assert {name for batch in built[3:] for name in batch.environments} == {"add"}
    assert sum(state.deficit.values()) == pytest.approx(0)


# ---- by its log ----------------------------------------------------------------------------------

CURRICULUM: dict[str, Any] = {
    "kind": "stages",
    "stages": [
        {"fractions": EASY, "until": {"env": "copy", "reward": 0.5, "batches": 2}},
        {"fractions": {"copy": 0.3, "add": 0.5}, "until_batch": 7},
        {"fractions": HARD},
    ],
}
RUN = run_file.parse(
    {
        "run": "small",
        "envs": {"copy": {}, "add": {}},
        "buffer": {"group_size": 2, "min_group_size": 2, "max_age": 2},
        "batcher": {
            "total_token_budget": 80,
            "max_seq_len": 10,
            "lookahead": 1,
            "curriculum": CURRICULUM,
        },
        "model": {"max_seq_len": 10},
    }
)
LEARNABLE = run_file.with_overrides(
    RUN, ["batcher.curriculum={kind: learnability, least: 0.2, batches: 3}"]
)


def recorded(run: RunFile, turn_events: int = 5) -> tuple[MemoryLog, list[bytes]]:
    """A batcher's whole life over groups whose rewards grow with the version, and its state after
    each turn.
    """
    part = replace(batcher.make_processor(run), snapshot_events=23)
    log = MemoryLog(TOPICS)
    joiner = joiner_of(log, part)
    assert joiner is not None
    messages: list[Message] = []
    for version in range(12):
        messages.append(
            to_message(Output("policy-versions", "lead", version_event(version).record))
        )
        groups = [
            group(
                env,
                f"{env}-{version}-{i}",
                (3, 3 + i % 2),
                version=version,
                reward=version / 6 - 0.1 * (env == "add"),
            )
            for env in ENVS
            for i in range(9)
        ]
        messages += [group_message(log, record) for record in groups]
    writer = log.writer(part.name)
    fold = ProcessorState(part.initial())
    states = list[bytes]()
    for start in range(0, len(messages), turn_events):
        appended = log.append(messages[start : start + turn_events], marker=True)
        process_batch(part, fold, joiner.join(appended), 1.0, writer.commit)
        states.append(serialize_state(fold.state))
    return log, states


def batches(log: Log) -> list[Batch]:
    records = (to_event(message, ("batch",)).record for message in read(log, "batches", 0, 0))
    return [record for record in records if isinstance(record, Batch)]


@pytest.mark.parametrize("run", [RUN, LEARNABLE], ids=["stages", "learnability"])
def test_replay_is_bit_exact_and_a_restart_is_where_it_was(run: RunFile):
    log, states = recorded(run)
    done, fold = replay(log, batcher.make_processor(run))
    assert done.difference == "" and done.identical["batches"] == len(batches(log)) > 8
    assert (
        serialize_state(fold.state)
        == serialize_state(restore(log, batcher.make_processor(run))[0].state)
        == states[-1]
    )


def test_a_curriculum_that_decides_otherwise_is_found_by_replay(monkeypatch: pytest.MonkeyPatch):
    log, _ = recorded(RUN)
    monkeypatch.setattr(
        curriculum, "stages", lambda rules, progress, batch: {"copy": 0.5, "add": 0.5}
    )
    assert replay(log, batcher.make_processor(RUN))[0].difference != ""


def test_the_recorded_run_went_through_its_stages():
    built = batches(recorded(RUN)[0])
    shares = [
        {
            env: sum(batch.environments[e] == env for e in batch.group_environments)
            for env in batch.environments
        }
        for batch in built
    ]
    first_mixed = next(i for i, share in enumerate(shares) if "add" in share)
    assert 2 < first_mixed < 7 and all(share.keys() == {"copy"} for share in shares[:first_mixed])
    assert all(share.keys() == {"add"} for share in shares[7:]) and len(shares) > 8


# ---- the run file --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            "curriculum.kind=stage",
            r"batcher.curriculum.kind: 'stage' is not known; did you mean 'stages'\?",
        ),
        ("curriculum.stages=[]", "stages: List should have at least 1 item"),
        (
            "curriculum.kind=learnability",
            "unknown key 'batcher.curriculum.stages'; valid keys: kind, batches, least",
        ),
        (
            "curriculum={kind: learnability, least: 0.6}",
            "least 0.6 of each of 2 envs is more than a batch",
        ),
        (
            "curriculum.stages=[{fractions: {cpy: 1}}]",
            r"batcher.curriculum.stages.0.fractions: no env 'cpy'; did you mean 'copy'\?",
        ),
        (
            "curriculum.stages=[{fractions: {copy: 0.7, add: 0.7}}]",
            "stages.0.fractions add up to 1.4; above 0 and at most 1 is possible",
        ),
        (
            "curriculum.stages=[{fractions: {copy: 1}}, {fractions: {add: 1}}]",
            "stages.0: give until_batch or until, where the next one begins",
        ),
        (
            "curriculum.stages=[{fractions: {copy: 1}, until_batch: 3}]",
            "stages.0: nothing follows the last stage; leave its end out",
        ),
        (
            "curriculum.stages=[{fractons: {copy: 1}}]",
            r"unknown key 'batcher.curriculum.stages.0.fractons'; did you mean 'fractions'\?",
        ),
        (
            (
                "curriculum.stages=[{fractions: {copy: 1}, until: {env: add, reward: 1}},"
                " {fractions: {add: 1}}]"
            ),
            "stages.0.until: 'add' has no share of the batches of this stage",
        ),
        (
            (
                "curriculum.stages=[{fractions: {copy: 1}, until_batch: 3}, {fractions: {copy: 1},"
                " until_batch: 3}, {fractions: {copy: 1}}]"
            ),
            r"until_batch has to grow from stage to stage, not \[3, 3\]",
        ),
    ],
)
def test_what_cannot_work_is_named(change: str, says: str):
    with pytest.raises(ConfigError, match=says):
        run_file.with_overrides(RUN, [f"batcher.{change}"])


def test_fractions_are_said_once():
    with pytest.raises(
        ConfigError, match="envs.add.fraction: batcher.curriculum sets the fractions; leave it out"
    ):
        run_file.with_overrides(RUN, ["envs.add.fraction=0.2"])
