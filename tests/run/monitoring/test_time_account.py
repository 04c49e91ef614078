"""Where the time of learner and servers goes, worked by hand."""

from __future__ import annotations

import msgspec
import pytest

from streamrl.run.monitoring.time_account import (
    KEPT,
    LEARNER_CAUSES,
    MAX_REPORTS,
    TimeAccount,
    shares,
)
from streamrl.stream.records import Metric


def metric(source: str, time_s: float, step: int | None = None, **values: float) -> Metric:
    return Metric(source=source, time_s=time_s, step=step, values=values)


def learner(step: int, time_s: float, idle_s: float, step_s: float = 0.5) -> Metric:
    values = {"learner/idle_s": idle_s, "learner/step_s": step_s, "learner/publish_s": 0.2}
    return metric("learner-lead", time_s, step, **values)


def batch(number: int, built_s: float, data_s: float = 0.0, **shares_s: float) -> Metric:
    values = {f"batcher/waited_for_share_s/{env}": spent for env, spent in shares_s.items()}
    return metric("batcher", built_s, number, **{"batcher/waited_for_data_s": data_s, **values})


def swap(server: str, version: int, time_s: float, heard_s: float, swap_s: float) -> Metric:
    values = {"inference/heard_s": heard_s, "inference/pull_s": 0.0, "inference/swap_s": swap_s}
    return metric(server, time_s, version, **values)


def report(server: str, time_s: float, asked: float, paused: float, idle: float) -> Metric:
    values = {"inference/asked_s": asked, "inference/paused_s": paused, "inference/idle_s": idle}
    return metric(server, time_s, **values)


def test_the_causes_of_a_step_add_up_to_the_time_since_the_step_before():
    """The learner waits from 10 to 11. Version 1 is announced at 10.05, a swap ends at 10.2, the
    batch has all shares but one from 10.6, and is built at 10.9.
    """
    account = TimeAccount("learner-lead")
    account.add_metric(learner(0, 10.0, 3.0))
    account.add_version(1, 10.05)
    account.add_metric(swap("a", 1, 10.2, heard_s=0.05, swap_s=0.1))
    account.add_metric(batch(1, 10.9, data_s=0.4, add=0.3))
    account.add_metric(metric("learner-other", 11.5, 1, **{"learner/step_s": 9.0}))
    account.add_metric(learner(1, 12.0, 1.0))
    account.finish()
    wanted = {
        "version": 0.05,
        "weights": 0.1,
        "data": 0.4,
        "share": 0.3,
        "log": 0.15,
        "training": 0.5,
        "publishing": 0.2,
        "other": 0.3,
    }
    assert account.learner_s == pytest.approx(wanted)
    assert sum(account.learner_s.values()) == pytest.approx(2.0)


def test_a_step_is_counted_once_what_explains_it_has_had_time_to_come():
    account = TimeAccount("learner-lead")
    for number in range(3):
        account.add_metric(learner(number, 10.0 + number, 0.3))
    assert sum(account.learner_s.values()) == 0  # the newest is 2 s old at most
    account.add_metric(metric("buffer", 13.0))
    assert sum(account.learner_s.values()) == pytest.approx(1.0)


def test_a_step_whose_predecessor_is_not_known_is_not_counted():
    account = TimeAccount("learner-lead")
    account.add_metric(learner(0, 10.0, 0.3))
    account.add_metric(learner(2, 90.0, 0.3))
    account.finish()
    assert account.learner_s == dict.fromkeys(LEARNER_CAUSES, 0.0)


def test_of_two_servers_the_time_in_which_both_were_paused_keeps_the_learner_waiting():
    account = TimeAccount("learner-lead")
    account.add_metric(learner(0, 10.0, 0.0))
    account.add_version(1, 10.0)
    account.add_metric(swap("a", 1, 10.5, heard_s=0.0, swap_s=0.4))
    account.add_metric(swap("b", 1, 10.7, heard_s=0.3, swap_s=0.4))
    account.add_metric(learner(1, 12.0, 1.0))
    account.finish()
    assert account.learner_s["weights"] == pytest.approx(0.1)
    assert account.learner_s["log"] == pytest.approx(0.9)


def test_an_adapter_that_is_loaded_pauses_no_server():
    account = TimeAccount("learner-lead")
    account.add_metric(learner(0, 10.0, 0.0))
    account.add_version(1, 10.0)
    loaded = swap("a", 1, 10.5, heard_s=0.0, swap_s=0.4)
    account.add_metric(
        msgspec.structs.replace(loaded, values={**loaded.values, "inference/pause_s": 0.0})
    )
    account.add_metric(learner(1, 12.0, 1.0))
    account.finish()
    assert account.learner_s["weights"] == 0.0
    assert account.learner_s["log"] == pytest.approx(1.0)


def test_the_causes_of_a_server_add_up_to_the_time_between_its_reports():
    """It is idle for 0.4 s of each second, and a batch waited for one env from 10.7 to 11.2."""
    account = TimeAccount("learner-lead")
    for second in range(3):
        account.add_metric(report("a", 10.0 + second, 0.5 * second, 0.1 * second, 0.4 * second))
    account.add_metric(batch(4, 11.2, add=0.5))
    account.add_metric(batch(5, 12.5))
    account.add_metric(metric("buffer", 14.0))
    assert account.servers_s["a"] == pytest.approx(
        {"sampling": 1.0, "weights": 0.2, "share": 0.3 + 0.2, "demand": 0.1 + 0.2}
    )


def test_a_server_that_was_started_again_counts_from_its_new_beginning():
    account = TimeAccount("learner-lead")
    account.add_metric(report("a", 10.0, 5.0, 1.0, 4.0))
    account.add_metric(report("a", 60.0, 0.2, 0.0, 0.3))
    account.add_metric(report("a", 61.0, 0.9, 0.0, 0.6))
    account.finish()
    assert sum(account.servers_s["a"].values()) == pytest.approx(1.0)


def test_the_account_does_not_grow_while_no_batch_is_built():
    account = TimeAccount("learner-lead")
    for second in range(3 * MAX_REPORTS):
        account.add_version(second, 10.0 + second)
        account.add_metric(report("a", 10.0 + second, second, 0.0, 0.0))
    assert len(account._reports["a"]) <= MAX_REPORTS + 1
    assert len(account._announced) == KEPT


def test_shares_of_nothing_are_zero():
    assert shares({"a": 0.0}) == {"a": 0.0}
    assert shares({"a": 1.0, "b": 3.0}) == {"a": 0.25, "b": 0.75}
