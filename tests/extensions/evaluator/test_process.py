"""The evaluator over a log in memory, with a policy and a server that are made up: which versions
it evaluates, and what is in the log then.
"""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from streamrl.config import run_file
from streamrl.config.run_file import RunFile
from streamrl.config.sections.serving import EvalEnv
from streamrl.extensions.evaluator import process, show
from streamrl.extensions.evaluator.history import read_evaluations
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.reading import read
from streamrl.stream.records import Metric
from streamrl.system.errors import ConfigError
from tests.extensions.evaluator.world import (
    PROBLEMS,
    SAMPLES,
    World,
    announce,
    live,
    made,
    text,
    trained,
)

pytestmark = pytest.mark.usefixtures("fakes")


def test_every_nth_version_is_evaluated_in_order_and_once(run: RunFile, log: MemoryLog):
    announce(run, log, *range(4))
    live(run, log, lambda: len(made(log)) == 2)
    announce(run, log, *range(4, 7))
    live(run, log, lambda: len(made(log)) == 4)
    assert made(log) == World.served == [0, 2, 4, 6]
    assert all(
        found.sha256 == f"sha {found.version}" and found.samples.tolist() == [SAMPLES] * PROBLEMS
        for found in read_evaluations(log)
    )
    values = [
        r
        for m in read(log, "metrics", 0, 0)
        if isinstance(r := to_event(m, ("metric",)).record, Metric)
        and "evals/held/pass@1" in r.values
    ]
    assert [(metric.step, metric.values["evals/held/pass@1"]) for metric in values] == [
        (version, 1.0) for version in (0, 2, 4, 6)
    ]


def test_its_server_serves_no_guests_and_needs_no_keys_of_theirs(
    run: RunFile, log: MemoryLog, monkeypatch: pytest.MonkeyPatch
):
    checked = list[RunFile]()
    monkeypatch.setattr(process, "check_vllm", checked.append)
    monkeypatch.setattr(show, "check_vllm", checked.append)
    guests = run_file.with_overrides(run, ["learner.lora={}", "inference.also_serves={other: {}}"])
    announce(run, log, 0)
    live(guests, log, lambda: made(log) == [0])
    show.show_eval(guests, log, [0], False, (), threading.Event(), Console(file=io.StringIO()))
    assert [[*each.inference.also_serves] for each in checked] == World.guests == [[], []]


def test_a_version_whose_weights_are_gone_or_spoilt_is_passed_over(
    run: RunFile, log: MemoryLog, caplog: pytest.LogCaptureFixture
):
    announce(run, log, 0, stored=False)
    announce(run, log, 2, 4)
    World.spoilt = (2,)
    live(run, log, lambda: made(log) == [4])
    assert "not evaluated, as the weights are deleted: version 0;" in caplog.text
    assert "version 2 is not evaluated: version 2 is not what was announced" in caplog.text


def test_a_new_evaluation_is_made_of_versions_that_have_another(run: RunFile, log: MemoryLog):
    announce(run, log, 0)
    live(run, log, lambda: made(log) == [0])
    settings = run.eval.envs["held"].model_dump(exclude={"seed", "problems"})
    more = run.eval.envs | {"more": EvalEnv(seed=5, problems=2, **settings)}
    live(
        run.model_copy(update={"eval": run.eval.model_copy(update={"envs": more})}),
        log,
        lambda: len(read_evaluations(log)) == 3,
    )
    assert [found.name for found in read_evaluations(log)] == ["held", "held", "more"]


def test_started_again_it_follows_another_interval(run: RunFile, log: MemoryLog):
    """What was evaluated by the earlier one is not evaluated again."""
    announce(run, log, *range(4))
    live(run, log, lambda: len(made(log)) == 2)
    announce(run, log, *range(4, 7))
    live(run_file.with_overrides(run, ["eval.every=3"]), log, lambda: len(made(log)) == 4)
    assert made(log) == World.served == [0, 2, 3, 6]


def test_a_problem_that_was_trained_on_before_is_refused(run: RunFile, log: MemoryLog):
    announce(run, log, 0)
    trained(log, text(1))
    with pytest.raises(
        ConfigError,
        match=(
            r"^eval.envs.held: problem \d+ was posed in training before the run file had this"
            r" evaluation; choose another"
        ),
    ):
        live(run, log, lambda: False)
