from __future__ import annotations

from streamrl.config import run_file
from streamrl.config.run_file import RunFile
from streamrl.extensions.dashboard.loop import Node, ProcessStatus, jsonable, nodes
from streamrl.run.monitoring.run_view import RunView, new_view, update_view
from streamrl.stream.log.protocol import Event
from streamrl.stream.records import Demand, Metric, Record, Server
from tests.extensions.dashboard.made import AGENTS, SESSION_METRICS

RUN = run_file.parse(
    {
        "run": "r",
        "envs": {"copy": {"replicas": 2}, "add": {"pool": "long"}},
        "inference": {"replicas": 2, "pools": {"long": {}}},
    }
)
NOW_S = 100.0


def seen(*records: tuple[str, Record], run: RunFile = RUN) -> RunView:
    return update_view(
        new_view(run),
        (Event(topic, 0, 0, getattr(record, "source", ""), record) for topic, record in records),
    )


def metric(source: str, time_s: float, **values: float) -> tuple[str, Metric]:
    return "metrics", Metric(
        source=source,
        time_s=time_s,
        values={name.replace("__", "/"): value for name, value in values.items()},
    )


def found(view: RunView, run: RunFile = RUN, **lags: int) -> dict[str, Node]:
    return {node.id: node for node in nodes(run, view, lags, NOW_S)}


def test_every_part_that_the_run_should_have_in_the_order_of_the_loop():
    assert list(found(seen())) == [
        "env:copy",
        "env:add",
        "buffer",
        "batcher",
        "learner",
        "inference:generation",
        "inference:long",
    ]
    assert {part.state for node in found(seen()).values() for part in node.parts} == {"stopped"}
    asking = run_file.with_overrides(
        RUN, ["learner.kl.reference.by=pool", "eval.envs.held.env=copy"]
    )
    assert {"scorer", "evaluator"} <= found(seen(run=asking), asking).keys()


def test_of_a_learner_in_several_processes_the_one_that_writes_is_shown():
    several = run_file.with_overrides(RUN, ["learner.processes=2"])
    learner = found(seen(run=several), several)["learner"]
    assert [part.name for part in learner.parts] == ["learner-0"]


def test_an_env_has_the_rate_of_all_its_replicas_and_what_is_wanted_of_it():
    demand = (
        "demand",
        Demand(
            environment="copy", wanted_tokens=70, held_tokens=0, closed_groups={}, missing_tokens=7
        ),
    )
    env = found(
        seen(
            metric("env-copy-0", 99.0, env__rollouts_per_s=2.0),
            metric("env-copy-1", 98.0, env__rollouts_per_s=3.0),
            demand,
        )
    )["env:copy"]
    assert env.rate == 5.0 and [part.state for part in env.parts] == ["running"] * 2
    assert {fact.label: fact.value for fact in env.facts} == {
        "groups in flight": None,
        "wanted": 70,
        "missing": 7,
    }


def test_an_env_from_outside_is_there_with_what_the_buffer_reads_of_it():
    run = run_file.with_overrides(RUN, ["envs.copy.replicas=0"])
    read = [
        metric("buffer", time_s, **{"part__read_records__rollouts.copy": rollouts})
        for time_s, rollouts in ((90.0, 10.0), (100.0, 40.0))
    ]
    env = found(seen(*read, run=run), run)["env:copy"]
    assert env.rate == 3.0 and env.parts == [ProcessStatus("copy (outside)", "running", 0)]


def test_the_gateway_and_the_assembler_are_there_with_what_all_replicas_say():
    said = [
        ("metrics", Metric(source=source, time_s=99.0, values=values))
        for source, values in SESSION_METRICS.items()
    ]
    loop = found(seen(*said, run=AGENTS), AGENTS)
    gateway = loop["gateway"]
    assert gateway.rate == 42.0 and [part.state for part in gateway.parts] == ["running"] * 2
    assert {fact.label: fact.value for fact in gateway.facts} == {
        "open sessions": 12.0,  # which each of them knows
        "tokens/s": 950.0,
        "added to a call": 0.02,
        "answered from the log": 4.0,
        "refused": 1.0,
    }
    assert {fact.label: fact.value for fact in loop["assembler"].facts} == {
        "open sessions": 12.0,
        "wait for rewards": 4.0,
    }
    assert not {"gateway", "assembler"} & found(seen()).keys()


def test_an_old_rate_is_none_and_its_part_silent():
    buffer = found(
        seen(metric("buffer", 80.0, worker__events_per_s=9.0, buffer__version=4.0)), buffer=3
    )["buffer"]
    assert buffer.rate is None and buffer.version == 4 and buffer.lag == 3
    assert [part.state for part in buffer.parts] == ["silent"]


def test_servers_stand_in_their_pool_with_what_they_serve():
    servers = [
        (
            "servers",
            Server(
                server_id="inference-0",
                url="",
                version=5,
                state="ready",
                in_flight=3,
                heartbeat_s=99.0,
            ),
        ),
        (
            "servers",
            Server(
                server_id="inference-1",
                url="",
                version=4,
                state="error",
                error="the probe is off",
                in_flight=1,
                heartbeat_s=99.0,
            ),
        ),
        (
            "servers",
            Server(
                server_id="joined",
                url="",
                pool="long",
                version=5,
                state="ready",
                in_flight=9,
                heartbeat_s=50.0,
            ),
        ),
    ]
    loop = found(seen(*servers))
    here = loop["inference:generation"]
    long = loop["inference:long"]
    assert here.parts == [
        ProcessStatus("inference-0", "ready", 0, 5),
        ProcessStatus("inference-1", "error", 0, 4, "the probe is off"),
    ]
    assert here.version == 4 and here.facts[0].value == 4
    assert [(part.name, part.state) for part in long.parts] == [
        ("inference-long-0", "stopped"),
        ("joined", "silent"),
    ]
    assert long.facts[0].value is None  # of one that is silent nobody knows what it is at
    assert (loop["env:copy"].pool, loop["env:add"].pool, here.pool, long.pool) == (
        "generation",
        "long",
        "generation",
        "long",
    )


def test_a_node_as_plain_values():
    plain = jsonable(found(seen())["buffer"])
    assert plain["parts"] == [
        {"name": "buffer", "state": "stopped", "restarts": 0, "version": None, "note": ""}
    ]
    assert plain["facts"][0] == {"label": "in its window", "value": None, "unit": "tokens"}
