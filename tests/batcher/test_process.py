"""The batcher's step worked by hand: groups of two rollouts, 2 + 3 tokens each, so 10 tokens a
group; budgets of a few groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
from msgspec import structs

from streamrl.batcher.batch_builder import BatchBuilder
from streamrl.batcher.process import paused, report, step
from streamrl.batcher.state import BatcherConfig, BatcherState, EnvQueue
from streamrl.log.protocol import Event, Output
from streamrl.records import Batch, Demand, Fate, Metric, ScoredGroup
from tests.support.build import group, group_event, version_event

CONFIG = BatcherConfig(
    fractions={"copy": 1.0},
    learner="lead",
    total_token_budget=20,
    max_seq_len=10,
    row_count=3,
    max_age=1,
    lookahead=0,
    spill=False,
    max_window_tokens=1000,
    shortage_after_s=2.0,
)


def fold(events: Sequence[Event], config: BatcherConfig = CONFIG) -> list[Output]:
    return step(config, BatcherState(), events, 0.0)[1]


def batches(outputs: Sequence[Output]) -> list[list[str]]:
    return [o.record.group_ids for o in outputs if isinstance(o.record, Batch)]


def fates(outputs: Sequence[Output]) -> list[tuple[str, str, int | None]]:
    return [(o.record.fate, o.key, o.record.batch) for o in outputs if isinstance(o.record, Fate)]


def arrivals(*names: str, version: int = 0, env: str = "copy") -> list[Event]:
    return [group_event(i, group(env, name, version=version)) for i, name in enumerate(names)]


def test_a_batch_is_built_when_the_budget_is_full():
    out = fold([version_event(0), *arrivals("a", "b", "c")])
    assert batches(out) == [["b", "a"]]  # newest first
    assert fates(out) == [("batched", "b", 0), ("batched", "a", 0)]


def test_lookahead_0_waits_for_its_version():
    events = [version_event(0), *arrivals("a", "b", "c", "d")]
    assert len(batches(fold(events))) == 1
    assert batches(fold([*events, version_event(1)])) == [["b", "a"], ["d", "c"]]


def test_max_age_1_lookahead_1_batches_0_and_1_may_use_version_0_batch_2_may_not():
    config = replace(CONFIG, lookahead=1)
    out = fold(
        [version_event(0), *arrivals("a", "b", "c", "d", "e", "f"), version_event(1)], config
    )
    assert batches(out) == [["b", "a"], ["d", "c"]]
    assert [fate for fate in fates(out) if fate[0] == "expired"] == [
        ("expired", "e", None),
        ("expired", "f", None),
    ]


def test_a_group_is_as_old_as_its_oldest_rollout():
    mixed = group(name="m", version=2)
    mixed.oldest_versions.setflags(write=True)
    mixed.oldest_versions[1] = 0
    state = BatcherState(version=2, next_batch=2)
    _, out = step(CONFIG, state, [group_event(0, mixed)], 0.0)
    assert fates(out) == [("expired", "m", None)]


def test_a_group_from_a_version_not_heard_of_is_held():
    out = fold([version_event(0), *arrivals("a", version=3), *arrivals("b", "c")])
    assert batches(out) == [["c", "b"]]


def test_a_rollout_longer_than_a_row_is_filtered_and_its_group_goes_on():
    out = fold([version_event(0), group_event(0, group(name="long", sizes=(9, 3))), *arrivals("b")])
    assert fates(out)[0] == ("filtered", "long", None)
    state, _ = step(
        CONFIG,
        BatcherState(),
        [version_event(0), group_event(0, group(name="long", sizes=(9, 3)))],
        0.0,
    )
    assert state.queues["copy"].tokens == 5 and state.queues["copy"].rollouts == 1


def test_a_group_larger_than_the_budget_is_filtered_not_waited_for():
    out = fold([version_event(0), group_event(0, group(name="huge", sizes=(8, 8, 8)))])
    assert fates(out) == [("filtered", "huge", None)]


def test_a_shortage_is_said_at_once_and_warned_of_after_a_while():
    config = replace(CONFIG, fractions={"copy": 0.5, "add": 0.5}, total_token_budget=40)
    state, out = step(config, BatcherState(), [version_event(0), *arrivals("a", "b", "c")], 100.0)
    assert batches(out) == []
    demands = {o.record.environment: o.record for o in out if isinstance(o.record, Demand)}
    assert demands["add"].missing_tokens == 20
    assert report(config, state, 101.0).warnings == ()
    assert report(config, state, 103.0).warnings == (
        "batch 0 has waited 3 s for add, 20 tokens short",
    )
    assert report(config, state, 103.0).values["batcher/missing_tokens/add"] == 20


def test_a_batch_tells_how_long_it_waited_for_all_and_how_long_for_one_share():
    config = replace(CONFIG, fractions={"copy": 0.5, "add": 0.5}, total_token_budget=40)
    state, _ = step(config, BatcherState(), [version_event(0)], 100.0)  # due: from now on it waits
    state, _ = step(config, state, arrivals("a"), 103.0)
    state, _ = step(config, state, arrivals("b"), 104.0)  # copy's 20 are there
    added = [group_event(i, group("add", f"d{i}")) for i in range(2)]
    _, out = step(config, state, added, 110.0)
    (values,) = [o.record.values for o in out if isinstance(o.record, Metric)]
    assert (
        values["batcher/waited_for_data_s"] == 4.0
        and values["batcher/waited_for_share_s/add"] == 6.0
    )


def test_spill_goes_on_without_the_env_that_is_short():
    config = replace(
        CONFIG, fractions={"copy": 0.5, "add": 0.5}, total_token_budget=40, spill=True, row_count=5
    )
    assert batches(fold([version_event(0), *arrivals("a", "b", "c", "d")], config)) == [
        ["d", "c", "b", "a"]
    ]


def test_demand_covers_the_batches_that_new_rollouts_could_serve():
    # version 0, lookahead 0, max age 1: batches 0 and 1, 20 tokens each; one group of 10 is held
    out = fold([version_event(0), *arrivals("a")])
    demand = [o.record for o in out if isinstance(o.record, Demand)][-1]
    assert (demand.wanted_tokens, demand.held_tokens, demand.closed_groups) == (
        30,
        10,
        {"copy-0": 1},
    )


def test_after_its_batch_is_built_only_the_next_one_is_wanted():
    out = fold([version_event(0), *arrivals("a", "b")])
    assert [o.record for o in out if isinstance(o.record, Demand)][-1].wanted_tokens == 20


class Asked(dict[str, float]):
    """Counts how often all of it is gone through."""

    times = 0

    def items(self):  # pyright: ignore[reportIncompatibleMethodOverride]
        self.times += 1
        return super().items()


def test_the_shares_are_gone_through_as_often_for_many_envs_as_for_few():
    asked: list[int] = []
    for envs in (2, 50):
        fractions = Asked({f"env-{i}": 1 / envs for i in range(envs)})
        out = fold(
            [version_event(0), *arrivals("a", "b", env="env-0")],
            replace(CONFIG, fractions=fractions, lookahead=8, total_token_budget=1000),
        )
        assert sum(isinstance(o.record, Demand) for o in out) == envs
        asked.append(fractions.times)
    assert asked[0] == asked[1]


def test_of_a_batch_that_is_far_from_full_some_share_is_short():
    """Or else it would never be built: a step leaves out asking each share then."""
    random = Random(3)
    far = 0
    for _ in range(500):
        envs = [f"env-{i}" for i in range(random.randint(1, 6))]
        owed = [random.uniform(-20, 20) for _ in envs]
        balance = {
            env: tokens - sum(owed) / len(envs) for env, tokens in zip(envs, owed, strict=True)
        }
        fractions = {env: random.choice([0.5, 1.0]) / len(envs) for env in envs}
        config = replace(
            CONFIG, fractions=fractions, total_token_budget=40, spill=random.random() < 0.5
        )
        pools = {env: EnvQueue(tokens=random.randint(0, 60 // len(envs))) for env in envs}
        at_work = BatchBuilder(config, BatcherState(version=0, queues=pools, deficit=balance), 0.0)
        far += at_work.ledger.is_clearly_short
        assert at_work.ledger.shortage() or not at_work.ledger.is_clearly_short
    assert 100 < far < 450  # of both there are enough


def test_how_a_poll_was_cut_does_not_matter():
    """Within a step, batches that would lack a share again are not tried; the first group of a step
    always has its try.
    """
    random = Random(5)
    built = 0
    for _ in range(60):
        envs = [f"env-{i}" for i in range(random.randint(2, 8))]
        leave = random.choice([0.0, 0.2])
        config = replace(
            CONFIG,
            fractions=dict.fromkeys(envs, (1 - leave) / len(envs)),
            total_token_budget=60,
            row_count=20,
            max_age=4,
            lookahead=2,
        )
        config = replace(config, spill=random.random() < 0.2)
        events = [version_event(0)]
        for number in range(120):
            if random.random() < 0.1:
                events.append(
                    version_event(sum(event.topic == "policy-versions" for event in events))
                )
            version = max(
                sum(event.topic == "policy-versions" for event in events) - random.randint(1, 3), 0
            )
            sizes = [random.randint(1, 8) for _ in range(random.randint(1, 3))]
            events.append(
                group_event(
                    number, group(random.choice(envs), f"g{number}", sizes, version=version)
                )
            )
        whole, outputs = step(
            config, step(config, BatcherState(), events[:1], 0.0)[0], events[1:], 0.0
        )
        state = BatcherState()
        one_by_one = list[Output]()
        for event in events:
            state, some = step(config, state, [event], 0.0)
            one_by_one += some
        assert batches(outputs) == batches(one_by_one) and fates(outputs) == fates(one_by_one)
        assert whole.short == state.short and whole.deficit == state.deficit
        built += len(batches(outputs))
    assert built > 200


def test_demand_is_said_again_only_when_it_changes():
    state, _ = step(CONFIG, BatcherState(), [version_event(0)], 0.0)
    assert step(CONFIG, state, [version_event(0, learner="other")], 1.0)[1] == []


def test_what_is_missing_of_the_rest_is_asked_of_everybody():
    # no fractions: each env is asked for half of two batches of 40; the first one lacks 30 of the
    # rest, and anybody may supply it
    config = replace(CONFIG, fractions={"copy": 0.0, "add": 0.0}, total_token_budget=40)
    out = fold([version_event(0), *arrivals("a")], config)
    assert {
        o.record.environment: o.record.wanted_tokens for o in out if isinstance(o.record, Demand)
    } == {"copy": 40 + 30 - 10, "add": 40 + 30}


def test_an_empty_group_counts_as_closed():
    empty = group(name="gone", sizes=())
    out = fold([version_event(0), group_event(0, empty)])
    assert [o.record.closed_groups for o in out if isinstance(o.record, Demand)] == [{"copy-0": 1}]


def test_a_full_pool_is_not_read_on():
    config = replace(CONFIG, max_window_tokens=10)
    state, _ = step(config, BatcherState(), arrivals("a"), 0.0)
    assert paused(config, state) == {"groups.copy"}


def test_a_batch_leaves_in_the_step_that_fills_it():
    """What `dispatched as soon as it is full` means in a log: in the transaction of the record that
    filled it, be that a group or a version; not the next one's, not after a time. Two processes'
    shares leave together, as one record.
    """
    config = replace(CONFIG, row_count=4, processes=2)
    state = BatcherState()
    events = [
        version_event(0),
        *arrivals("a", "b", "c", "d"),
        version_event(1),
        *arrivals("e", "f", version=1),
        version_event(2),
    ]
    came = list[list[str]]()
    for event in events:
        state, outputs = step(config, state, [event], 0.0)
        came.append(
            [
                f"{name} into {fate}"
                for fate, name in (
                    (o.record.batch, o.key) for o in outputs if isinstance(o.record, Fate)
                )
            ]
        )
        assert len(batches(outputs)) == bool(came[-1])
        assert all(
            o.record.processes == 2 and set((o.record.rows // 2).tolist()) == {0, 1}
            for o in outputs
            if isinstance(o.record, Batch)
        )
    filled = {
        events[2]: ["b into 0", "a into 0"],
        events[5]: ["d into 1", "c into 1"],
        events[8]: ["f into 2", "e into 2"],
    }
    assert came == [filled.get(event, []) for event in events]
    # nor does it matter how they were polled
    assert batches(fold(events, config)) == [["b", "a"], ["d", "c"], ["f", "e"]]


def test_the_metrics_of_a_batch():
    # three groups held (6 rollouts, 30 tokens), all of the newest version; two go into the batch of
    # 20 tokens, 3 rows of 10
    state, _ = step(CONFIG, BatcherState(), arrivals("a", "b", "c"), 0.0)
    out = step(CONFIG, state, [version_event(0)], 5.0)[1]
    (metric,) = [o.record for o in out if isinstance(o.record, Metric)]
    assert (metric.step, metric.time_s) == (0, 5.0)
    assert metric.values == {
        "batcher/tokens_total": 20,
        "batcher/rows_filled_frac": 20 / 30,
        "batcher/padding_frac": 1 - 20 / 30,
        "batcher/imbalance_frac": 0,
        "batcher/token_imbalance_frac": 0,
        "batcher/process_rollouts_min": 4,
        "batcher/batch_age_mean": 0,
        "batcher/batch_age_max": 0,
        "batcher/mixed_versions_frac": 0,
        "batcher/waited_for_data_s": 0,
        "replays/copy/rollouts_in_buffer": 6,
        "replays/copy/tokens_in_buffer": 30,
        "replays/copy/frac_on_policy": 1,
        "replays/copy/frac_used_in_batch": 4 / 6,
        "batches/copy/rollouts_used": 4,
        "batches/copy/tokens_used": 20,
        "batches/copy/frac_used": 1,
        "batches/copy/reward/mean": 0,
        "batches/copy/mixed_versions_frac": 0,
        "batches/copy/age/mean": 0,
    }


def test_the_share_of_rollouts_that_more_than_one_version_sampled():
    """Of copy one group of two out of two, and of a rollout that forked, which counts once; of add
    none.
    """
    config = replace(
        CONFIG,
        fractions={"copy": 0.75, "add": 0.25},
        total_token_budget=39,
        row_count=9,
        spill=True,
    )
    halved = structs.replace(
        forked("b", (1, 1, 1), (0, 0, 1)), newest_versions=np.array([1, 1, 0], np.int32)
    )
    came = [group("copy", "a", newest=1), halved, group("copy", "c"), group("add", "d")]
    out = fold(
        [version_event(0), version_event(1), *(group_event(i, g) for i, g in enumerate(came))],
        config,
    )
    (batch,) = [o.record for o in out if isinstance(o.record, Batch)]
    (values,) = [o.record.values for o in out if isinstance(o.record, Metric)]
    assert sorted(batch.group_ids) == ["a", "b", "c", "d"]
    assert (
        values["batches/copy/mixed_versions_frac"] == 3 / 6
        and values["batches/add/mixed_versions_frac"] == 0
    )
    assert values["batcher/mixed_versions_frac"] == 3 / 8


def forked(name: str, sizes: Sequence[int], of: Sequence[int]) -> ScoredGroup:
    """A group whose sequence i belongs to rollout `of[i]`."""
    whose = {
        "uids": [f"{name}-{i}" for i in of],
        "offsets": np.array(of, np.int64),
        "rewards": np.array(of, np.float32),
    }
    return structs.replace(group("copy", name, sizes=sizes), **whose)


def test_a_rollout_that_forked_counts_once_and_has_one_fate():
    out = fold(
        [
            version_event(0),
            group_event(0, forked("a", (3, 2, 3), (0, 0, 1))),
            group_event(1, group("copy", "b", sizes=(4,))),
        ]
    )
    (batch,) = (o.record for o in out if isinstance(o.record, Batch))
    assert batch.uids == ["b-0", "a-0", "a-0", "a-1"] and batch.rows.tolist() == [0, 1, 0, 1]
    assert [o.record.uids for o in out if isinstance(o.record, Fate)] == [["b-0"], ["a-0", "a-1"]]
    values = next(o.record.values for o in out if isinstance(o.record, Metric))
    assert (
        values["batches/copy/rollouts_used"],
        values["batches/copy/reward/mean"],
        values["batches/copy/tokens_used"],
    ) == (3, 1 / 3, 20)


def test_a_rollout_of_which_a_sequence_is_too_long_is_filtered_as_a_whole():
    out = fold([version_event(0), group_event(0, forked("a", (3, 9, 2, 3), (0, 0, 1, 2)))])
    assert [(o.record.fate, o.record.uids) for o in out if isinstance(o.record, Fate)] == [
        ("filtered", ["a-0"])
    ]


RULES = replace(CONFIG, rules_version=1)


def test_a_group_that_fits_the_budget_and_not_the_rows_is_filtered_when_it_comes():
    """Four sequences of 6 tokens are 24, and no two of them fit into one of three rows of 10; three
    of them do.
    """
    config = replace(RULES, total_token_budget=24)
    out = fold(
        [
            version_event(0),
            group_event(0, group(name="wide", sizes=(4, 4, 4, 4))),
            group_event(1, group(name="fits", sizes=(4, 4, 4))),
        ],
        config,
    )
    (fate,) = [o.record for o in out if isinstance(o.record, Fate)]
    assert (fate.fate, fate.uids[0], fate.cause) == (
        "filtered",
        "wide-0",
        "group does not fit into the 3 rows of 10 tokens of a batch; raise batcher.row_count",
    )


def test_a_group_that_the_rows_cannot_hold_any_more_does_not_end_the_batcher():
    """It was held when there were more rows; or by the rules of version 0, which look at it only
    now.
    """
    config = replace(CONFIG, total_token_budget=24)
    out = fold(
        [
            version_event(0),
            group_event(0, group(name="wide", sizes=(4, 4, 4, 4))),
            *arrivals("a", "b", "c"),
        ],
        config,
    )
    assert fates(out)[0][:2] == ("filtered", "wide") and batches(out) == [["c", "b"]]


def stage_that_raises(values: np.ndarray, over: np.ndarray) -> np.ndarray:
    if 0.25 in over:
        raise ArithmeticError(f"on {object()}")
    return values


def test_a_stage_that_cannot_do_a_batch_ends_its_groups_and_not_the_batcher():
    odd = [
        structs.replace(group(name=name), advantages=np.array([0.25, -0.25], np.float32))
        for name in "ab"
    ]
    config = replace(RULES, advantage=f"{__name__}:stage_that_raises")
    out = fold(
        [version_event(0), *(group_event(i, g) for i, g in enumerate(odd)), *arrivals("c", "d")],
        config,
    )
    assert [(fate, name) for fate, name, _ in fates(out)] == [
        ("filtered", "b"),
        ("filtered", "a"),
        ("batched", "d"),
        ("batched", "c"),
    ]
    causes = {o.record.cause for o in out if isinstance(o.record, Fate)}
    assert causes == {
        "",
        "batcher.advantage: ArithmeticError: on <object object at 0x...>",
    } and batches(out) == [["d", "c"]]


def test_an_env_that_the_next_batch_lacks_is_read_on_although_its_window_is_full():
    """A budget of 40 and a window of 20: two groups of 10 fill the window, and the batch waits for
    two more.
    """
    config = replace(CONFIG, total_token_budget=40, max_window_tokens=20, row_count=5)
    for fractions in ({"copy": 1.0}, {"copy": 0.0}):
        config = replace(config, fractions=fractions)
        state, out = step(config, BatcherState(), [version_event(0), *arrivals("a", "b")], 0.0)
        assert (
            batches(out) == []
            and state.queues["copy"].tokens == 20
            and paused(config, state) == frozenset()
        )
        state, out = step(config, state, arrivals("c", "d"), 0.0)
        assert len(batches(out)) == 1
        state, _ = step(config, state, arrivals("e", "f"), 0.0)
        assert paused(config, state) == {"groups.copy"}  # batch 1 is not due


def test_what_a_group_costs_is_what_the_last_few_hundred_have_cost():
    pool = EnvQueue(measured=100_000, measured_tokens=100_000 * 8)
    for _ in range(3 * 256):
        pool.measure(40, forget=True)
    assert pool.measured == 256 and 37 < pool.group_tokens <= 40


def test_an_env_may_have_an_age_limit_of_its_own():
    """Version 1: of version 0, `copy` may be trained on, `add` not; and of `add` work is wanted for
    one batch, of `copy` for two.
    """
    config = replace(RULES, fractions={"copy": 0.5, "add": 0.5}, max_ages={"add": 0})
    old = [
        group_event(i, group(env, f"{env}-0", version=0)) for i, env in enumerate(("copy", "add"))
    ]
    out = step(config, BatcherState(version=1, next_batch=1), old, 0.0)[1]
    assert fates(out) == [("expired", "add-0", None)]
    wanted = {
        o.record.environment: o.record.wanted_tokens for o in out if isinstance(o.record, Demand)
    }
    assert wanted == {"copy": 2 * 10 - 10, "add": 10}
