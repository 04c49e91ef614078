"""The rows of the table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from streamrl.extensions.dashboard import state as dashboard
from streamrl.extensions.recordings.dead_letters import letters
from streamrl.run.monitoring import run_view
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.memory import MemoryLog
from tests.poison import readers
from tests.poison.chain import given
from tests.poison.poisons import DATA_PATH, METRICS, Poison, changed


class Row(NamedTuple):
    poison: str
    topic: str
    parts: str
    end: str
    wrong: str  # empty: it held


def rows() -> Iterator[tuple[str, Callable[[], Row]]]:
    """(name, what runs it) of every row."""
    for poison in DATA_PATH:
        yield f"{poison.topic}: {poison.name}", lambda poison=poison: data_path(poison)
    for name in METRICS:
        yield f"metrics: {name}", lambda name=name: metrics(name)
    yield "dead-letters: a forged letter", forged_letter
    for topic in readers.topics():
        yield f"{topic}: for every reader", lambda topic=topic: every_reader(topic)


def data_path(poison: Poison) -> Row:
    outcome = given(poison.run, poison.make(), "compressed" in poison.name)
    said = outcome.wrong or next(
        (f"must end as {poison.end!r}" for end in outcome.ends if not as_it_must(end, poison.end)),
        "",
    )
    return Row(
        poison.name, poison.topic, "buffer, batcher", "; ".join(dict.fromkeys(outcome.ends)), said
    )


def as_it_must(end: str, expected: str) -> bool:
    for one in expected.split(" or "):
        begins, _, contains = one.partition("...")
        if end.startswith(begins) and contains in end:
            return True
    return False


def metrics(name: str) -> Row:
    """The view that decides when a run has reached its target, and the dashboard: neither ends,
    neither believes it.
    """
    run = Poison("", "", "", list).run
    message = METRICS[name]._replace(partition=0, offset=0)
    try:
        seen = run_view.update_view(run_view.deciding_view(run), [to_event(message, ("metric",))])
        shown = dashboard.new(run)
        dashboard.on_version(shown, message)
        dashboard.loop(dashboard.fold(shown, message), 1.0)
    except Exception as error:
        return Row(
            name, "metrics", "orchestrator, dashboard", "", f"{type(error).__name__}: {error}"
        )
    believed = [
        reward
        for reward in run_view.recent_rewards(seen, "copy", 10)
        if not math.isfinite(reward) or reward > 0
    ]
    return Row(
        name,
        "metrics",
        "orchestrator, dashboard",
        "not believed",
        f"believed: {believed}" if believed else "",
    )


def every_reader(topic: str) -> Row:
    """Whoever reads the topic besides the processors, and the processors' next lives."""
    return Row(
        f"{len(readers.poisons_for(topic))} for every reader",
        topic,
        "status, audit, report, export, replay, dashboard",
        "skipped",
        readers.what_ends(topic),
    )


def forged_letter() -> Row:
    """A letter in the topic of one env's letters that claims to come from another's is not put back
    anywhere.
    """
    (message,) = changed(lambda fields: None)
    forged = [
        ("topic", b"rollouts.add"),
        ("partition", b"0"),
        ("offset", b"0"),
        ("exception.message", b"none"),
    ]
    headers = (*message.headers, *((f"__connect.errors.{name}", value) for name, value in forged))
    log = MemoryLog({"dead-letters.rollouts.copy": 1, "rollouts.add": 1})
    log.append(
        [message._replace(topic="dead-letters.rollouts.copy", headers=headers)], marker=False
    )
    found = list(letters(log, "rollouts.copy"))
    return Row(
        "a forged letter",
        "dead-letters",
        "dead-letters retry",
        "passed over",
        f"would be put back: {found[0]}" if found else "",
    )
