"""The evaluator over a log in memory, with a policy and a server that are made up: which versions
it evaluates, and what is in the log then.
"""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from rich.console import Console

from streamrl.config.run_file import RunFile, parse
from streamrl.envs.held_out import text_fingerprint
from streamrl.envs.shipped.copy_digits import CopyDigits
from streamrl.errors import ConfigError, InferenceError, WeightError
from streamrl.evaluator import process, runner, show
from streamrl.evaluator.history import posed_fingerprints, read_evaluations
from streamrl.inference import vllm_host
from streamrl.inference.engine import Mismatch
from streamrl.inference.vllm_host import LoadResult
from streamrl.log.codec import to_event
from streamrl.log.memory import MemoryLog
from streamrl.log.protocol import Output, end_offset, read
from streamrl.records import Evaluation, Metric, PolicyVersion, Rollout
from streamrl.weights.store import Store
from tests.evaluator.test_suite import Policy, Spans
from tests.support import life
from tests.support.build import rollout, turns
from tests.support.data_path import publish

PROBLEMS = 5
SAMPLES = 2


class World:
    """What the made-up server and policy are on, and how they behave."""

    version = -1
    served: list[int]
    alive = True
    mismatch = 0.0
    spoilt: tuple[int, ...] = ()
    hang = False
    stopped = 0


class FakeHost:
    url = "http://nowhere"

    def __init__(self, run: RunFile, identity: str, index: int, stop: threading.Event) -> None: ...

    def load_version(self, version: PolicyVersion) -> LoadResult:
        if version.version in World.spoilt:
            raise WeightError(f"version {version.version} is not what was announced")
        World.version = version.version
        World.served.append(version.version)
        return LoadResult(version.version, Mismatch(World.mismatch, 9), 0.0, None, 0.0)

    def alive(self) -> bool:
        return World.alive

    def vllm_metrics(self) -> bytes:
        return b""

    def cause(self) -> str:
        return "out of memory"

    def stop(self) -> None:
        World.stopped += 1


class FakeClient(Policy):
    """Answers by the version that the server is on."""

    def __init__(self, pool: str = "", api_key: str = "") -> None:
        super().__init__()

    def on_server(self, server_id: str, server: object, old: bool = False) -> None: ...

    async def close(self) -> None: ...

    async def sample(self, *arguments: Any, **more: Any) -> Any:
        while World.hang:
            await runner.asyncio.sleep(0.01)
        return await super().sample(*arguments, **more)

    def usual(self) -> Spans:
        return [(World.version, 3)]


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "version": -1,
        "served": [],
        "alive": True,
        "mismatch": 0.0,
        "spoilt": (),
        "hang": False,
        "stopped": 0,
    }.items():
        monkeypatch.setattr(World, name, value, raising=False)
    monkeypatch.setattr(runner, "Client", FakeClient)
    monkeypatch.setattr(vllm_host, "VllmHost", FakeHost)
    for module in (process, show):
        monkeypatch.setattr(module, "check", lambda settings: None)


@pytest.fixture
def run(tmp_path: Path) -> RunFile:
    evaluations = {
        "every": 2,
        "envs": {
            "held": {"env": "copy-digits", "problems": PROBLEMS, "samples": SAMPLES, "k": [1, 2]}
        },
    }
    return parse(
        {
            "run": "r",
            "runs_dir": str(tmp_path),
            "envs": {"copy-digits": {"params": {"digits": 1}}},
            "eval": evaluations,
        }
    )


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog(
        dict.fromkeys(("policy-versions", "evals", "metrics", "rollouts.copy-digits"), 1)
    )


def announce(run: RunFile, log: MemoryLog, *versions: int, stored: bool = True) -> None:
    for version in versions:
        store = Store(f"{run.store}/lead")
        if stored:
            store.put(version, lambda directory: directory.joinpath("file").write_text("x"))
        publish(
            log,
            Output(
                "policy-versions",
                "lead",
                PolicyVersion(
                    learner="lead", version=version, uri="u", size_bytes=1, sha256=f"sha {version}"
                ),
            ),
        )


def live(run: RunFile, log: MemoryLog, until: Callable[[], bool]) -> None:
    life.live(lambda stop: process.main(run, log, stop), until)


def made(log: MemoryLog) -> list[int]:
    return [found.version for found in read_evaluations(log)]


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


def test_the_answers_lie_before_it_in_the_topic_of_evaluations_and_in_no_other(
    run: RunFile, log: MemoryLog
):
    announce(run, log, 0)
    live(run, log, lambda: made(log) == [0])
    records = [to_event(m, ("rollout", "evaluation")).record for m in read(log, "evals", 0, 0)]
    answers = records[:-1]
    last = records[-1]
    assert (
        isinstance(last, Evaluation)
        and len(answers) == PROBLEMS * SAMPLES
        and all(isinstance(r, Rollout) for r in answers)
    )
    assert len({r.rollout_uid for r in answers if isinstance(r, Rollout)}) == len(answers)
    assert end_offset(log, "rollouts.copy-digits", 0) == 0


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
    more = run.eval.envs | {
        "more": run.eval.envs["held"].model_copy(update={"seed": 5, "problems": 2})
    }
    live(
        run.model_copy(update={"eval": run.eval.model_copy(update={"envs": more})}),
        log,
        lambda: len(read_evaluations(log)) == 3,
    )
    assert [found.name for found in read_evaluations(log)] == ["held", "held", "more"]


def test_a_server_that_computes_something_else_is_not_evaluated(run: RunFile, log: MemoryLog):
    announce(run, log, 0)
    World.mismatch = 0.5
    with pytest.raises(
        InferenceError,
        match=r"version 0: the server's logprobs differ from the learner's by up to 0.5",
    ):
        live(run, log, lambda: False)
    assert made(log) == [] and World.stopped == 1


def test_a_server_that_dies_ends_it(run: RunFile, log: MemoryLog):
    announce(run, log, 0)
    World.hang = True

    def kill() -> bool:
        World.alive = World.version < 0
        return False

    with pytest.raises(
        InferenceError, match=r"^vLLM of evaluator died while serving version 0: out of memory$"
    ):
        live(run, log, kill)


def test_it_stops_in_the_middle_and_begins_that_version_again(run: RunFile, log: MemoryLog):
    announce(run, log, 0)
    World.hang = True
    live(run, log, lambda: World.version == 0)
    assert made(log) == [] and World.stopped == 1
    World.hang = False
    live(run, log, lambda: made(log) == [0])


def text(number: int) -> str:
    return CopyDigits(0, 1).problem(number).messages[0]["content"]


def trained(log: MemoryLog, *texts: str) -> None:
    for index, said in enumerate(texts):
        asked, answer = turns()
        made = rollout(
            "copy-digits", f"g{index}", turns=[structs.replace(asked, message=said), answer]
        )
        publish(log, Output("rollouts.copy-digits", made.group_id, made))


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


# ---- streamrl eval -------------------------------------------------------------------------------


def asked(run: RunFile, log: MemoryLog, *versions: int, everything: bool = False) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    show.show_eval(run, log, versions, everything, (), threading.Event(), console)
    return console.export_text()


def test_the_newest_version_or_those_asked_for_or_all_that_are_kept(run: RunFile, log: MemoryLog):
    announce(run, log, 0, stored=False)
    announce(run, log, 1, 2, 3)
    assert re.search(r"held +3 ", asked(run, log))
    asked(run, log, 1)
    shown = asked(run, log, everything=True)
    assert made(log) == [3, 1, 1, 2, 3] and World.stopped == 3
    assert re.search(
        r"held +1 +1\.000 \[0\.566, 1\.000\] +1\.000 \[0\.566, 1\.000\].* 5 +10 +0", shown
    ), shown
    with pytest.raises(
        ConfigError,
        match=(
            r"^--version 0: its weights are deleted; there are 1, 2, 3. weights.keep_versions keeps"
            r" more$"
        ),
    ):
        asked(run, log, 0)
    with pytest.raises(ConfigError, match=r"^--version 9: it is not announced"):
        asked(run, log, 9)


def test_problems_that_training_has_posed_are_passed_over(run: RunFile, log: MemoryLog):
    """Five of the ten there are, so the other five are taken; of a sixth there is none."""
    announce(run, log, 0)
    texts = list(dict.fromkeys(text(i) for i in range(100)))
    trained(log, *texts[:5])
    assert (
        len(posed_fingerprints(log, "copy-digits") & {text_fingerprint(said) for said in texts[:6]})
        == 5
    )
    asked(run, log)
    answers = [
        r
        for m in read(log, "evals", 0, 0)
        if isinstance(r := to_event(m, ("rollout",)).record, Rollout)
    ]
    assert {answer.turns[0].message for answer in answers} == set(texts[5:])
    trained(log, *texts[:6])
    with pytest.raises(
        ConfigError,
        match=r"problems is 5, but the env has 4 different ones that training has not posed",
    ):
        asked(run, log)


def test_a_run_without_evaluations_gets_one_of_each_env():
    bare = parse({"run": "r", "envs": {"copy-digits": {}, "outside": {"replicas": 0}}})
    assert list(show.with_evaluations(bare, ()).eval.envs) == ["copy-digits"]
    with pytest.raises(
        ConfigError, match=r"^--env nope: the run has no such evaluation; it has copy-digits"
    ):
        show.with_evaluations(bare, ("nope",))


def test_a_run_that_has_no_versions_says_so(run: RunFile, log: MemoryLog):
    with pytest.raises(ConfigError, match=r"^run r has no policy version whose weights are kept"):
        asked(run, log)


def test_what_there_is_can_be_listed(run: RunFile, log: MemoryLog):
    console = Console(width=200, record=True, file=io.StringIO())
    show.show_recorded(run, log, (), console)
    announce(run, log, 0, 2)
    live(run, log, lambda: made(log) == [0, 2])
    show.show_recorded(run, log, (), console)
    said = console.export_text()
    assert "run r has no evaluations" in said and re.search(r"held +0 .*\n +held +2 ", said), said
