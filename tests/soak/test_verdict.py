"""The account of a soak finds what is wrong: a run in memory with one record of every sort, and
then with one thing changed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from streamrl.stream.log.codec import to_event, to_message
from streamrl.stream.log.dead_letters import to_dead_letter
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Message, Output
from streamrl.stream.records import Fate
from tests.soak.verdict import Soaked, look_at_fates
from tests.support.build import rollout
from tests.support.data_path import RUN, TOPICS
from tests.support.rubbish import bad


def dead_lettered(message: Message, offset: int) -> list[Message]:
    """Letter and fate."""
    event = to_event(message._replace(partition=0, offset=offset), ("rollout",))
    return [to_message(output) for output in to_dead_letter(event, "broken")]


def batched(offset: int) -> Message:
    fate = Fate(
        fate="batched",
        environment="copy",
        partition=0,
        offsets=np.array([offset]),
        uids=["g0-0"],
        batch=0,
    )
    return to_message(Output("fates", "copy", fate))


RUBBISH = bad("empty", 0, np.random.default_rng(0))
GOOD = to_message(Output("rollouts.copy", "g0", rollout()))
WELL = [GOOD, RUBBISH, batched(0), *dead_lettered(RUBBISH, 1)]


def account(messages: list[Message]) -> Soaked:
    log = MemoryLog(TOPICS)
    found = Soaked()
    writer = log.producer()
    for message in messages:
        writer.send(message)
    look_at_fates(log, RUN, found)
    return found


def wrong(found: Soaked) -> tuple[int, int, int]:
    return found.good_without_one_fate, found.rubbish_not_dead_lettered, found.letters_astray


def test_a_run_that_is_well():
    found = account(WELL)
    assert wrong(found) == (0, 0, 0) and (
        found.rubbish,
        found.dead_lettered,
        dict(found.fates),
    ) == (1, 1, {"batched": 1})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: [x for x in m if x.topic != "fates"], (1, 1, 0)),
        (lambda m: [*m, batched(0)], (1, 0, 0)),
        (lambda m: [x for x in m if not x.topic.startswith("dead")], (0, 1, 0)),
        (lambda m: [*m, *dead_lettered(RUBBISH, 1)], (0, 1, 0)),
        (lambda m: [GOOD, RUBBISH, *dead_lettered(GOOD, 0), *dead_lettered(RUBBISH, 1)], (1, 0, 1)),
        (lambda m: [*m, dead_lettered(RUBBISH, 7)[0]], (0, 0, 1)),
    ],
    ids=[
        "no fates",
        "two fates",
        "no letter",
        "two letters",
        "a good one put aside",
        "a letter of nothing",
    ],
)
def test_what_is_wrong_is_counted(
    change: Callable[[list[Message]], list[Message]], says: tuple[int, int, int]
):
    assert wrong(account(change(WELL))) == says
