"""The page of topology: which parts a run has, by hand, and that the page is the only one."""

from __future__ import annotations

import pytest

from streamrl.config.run_file import RunFile, parse
from streamrl.config.topology import parts


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
        ("env-copy-0", ("env", "copy", "--replica", "0")),
        ("env-copy-1", ("env", "copy", "--replica", "1")),
        ("env-add-0", ("env", "add", "--replica", "0")),
    ]


def test_a_pool_has_its_own_servers():
    run = parse(
        {"run": "r", "envs": {"copy": {}}, "inference": {"replicas": 1, "pools": {"evaluation": 2}}}
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
    pooled = parts(parse({**settings, "learner": {"reference": {"by": "pool"}}}))
    assert [(part.name, part.options) for part in pooled if part.role == "scorer"] == [
        ("scorer-0", ("--worker", "0")),
        ("scorer-1", ("--worker", "1")),
    ]
