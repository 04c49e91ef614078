"""The batcher's step worked by hand: groups of two rollouts, 2 + 3 tokens each, so 10 tokens a
group; budgets of a few groups.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from streamrl.batcher.process import due, paused, step
from streamrl.batcher.report import report
from streamrl.batcher.state import BatcherState
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import Batch, Demand, Fate
from tests.support.batcher import CONFIG, arrivals, batches, fates, step_once
from tests.support.build import group, group_event, version_event


def test_a_batch_is_built_when_the_budget_is_full():
    out = step_once([version_event(0), *arrivals("a", "b", "c")])
    assert batches(out) == [["a", "b"]]
    assert fates(out) == [("batched", "a", 0), ("batched", "b", 0)]


def test_lookahead_0_waits_for_its_version():
    events = [version_event(0), *arrivals("a", "b", "c", "d")]
    assert len(batches(step_once(events))) == 1
    assert batches(step_once([*events, version_event(1)])) == [["a", "b"], ["c", "d"]]


def test_a_shortage_is_said_at_once_and_warned_of_after_a_while():
    config = replace(CONFIG, fractions={"copy": 0.5, "add": 0.5}, total_token_budget=40)
    state, out = step(config, BatcherState(), [version_event(0), *arrivals("a", "b", "c")], 100.0)
    assert batches(out) == []
    demands = {o.record.environment: o.record for o in out if isinstance(o.record, Demand)}
    assert [demands[env].missing_tokens for env in ("copy", "add")] == [0, 20]
    assert report(config, state, 100.0).warnings == ()
    for time_s in (101.0, 102.0, 103.0):
        assert due(config, state, time_s)
        state, _ = step(config, state, [], time_s)
    assert not due(config, state, 103.9)
    assert report(config, state, 103.9).warnings == (
        "batch 0 has waited 3 s for add, 20 tokens short",
    )
    assert report(config, state, 103.9).values["batcher/missing_tokens/add"] == 20


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
        events[2]: ["a into 0", "b into 0"],
        events[5]: ["c into 1", "d into 1"],
        events[8]: ["e into 2", "f into 2"],
    }
    assert came == [filled.get(event, []) for event in events]
    # nor does it matter how they were polled
    assert batches(step_once(events, config)) == [["a", "b"], ["c", "d"], ["e", "f"]]


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
