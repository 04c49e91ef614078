"""The verdict on a short run that nobody disturbed, and on the same with one thing in its topics
made wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from streamrl.config.run_file import RunFile
from streamrl.stream.log import topics
from streamrl.stream.log.codec import decode, encode, to_message
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Log, Message, Output, TopicPartition
from streamrl.stream.log.reading import read
from streamrl.stream.records import Batch, PolicyVersion, Record, Rollout
from tests.chaos import known, part
from tests.chaos.verdict import Verdict, verdict
from tests.support.waiting import patience, until

BATCHES = 4


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFile:
    directory = tmp_path_factory.mktemp("verdict") / "undisturbed"
    directory.mkdir()
    return known.run_file(directory)


@pytest.fixture(scope="module")
def recording(run: RunFile) -> MemoryLog:
    """A run with threads for parts. The learner ends last, when it has trained on every batch."""
    log = MemoryLog(
        {topic.name.removeprefix(f"{run.run}."): topic.partitions for topic in topics.plan(run)}
    )
    stops = {name: threading.Event() for name in known.parts(run)}
    threads = {
        name: threading.Thread(target=part.main, args=(run, log, stop, name))
        for name, stop in stops.items()
    }

    def count(topic: str) -> int:
        return len(list(read(log, topic, 0, 0)))

    def end(*names: str) -> None:
        for name in names:
            stops[name].set()
        for name in names:
            threads[name].join(patience(20))
            assert not threads[name].is_alive(), name

    for thread in threads.values():
        thread.start()
    until(lambda: count("policy-versions") > BATCHES)
    end(*(stops.keys() - {"learner"}))
    until(lambda: count("policy-versions") > count("batches"))
    end("learner")
    return log


@pytest.fixture
def log(recording: MemoryLog) -> MemoryLog:
    """A copy to be altered."""
    made = MemoryLog(recording.topics())
    made._partitions.update(
        {where: list(messages) for where, messages in recording._partitions.items()}
    )
    return made


def messages(log: MemoryLog, topic: str) -> Iterable[tuple[TopicPartition, int, Message]]:
    return [
        (w, i, m)
        for w, there in log._partitions.items()
        if w[0] == topic
        for i, m in enumerate(there)
        if m is not None
    ]


def remove(log: MemoryLog, topic: str, true: Callable[[Any], bool] = lambda record: True) -> None:
    """Take the first such record out; a hole stays."""
    where, index, _ = next(found for found in messages(log, topic) if true(record_of(found[2])))
    log._partitions[where][index] = None


def append(log: Log, topic: str, record: Record, key: str = "") -> None:
    log.producer().send(to_message(Output(topic, key, record)))


def double(log: MemoryLog, topic: str, true: Callable[[Any], bool] = lambda record: True) -> None:
    """The first such record comes once more at the end."""
    _, _, message = next(found for found in messages(log, topic) if true(record_of(found[2])))
    log.producer().send(message)


def alter(log: MemoryLog, topic: str, **changes: Any) -> None:
    """The first record says something else."""
    where, index, message = next(iter(messages(log, topic)))
    then = record_of(message)
    now = type(then)(
        **{**{name: getattr(then, name) for name in then.__struct_fields__}, **changes}
    )
    log._partitions[where][index] = message._replace(value=encode(now))


def record_of(message: Message) -> Any:
    return decode(dict(message.headers)["schema"], message.value or b"")


def first(log: MemoryLog, topic: str) -> Any:
    return record_of(next(iter(messages(log, topic)))[2])


def is_batched(fate: Any) -> bool:
    return fate.fate == "batched"


def test_an_undisturbed_run_is_clean(recording: MemoryLog, run: RunFile):
    found = verdict(recording, run)
    assert found.clean and found.faults == []
    assert (
        found.batches >= BATCHES
        and found.versions == found.batches + 1
        and found.rollouts > found.batches * 20
    )


Case = tuple[Callable[[MemoryLog], None], Callable[[Verdict], object]]
CASES: dict[str, Case] = {
    "a rollout is gone": (lambda log: remove(log, "rollouts.red"), lambda found: found.lost == 1),
    "a batch is gone": (lambda log: remove(log, "batches"), lambda found: found.lost > 4),
    "a batch came twice": (
        lambda log: double(log, "batches"),
        lambda found: found.trained_twice > 4 and not found.batches_identical,
    ),
    "a fate is gone": (
        lambda log: remove(log, "fates", is_batched),
        lambda found: found.without_fate > 0 and not found.audit_balanced,
    ),
    "a fate came twice": (
        lambda log: double(log, "fates", is_batched),
        lambda found: found.two_fates > 0 and not found.audit_balanced,
    ),
    "a group came twice": (
        lambda log: double(log, "groups.red"),
        lambda found: found.wrong == 1 and not found.batches_identical,
    ),
    "a group is gone": (
        lambda log: remove(log, "groups.red"),
        lambda found: not found.batches_identical,
    ),
    "a reward in a batch differs": (
        lambda log: alter(log, "batches", rewards=first(log, "batches").rewards + 1),
        lambda found: found.wrong > 0 and not found.batches_identical,
    ),
    "a problem came twice": (
        lambda log: (
            [
                append(log, "rollouts.red", known.at_version(r, 0), r.group_id)
                for r in known.rollouts("red", 0)
            ]
            and None
        ),
        lambda found: found.wrong == 1,
    ),
    "a rollout is nobody's": (
        lambda log: alter(log, "rollouts.red", reward=7.0),
        lambda found: found.wrong > 0,
    ),
    "a version is not what training gives": (
        lambda log: alter(log, "policy-versions", sha256="0" * 64),
        lambda found: found.wrong == 1,
    ),
}


@pytest.mark.parametrize("what", CASES)
def test_what_is_wrong_is_found(what: str, log: MemoryLog, run: RunFile):
    spoil, seen = CASES[what]
    spoil(log)
    found = verdict(log, run)
    assert not found.clean and found.faults
    assert seen(found), found


def test_known_rollouts_are_a_function_of_their_number(run: RunFile):
    first = known.rollouts("red", 3)
    again = known.rollouts.__wrapped__("red", 3)
    assert (
        [encode(r) for r in first]
        == [encode(r) for r in again]
        != [encode(r) for r in known.rollouts("blue", 3)]
    )
    made = [rollout for number in range(200) for rollout in known.rollouts("red", number)]
    assert all(isinstance(rollout, Rollout) for rollout in made)
    assert any(rollout.failure for rollout in made) and len(
        {rollout.rollout_uid for rollout in made}
    ) < len(made)


def test_weights_follow_from_every_batch(recording: MemoryLog):
    batches = [record_of(m) for _, _, m in messages(recording, "batches")]
    versions = [record_of(m) for _, _, m in messages(recording, "policy-versions")]
    assert all(isinstance(b, Batch) for b in batches) and all(
        isinstance(v, PolicyVersion) for v in versions
    )
    assert known.trained(known.FIRST_WEIGHTS, batches[0]) == versions[1].sha256
    assert known.trained(known.FIRST_WEIGHTS, batches[1]) != versions[1].sha256
