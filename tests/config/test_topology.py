"""The page of topology: which parts a run has, by hand, and that the page is the only one."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamrl.batcher import process as batcher
from streamrl.buffer import process as buffer
from streamrl.config import topology
from streamrl.config.run_file import RunFile, parse
from streamrl.config.topology import Role, parts, roles
from streamrl.extensions.assembler import process as assembler
from streamrl.extensions.assembler.extension import ASSEMBLER
from streamrl.run.monitoring.run_view import BATCHES, TOPICS
from streamrl.stream.log import topics
from streamrl.stream.processor.definition import Processor
from streamrl.system.errors import ConfigError
from tests.support.rooms import ROOMS

PACKAGE = Path(topology.__file__).parents[1]
KINDS = {name: value for name, value in vars(topology).items() if name.isupper()}
BUILDERS = {"turns", "rewards", "rollouts", "groups", "visits", "journal"}
# What a room does with a kind of topics by code that all rooms share.
SHARED = {
    topology.METRICS: "stream/log/meter.py",
    topology.DEAD_LETTERS: "stream/log/dead_letters.py",
    topology.JOURNAL: "stream/processor/processor.py",
}
ELSEWHERE = {
    "scorer": {topology.POLICY_VERSIONS},  # weights/announcements.py
    # envs/pool_rewards.py; stream/log/records_of.py
    "evaluator": {topology.SERVERS, topology.ROLLOUTS},
    "orchestrator": {*TOPICS, *BATCHES},  # run/monitoring/run_view.py
}


def commands(run: RunFile) -> list[tuple[str, tuple[str, ...]]]:
    return [(part.name, (part.role, *part.options)) for part in parts(run)]


@pytest.mark.parametrize(
    ("evaluations", "evaluators"),
    [({"every": 5, "envs": {"copy": {}}}, 1), ({"every": 0, "envs": {"copy": {}}}, 0), ({}, 0)],
)
def test_a_run_that_evaluates_has_one_evaluator(evaluations: dict[str, object], evaluators: int):
    run = parse({"run": "r", "envs": {"copy": {}}, "eval": evaluations})
    assert [part.options for part in parts(run) if part.role == "evaluator"] == [()] * evaluators


def test_a_run_has_a_process_for_every_replica():
    run = parse(
        {"run": "r", "envs": {"copy": {"replicas": 2}, "add": {}}, "inference": {"replicas": 2}}
    )
    assert commands(run) == [
        ("learner", ("learner",)),
        ("inference-0", ("inference", "--index", "0")),
        ("inference-1", ("inference", "--index", "1")),
        ("buffer", ("buffer",)),
        ("batcher", ("batcher",)),
        ("env-copy-0", ("env", "copy", "--index", "0")),
        ("env-copy-1", ("env", "copy", "--index", "1")),
        ("env-add-0", ("env", "add", "--index", "0")),
    ]


def test_envs_with_a_host_are_one_process_with_one_journal():
    hosted = {"copy": {"host": "a", "replicas": 2}, "add": {"host": "a"}, "sort": {"host": "b"}}
    run = parse({"run": "r", "envs": {**hosted, "own": {}}})
    assert commands(run)[-3:] == [
        ("env-own-0", ("env", "own", "--index", "0")),
        ("host-a", ("host", "a")),
        ("host-b", ("host", "b")),
    ]
    assert topology.env_journal(run, "copy", 1) == "journal.host-a"
    assert topology.env_journal(run, "own", 0) == "journal.env-own-0"
    journals = [topic.name for topic in topics.plan(run) if topic.kind.name == topology.JOURNAL]
    assert {"r.journal.host-a", "r.journal.host-b", "r.journal.env-own-0"} <= set(journals)
    assert not any("env-copy" in name for name in journals)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"host": "A 1"}, "envs.copy.host: not a name of lowercase letters"),
        ({"host": "a", "replicas": 0}, "with `replicas: 0` its rollouts come from outside"),
    ],
)
def test_a_host_that_cannot_be_is_refused(settings: dict[str, object], problem: str):
    with pytest.raises(ConfigError, match=problem):
        parse({"run": "r", "envs": {"copy": settings}})


def test_a_pool_has_its_own_servers():
    run = parse(
        {
            "run": "r",
            "envs": {"copy": {}},
            "inference": {"replicas": 1, "pools": {"evaluation": {"replicas": 2}}},
        }
    )
    assert commands(run)[1:4] == [
        ("inference-0", ("inference", "--index", "0")),
        ("inference-evaluation-0", ("inference", "--index", "0", "--pool", "evaluation")),
        ("inference-evaluation-1", ("inference", "--index", "1", "--pool", "evaluation")),
    ]
    assert [
        run.inference.place(*where)
        for where in (("generation", 0), ("evaluation", 0), ("evaluation", 1), ("generation", 3))
    ] == [0, 1, 2, 3]


def test_a_scorer_pool_has_a_process_for_every_worker():
    settings = {
        "run": "r",
        "envs": {"copy": {}},
        "scorer": {"replicas": 2},
        "inference": {"replicas": 0},
    }
    assert [part.name for part in parts(parse(settings)) if part.role == "scorer"] == []
    pooled = parts(parse({**settings, "learner": {"kl": {"reference": {"by": "pool"}}}}))
    assert [(part.name, part.options) for part in pooled if part.role == "scorer"] == [
        ("scorer-0", ("--index", "0")),
        ("scorer-1", ("--index", "1")),
    ]


def named_in(room: str) -> set[str]:
    """The kinds of topics that the files of a room name."""
    found = set[str]()
    for file in (PACKAGE / room).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Attribute(value=ast.Name(id="topology"), attr=name):
                    kind = KINDS.get(name.removesuffix("_PARTITION"), "")
                    found.add(name if name in BUILDERS else str(kind))
                case _:
                    pass
    return found & set(topics.kinds())


def stands_on_the_page(role: Role) -> set[str]:
    return {kind for kind in topics.kinds() if role.reads(kind) or kind in role.produces}


@pytest.mark.parametrize("role", roles(), ids=lambda role: role.name)
def test_a_room_names_the_topics_that_the_page_gives_its_role_and_no_others(role: Role):
    named = named_in(ROOMS[role.name])
    page = stands_on_the_page(role)
    file = "config/topology.py" if role in topology.CORE else f"{ROOMS[role.name]}/extension.py"
    where = f"{role.name.upper()} in streamrl/{file}"
    place = f"streamrl/{ROOMS[role.name]}"
    if role is topology.ORCHESTRATOR:
        place += " (and TOPICS of run/monitoring/run_view.py)"
    surplus = sorted(named - page)
    assert not surplus, (
        f"{place} names {', '.join(surplus)}: add them to what {where} consumes,"
        " reads back or produces, or leave them alone there"
    )
    unused = page - named - {*SHARED, *ELSEWHERE.get(role.name, ())}
    constants = sorted(f"topology.{name}" for name, kind in KINDS.items() if kind in unused)
    assert not unused, (
        f"{place} does not name {', '.join(constants)}: read or write them there, or take them off"
        f" {where}"
    )


def test_a_topic_that_the_page_does_not_give_is_found():
    assert not named_in("learner") <= stands_on_the_page(topology.BUFFER)


def test_every_room_with_a_process_is_a_role():
    processes = {
        path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("process.py")
    }
    assert processes - {"envs/servers"} == set(ROOMS.values())
    assert {*ROOMS} == {role.name for role in roles()}
    assert {*topology.started_roles()} == {*roles()} - {topology.ORCHESTRATOR}


@pytest.mark.parametrize(
    ("role", "make"),
    [
        (ASSEMBLER, assembler.make_processor),
        (topology.BUFFER, buffer.make_processor),
        (topology.BATCHER, batcher.make_processor),
    ],
)
def test_the_inputs_of_a_processor_are_those_of_its_role(
    role: Role, make: Callable[[RunFile], Processor[Any, Any]]
):
    envs = {"a": {}, "b": {}, "agents": {"sessions": {}}}
    made = make(parse({"run": "r", "envs": envs}))
    assert {topology.kind_of(topic) for topic in made.inputs} == set(role.consumes)
    assert made.name == role.parts(parse({"run": "r", "envs": {"a": {}}}))[0].identity


def test_every_topic_is_written_by_somebody():
    produced = {kind for role in roles() for kind in role.produces}
    produced.add(topology.REWARDS)  # by `streamrl rescore`, which is no part of a run
    unwritten = sorted(set(topics.kinds()) - produced)
    assert not unwritten, (
        f"no role of streamrl/config/topology.py produces {', '.join(unwritten)}, so the access"
        " rules let nobody write there"
    )
    assert produced <= set(topics.kinds())


def test_parts_are_chosen_by_role_or_by_name():
    run = parse({"run": "r", "envs": {"copy": {}}, "inference": {"replicas": 2}})

    def names(**choice: list[str]) -> list[str]:
        return [part.name for part in topology.chosen_parts(run, **choice)]

    assert names() == [part.name for part in parts(run)]
    assert names(only=["inference-1", "env"]) == ["inference-1", "env-copy-0"]
    assert names(excluded=["inference", "learner"]) == ["buffer", "batcher", "env-copy-0"]
    with pytest.raises(ConfigError, match="inference-2: no role or part of this run"):
        names(only=["inference-2"])


def test_the_processes_of_a_learner_are_chosen_together():
    run = parse({"run": "r", "envs": {"copy": {}}, "learner": {"processes": 2}})
    assert len(topology.chosen_parts(run, only=["learner"])) == 2
    with pytest.raises(ConfigError, match="learner-1: of the 2 processes .* start each by hand"):
        topology.chosen_parts(run, only=["learner-1"])


def test_machines_have_the_parts_that_placement_names_and_the_first_has_the_others():
    run = parse(
        {
            "run": "r",
            "envs": {"copy-digits": {"replicas": 2}},
            "inference": {"replicas": 2},
            "placement": {
                "learner": {"nodes": ["trains"], "devices": [0]},
                "inference": {"nodes": ["b", "c"], "devices": [0, 1]},
                "env": {"nodes": ["c", "samples"]},
            },
        }
    )
    names = {name: [part.name for part in on] for name, on in topology.machines(run).items()}
    assert names == {
        "trains": ["learner", "buffer", "batcher"],
        "b": ["inference-0"],
        "c": ["inference-1", "env-copy-digits-0"],
        "samples": ["env-copy-digits-1"],
    }
    assert [*names] == ["trains", "b", "c", "samples"]
    by_name = {part.name: part for part in parts(run)}
    assert topology.node_of(run, by_name["buffer"]) == ""
    assert topology.devices_of(run, by_name["inference-1"]) == (
        topology.Device("c", 0),
        topology.Device("c", 1),
    )


def test_a_run_without_named_machines_has_one():
    run = parse({"run": "r", "envs": {"copy-digits": {}}})
    assert topology.machines(run) == {"": topology.parts(run)}
