import pytest

from streamrl.config.run_file import RunFile, parse
from streamrl.run.monitoring.run_view import RunView, new_view, update_view
from streamrl.run.monitoring.status import lag, read_view, statuses
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Event, Message
from streamrl.stream.records import Metric, Server
from streamrl.system.errors import TopicMissing

TOPICS = {
    "metrics": 1,
    "servers": 1,
    "policy-versions": 1,
    "demand": 1,
    "fates": 1,
    "evals": 1,
    "groups.copy": 2,
    "batches": 1,
}


@pytest.fixture
def run() -> RunFile:
    return parse({"run": "r", "envs": {"copy": {}}})


def test_of_a_learner_in_several_processes_the_one_that_writes_has_a_line():
    run = parse({"run": "r", "envs": {"copy": {}}, "learner": {"processes": 2}})
    names = [part.name for part in statuses(run, new_view(run), {}, 100.0)]
    assert [name for name in names if name.startswith("learner")] == ["learner-0"]


def test_lag_counts_records_and_not_markers():
    log = MemoryLog(TOPICS)
    groups = log.writer("buffer")
    batcher = log.writer("batcher")
    for key in (b"a", b"b", b"c"):
        # offsets 0, 2, 4; a marker behind each
        groups.commit([Message("groups.copy", key, b"x", partition=1)])
    assert lag(log, "batcher") is None
    batcher.commit([Message("batches", b"0", b"x")])
    batcher.commit_offsets({("groups.copy", 0): 0, ("groups.copy", 1): 1})
    assert lag(log, "batcher") == 2
    batcher.commit([Message("batches", b"1", b"x")])
    batcher.commit_offsets({("groups.copy", 1): 5})
    assert lag(log, "batcher") == 0


def metric(source: str, time_s: float, values: dict[str, float]) -> Event:
    return Event("metrics", 0, 0, source, Metric(source=source, time_s=time_s, values=values))


def states(run: RunFile, view: RunView, time_s: float) -> dict[str, tuple[str, int]]:
    return {
        part.name: (part.state, part.restarts)
        for part in statuses(run, view, {"buffer": 3}, time_s)
    }


def test_parts_by_their_supervisor_and_by_what_is_heard_of_them(run: RunFile):
    kept = {
        "orchestrator/running/buffer": 1.0,
        "orchestrator/running/batcher": 0.0,
        "orchestrator/restarts/batcher": 4.0,
    }
    server = Server(server_id="inference-0", url="", heartbeat_s=85.0)
    view = update_view(
        new_view(run),
        [
            metric("orchestrator", 99.0, kept),
            metric("learner-lead", 95.0, {}),
            Event("servers", 0, 0, "inference-0", server),
        ],
    )
    found = states(run, view, 100.0)
    expected = {
        "learner": "running",
        "inference-0": "silent",
        "buffer": "running",
        "batcher": "back-off",
        "env-copy-0": "stopped",
    }
    assert {name: state for name, (state, _) in found.items()} == expected
    assert found["batcher"] == ("back-off", 4)
    assert {part.name: part.lag for part in statuses(run, view, {"buffer": 3}, 100.0)}[
        "buffer"
    ] == 3
    assert states(run, view, 1_000.0)["buffer"][0] == "stopped"  # nobody says that it runs any more


def test_a_run_whose_topics_are_still_being_made_has_no_state(run: RunFile):
    log = MemoryLog({name: count for name, count in TOPICS.items() if name != "evals"})
    with pytest.raises(TopicMissing, match="evals"):
        read_view(run, log)
