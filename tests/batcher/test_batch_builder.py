"""One step of the batcher: which groups a batch is made of, which ones are filtered or expire, and
what is said of each.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from msgspec import structs

from streamrl.batcher.batch_builder import BatchBuilder
from streamrl.batcher.process import reconcile, step
from streamrl.batcher.selection import REMAINDER
from streamrl.batcher.state import BatcherState, EnvQueue
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import Batch, Demand, Fate, Metric
from tests.support.batcher import CONFIG, arrivals, batches, fates, forked, step_once
from tests.support.build import group, group_event, version_event


def test_max_age_1_lookahead_1_batches_0_and_1_may_use_version_0_batch_2_may_not():
    config = replace(CONFIG, lookahead=1)
    out = step_once(
        [version_event(0), *arrivals("a", "b", "c", "d", "e", "f"), version_event(1)], config
    )
    assert batches(out) == [["a", "b"], ["c", "d"]]
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
    out = step_once([version_event(0), *arrivals("a", version=3), *arrivals("b", "c")])
    assert batches(out) == [["b", "c"]]


def test_a_group_larger_than_the_budget_is_filtered_not_waited_for():
    out = step_once([version_event(0), group_event(0, group(name="huge", sizes=(8, 8, 8)))])
    assert fates(out) == [("filtered", "huge", None)]


def test_spill_goes_on_without_the_env_that_is_short():
    config = replace(
        CONFIG, fractions={"copy": 0.5, "add": 0.5}, total_token_budget=40, spill=True, row_count=5
    )
    assert batches(step_once([version_event(0), *arrivals("a", "b", "c", "d")], config)) == [
        ["a", "b", "c", "d"]
    ]


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
        far += at_work.totals.is_clearly_short
        assert at_work.totals.shortage() or not at_work.totals.is_clearly_short
    assert 100 < far < 450  # of both there are enough


def test_a_rollout_that_forked_counts_once_and_has_one_fate():
    out = step_once(
        [
            version_event(0),
            group_event(0, forked("a", (3, 2, 3), (0, 0, 1))),
            group_event(1, group("copy", "b", sizes=(4,))),
        ]
    )
    (batch,) = (o.record for o in out if isinstance(o.record, Batch))
    assert batch.uids == ["a-0", "a-0", "a-1", "b-0"] and batch.rows.tolist() == [1, 0, 1, 0]
    assert [o.record.uids for o in out if isinstance(o.record, Fate)] == [["a-0", "a-1"], ["b-0"]]
    values = next(o.record.values for o in out if isinstance(o.record, Metric))
    assert (
        values["batches/copy/rollouts_used"],
        values["batches/copy/reward/mean"],
        values["batches/copy/tokens_used"],
    ) == (3, 1 / 3, 20)


def test_a_group_that_fits_the_budget_and_not_the_rows_is_filtered_when_it_comes():
    """Four sequences of 6 tokens are 24, and no two of them fit into one of three rows of 10; three
    of them do.
    """
    config = replace(CONFIG, total_token_budget=24)
    out = step_once(
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


def test_a_group_of_more_sequences_than_rows_is_used_if_they_share_rows():
    """Four sequences of 5 tokens need two of the three rows of 10."""
    out = step_once([version_event(0), group_event(0, group(name="four", sizes=(3, 3, 3, 3)))])
    assert batches(out) == [["four"]]


def test_a_batch_no_longer_lacks_tokens_of_an_env_that_was_taken_out():
    state = BatcherState(short={"copy": 5, "gone": 7, REMAINDER: 3})
    BatchBuilder(CONFIG, state, 0.0).reconcile({})
    assert state.short == {"copy": 5, REMAINDER: 3}


def test_a_group_that_the_rows_cannot_hold_any_more_does_not_end_the_batcher():
    """It was held when there were more rows."""
    config = replace(CONFIG, total_token_budget=24)
    wide = group_event(0, group(name="wide", sizes=(4, 4, 4, 4)))
    state, _ = step(replace(config, row_count=4), BatcherState(), [wide], 0.0)
    _, out = step(config, state, [version_event(0), *arrivals("a", "b", "c")], 0.0)
    assert fates(out)[0][:2] == ("filtered", "wide") and batches(out) == [["a", "b"]]


@pytest.mark.parametrize(
    ("sizes", "shape"), [((3, 3), (6, 5)), ((4, 2), (5, 6)), ((5, 1), (3, 10))]
)
def test_a_batch_has_the_shortest_rows_that_hold_it(
    sizes: tuple[int, int], shape: tuple[int, int]
) -> None:
    config = replace(CONFIG, row_lengths=[6, 5])
    out = step_once(
        [
            version_event(0),
            group_event(0, group(name="a", sizes=sizes)),
            group_event(1, group(name="b", sizes=sizes)),
        ],
        config,
    )
    (batch,) = [o.record for o in out if isinstance(o.record, Batch)]
    assert (batch.row_count, batch.max_seq_len) == shape
    assert len(batch.group_ids) == 2
    metrics = {
        k: v for o in out if isinstance(o.record, Metric) for k, v in o.record.values.items()
    }
    assert metrics["batcher/row_length_tokens"] == shape[1]


def stage_that_raises(values: np.ndarray, over: np.ndarray) -> np.ndarray:
    if 0.25 in over:
        raise ArithmeticError(f"on {object()}")
    return values


def test_a_stage_that_cannot_do_a_batch_ends_its_groups_and_not_the_batcher():
    odd = [
        structs.replace(group(name=name), advantages=np.array([0.25, -0.25], np.float32))
        for name in "ab"
    ]
    config = replace(CONFIG, advantage=f"{__name__}:stage_that_raises")
    out = step_once(
        [version_event(0), *(group_event(i, g) for i, g in enumerate(odd)), *arrivals("c", "d")],
        config,
    )
    assert [(fate, name) for fate, name, _ in fates(out)] == [
        ("filtered", "b"),
        ("filtered", "a"),
        ("batched", "c"),
        ("batched", "d"),
    ]
    causes = {o.record.cause for o in out if isinstance(o.record, Fate)}
    assert causes == {
        "",
        "batcher.advantage: ArithmeticError: on <object object at 0x...>",
    } and batches(out) == [["c", "d"]]


def test_an_env_may_have_an_age_limit_of_its_own():
    """Version 1: of version 0, `copy` may be trained on, `add` not; and of `add` work is wanted for
    one batch, of `copy` for two, less half a group of 10 tokens.
    """
    config = replace(CONFIG, fractions={"copy": 0.5, "add": 0.5}, max_ages={"add": 0})
    old = [
        group_event(i, group(env, f"{env}-0", version=0)) for i, env in enumerate(("copy", "add"))
    ]
    out = step(config, BatcherState(version=1, next_batch=1), old, 0.0)[1]
    assert fates(out) == [("expired", "add-0", None)]
    wanted = {
        o.record.environment: o.record.wanted_tokens for o in out if isinstance(o.record, Demand)
    }
    assert wanted == {"copy": 2 * 10 - 10 - 5, "add": 10}


# ---- after retention -----------------------------------------------------------------------------


def demands(outputs: list[Output]) -> list[Demand]:
    return [output.record for output in outputs if isinstance(output.record, Demand)]


def test_an_epoch_forgets_the_groups_that_were_published_before_it():
    begins = structs.replace(group(name="", sizes=()), producer="", begins_epoch=True)
    old = [group_event(0, group(name="a", sizes=()))]
    state, out = step(CONFIG, BatcherState(), [version_event(0), *old], 0.0)
    assert demands(out)[-1].closed_groups == {"copy-0": 1} and demands(out)[-1].epoch == 0
    later = [
        group_event(1, begins),
        group_event(2, group(name="b", sizes=())),
        group_event(3, structs.replace(group(name="c", sizes=()), epoch=1)),
        group_event(4, structs.replace(group(name="d", sizes=()), epoch=1, producer="")),
    ]
    _, out = step(CONFIG, state, later, 0.0)
    assert demands(out)[-1].closed_groups == {"copy-0": 2} and demands(out)[-1].epoch == 1


def test_held_groups_that_retention_deleted_expire_and_their_env_begins_an_epoch():
    state, _ = step(CONFIG, BatcherState(), [version_event(0), *arrivals("a")], 0.0)
    _, out = reconcile(CONFIG, state, {("groups.copy", 0): 1}, 1.0)
    (fate,) = [output.record for output in out if isinstance(output.record, Fate)]
    assert (fate.fate, fate.partition, fate.offsets.tolist()) == ("expired", 0, [0, 1])
    assert fate.cause == "retention has deleted its group before it was used"
    (demand,) = demands(out)
    assert (demand.epoch, demand.held_tokens) == (1, 0)
