from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pytest

from streamrl.extensions.dashboard import panels, rollout_views, views
from streamrl.extensions.dashboard.index import IN_FLIGHT, Query, RolloutLocation
from streamrl.extensions.dashboard.reading import LiveState, batch_at, follow, log_of, rollout_at
from streamrl.extensions.dashboard.state import new
from streamrl.extensions.recordings.archive import export
from streamrl.extensions.recordings.audit import audit
from streamrl.run.orchestrator.run_directory import lock_run_dir
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Log, Message, Output, end_offset
from streamrl.stream.records import Rollout
from streamrl.system.errors import BrokerUnreachable, TopicMissing
from tests.support.build import rollout
from tests.support.data_path import RUN, TOPICS, play, publish
from tests.support.life import run_until
from tests.support.waiting import patience


@pytest.fixture(scope="module")
def recording() -> MemoryLog:
    log = MemoryLog(TOPICS)
    play(log)
    log.producer().send(Message("rollouts.copy", b"g", b"\xc1", (("schema", b"rollout/1"),)))
    return log


def read_through(log: Log, until: int) -> LiveState:
    live = LiveState(new(RUN))
    run_until(
        lambda stop: follow(live, log, stop),
        lambda: live.caught_up.is_set() and len(live.state.index.uids) >= until,
    )
    return live


def test_fates_are_counted_as_the_audit_counts_them(recording: MemoryLog):
    live = read_through(recording, 81)
    result = audit(recording, RUN)
    for env in views.fates(live.state):
        counted: Counter[str] = Counter()
        for (name, _), counts in result.counts.items():
            counted.update(counts if name == env["env"] else {})
        assert {kind: n for kind, n in env["counts"].items() if n} == {
            kind: n for kind, n in counted.items() if n
        }
    assert {number: made.total() for number, made in live.state.made_of.items()} == result.batches
    assert (
        Counter(
            age
            for made in live.state.made_of.values()
            for (_, age), n in made.items()
            for _ in range(n)
        )
        == result.ages
    )


def test_what_comes_later_is_followed(recording: MemoryLog):
    live = LiveState(new(RUN))

    def come(stop: threading.Event) -> None:
        live.caught_up.wait(patience(20))
        publish(log, *[_output(i) for i in range(3)])
        assert stop.wait(patience(60))

    log = MemoryLog(TOPICS)
    play(log, 1)
    before = end_offset(log, "rollouts.copy", 0) + end_offset(log, "rollouts.add", 0)
    thread = threading.Thread(target=come, args=(stop := threading.Event(),))
    thread.start()
    try:
        run_until(
            lambda ended: follow(live, log, ended),
            lambda: len(live.state.index.uids) == before + 3,
        )
    finally:
        stop.set()
        thread.join()
    assert live.log is None  # nobody reads it any more


def _output(i: int) -> Output:
    return Output("rollouts.copy", "late", rollout("copy", "late", i, 0))


def test_a_rollout_is_read_where_it_lies(recording: MemoryLog):
    state = read_through(recording, 81).state
    row = rollout_views.page(state, Query(fate="batched", env="copy"))["rows"][0]
    found = rollout_at(recording, RolloutLocation("copy", row["partition"], row["offset"]))
    assert isinstance(found, Rollout) and found.rollout_uid == row["uid"]
    trained = batch_at(recording, state.batches[row["batch"]])
    assert trained is not None and trained.number == row["batch"] and row["uid"] in trained.uids
    assert rollout_views.detail(found, trained, None)["turns"][1]["advantages"] is not None
    assert rollout_at(
        recording, RolloutLocation("copy", 0, end_offset(recording, "rollouts.copy", 0) - 1)
    ).startswith("the record cannot be read: ")  # type: ignore[union-attr]


def test_the_loop_has_every_part_with_its_lag(recording: MemoryLog):
    state = read_through(recording, 81).state
    loop = {node["id"]: node for node in views.overview(state, state.time_s)["loop"]}
    assert list(loop) == [
        "env:copy",
        "env:add",
        "buffer",
        "batcher",
        "learner",
        "inference:generation",
    ]
    # the rubbish came when the buffer had ended
    assert loop["buffer"]["lag"] == 1 and loop["batcher"]["lag"] == 0
    assert loop["learner"]["version"] == 3


def test_an_export_is_a_run_too(recording: MemoryLog, tmp_path: Path):
    files = export(recording, RUN, tmp_path / "x")
    state = read_through(files, 81).state
    same = read_through(recording, 81).state
    for look in (views.fates, views.composition, panels.panels):
        # by steps they may differ: files keep times to the millisecond
        assert look(state) == look(same)
    assert set(state.index.uids) == set(same.index.uids)
    assert isinstance(rollout_at(files, RolloutLocation("copy", 0, 0)), Rollout)


def test_a_run_without_topics_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("streamrl.extensions.dashboard.reading.TOPICS_LIMIT_S", 0.0)
    with pytest.raises(
        TopicMissing,
        match=(
            r"run 'small' has no topic .*; create its topics with `streamrl topics apply RUN.yaml`"
        ),
    ):
        follow(LiveState(new(RUN)), MemoryLog({"metrics": 1}), threading.Event())


def test_in_flight_is_a_fate_to_ask_for(recording: MemoryLog):
    state = read_through(recording, 81).state
    assert {row["fate"] for row in rollout_views.page(state, Query(fate=IN_FLIGHT))["rows"]} == {
        IN_FLIGHT
    }


def test_while_somebody_starts_the_run_its_broker_is_waited_for(tmp_path: Path):
    """A dashboard that started a broker of its own would take the place of the run's."""
    run = RUN.model_copy(update={"runs_dir": str(tmp_path)})
    stop = threading.Event()
    with lock_run_dir(run):
        timer = threading.Timer(0.5, stop.set)
        timer.start()
        with log_of(run, stop) as log:
            assert log is None and stop.is_set()
        timer.join()
    with (
        pytest.raises(BrokerUnreachable, match="no broker is running"),
        log_of(run, threading.Event()),
    ):
        pass  # nobody is at it, and it has never had a broker
