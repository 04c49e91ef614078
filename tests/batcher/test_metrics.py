"""The metrics of a batch, worked by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from streamrl.batcher.balance import loads
from streamrl.batcher.process import step
from streamrl.batcher.state import BatcherState, EnvQueue
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import Batch, Metric
from tests.support.batcher import CONFIG, arrivals, forked, step_once
from tests.support.build import group, group_event, version_event


def test_a_batch_tells_how_long_it_waited_for_all_and_how_long_for_one_share():
    config = replace(CONFIG, fractions={"copy": 0.5, "add": 0.5}, total_token_budget=40)
    added = [group_event(i, group("add", f"d{i}")) for i in range(2)]
    came = {
        100: [version_event(0)],  # a batch is due: from now on it waits
        103: arrivals("a"),
        104: arrivals("b"),  # copy's 20 are there
        110: added,
    }
    state = BatcherState()
    out = list[Output]()
    for second in range(100, 111):
        state, out = step(config, state, came.get(second, []), float(second))
    (values,) = [o.record.values for o in out if isinstance(o.record, Metric)]
    assert (
        values["batcher/waited_for_data_s"] == 4.0
        and values["batcher/waited_for_share_s/add"] == 6.0
    )


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


def test_rollouts_of_version_0_in_batch_1_have_age_1():
    state, _ = step(CONFIG, BatcherState(), [version_event(0), *arrivals("a", "b")], 0.0)
    _, out = step(CONFIG, state, [version_event(1), *arrivals("c", "d")], 1.0)
    (values,) = [o.record.values for o in out if isinstance(o.record, Metric)]
    ages = ("batches/copy/age/mean", "batcher/batch_age_mean", "batcher/batch_age_max")
    assert [values[name] for name in ages] == [1, 1, 1]


def test_an_env_that_holds_nothing_has_shares_of_nothing():
    config = replace(CONFIG, fractions={"copy": 0.5, "add": 0.5}, spill=True)
    state = BatcherState(queues={"add": EnvQueue()})
    _, out = step(config, state, [version_event(0), *arrivals("a", "b")], 0.0)
    (values,) = [o.record.values for o in out if isinstance(o.record, Metric)]
    names = ("frac_on_policy", "frac_used_in_batch", "rollouts_in_buffer", "tokens_in_buffer")
    assert [values[f"replays/add/{name}"] for name in names] == [0, 0, 0, 0]


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
    out = step_once(
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


def test_the_metrics_say_how_it_is_divided():
    # group a: 7 and 4 tokens, group b: 5 and 4, rows of 10. One process has 7 and 4, the other 5
    # and 4; in FLOPs with d = 1: 91 + 40 and 55 + 40
    events = [
        version_event(0),
        group_event(0, group(name="a", sizes=(5, 2))),
        group_event(1, group(name="b", sizes=(3, 2))),
    ]
    for balance, expected in (("tokens", 1 - 10 / 11), ("flops", 1 - 113 / 131)):
        config = replace(CONFIG, row_count=4, processes=2, balance=balance, hidden=1)
        outputs = step(config, BatcherState(), events, 0.0)[1]
        (batch,) = (o.record for o in outputs if isinstance(o.record, Batch))
        (values,) = (o.record.values for o in outputs if isinstance(o.record, Metric))
        assert sorted(loads(batch, batch.lengths + 2).tolist()) == [9, 11]
        assert values["batcher/imbalance_frac"] == pytest.approx(expected) and values[
            "batcher/token_imbalance_frac"
        ] == pytest.approx(1 - 10 / 11)
        assert values["batcher/padding_frac"] == 0.5 and values["batcher/process_rollouts_min"] == 2
