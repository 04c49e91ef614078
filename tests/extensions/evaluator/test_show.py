"""`streamrl eval`: which versions it evaluates, and what it prints."""

from __future__ import annotations

import io
import re
import threading

import numpy as np
import pytest
from rich.console import Console

from streamrl.config.run_file import RunFile, parse
from streamrl.envs.held_out import text_fingerprint
from streamrl.extensions.evaluator import show
from streamrl.extensions.evaluator.history import posed_fingerprints
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.reading import read
from streamrl.stream.records import Evaluation, PassAt, Rollout
from streamrl.system.errors import ConfigError
from tests.extensions.evaluator.world import World, announce, live, made, text, trained

pytestmark = pytest.mark.usefixtures("fakes")


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


def test_the_table_names_the_problems_of_each_k_where_they_are_not_all():
    """Three problems with 2, 1 and 0 answers: pass@1 is over two of them, pass@2 over one."""
    samples = np.array([2, 1, 0], np.int32)
    evaluation = Evaluation(
        name="held",
        environment="copy",
        learner="lead",
        version=7,
        sha256="ab",
        problems=np.arange(3),
        samples=samples,
        passed=samples,
        rewards=np.ones(3, np.float32),
        pass_at=[
            PassAt(k=k, problems=problems, value=1.0, low=0.2, high=1.0)
            for k, problems in ((1, 2), (2, 1))
        ],
        reward_mean=1.0,
        reward_low=1.0,
        reward_high=1.0,
        too_slow=1,
        repeated=4,
    )
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(show.table([evaluation]))
    shown = console.export_text()
    assert "1.000 [0.200, 1.000] of 2 problems" in shown
    assert "1.000 [0.200, 1.000] of 1 problems" in shown
    assert re.search(r" 3 +3 +1 +4 *$", shown, re.MULTILINE), shown
