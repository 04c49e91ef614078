"""One evaluation: what is written of it, and what ends it."""

from __future__ import annotations

import pytest

from streamrl.config.run_file import RunFile
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import end_offset
from streamrl.stream.log.reading import read
from streamrl.stream.records import Evaluation, Rollout
from streamrl.system.errors import InferenceError
from tests.extensions.evaluator.world import PROBLEMS, SAMPLES, World, announce, live, made

pytestmark = pytest.mark.usefixtures("fakes")


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


def test_a_version_with_which_the_server_computes_something_else_is_passed_over(
    run: RunFile, log: MemoryLog, caplog: pytest.LogCaptureFixture
):
    announce(run, log, 0, 2)
    World.doubtful = (0,)
    live(run, log, lambda: made(log) == [2])
    assert (
        "version 0 is not evaluated: version 0: the server's logprobs differ from the learner's by"
        " up to 0.5" in caplog.text
    )


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
