"""What came of a soak, from its topics alone: what `tests/chaos/verdict.py` asks, one fate for each
good rollout, a letter for each bad one, and whether the step of the clock is in the times of
events.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.extensions.recordings.dead_letters import letters
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.protocol import Log, Message
from streamrl.stream.log.reading import read
from streamrl.stream.processor.journal import entries
from streamrl.stream.records import Fate, JournalEntry, PolicyVersion, Rollout
from streamrl.system.errors import StreamrlError
from streamrl.weights.files import describe
from streamrl.weights.pull import pull
from streamrl.weights.store import Store
from tests.chaos import verdict as chaos
from tests.chaos.verdict import Verdict, Where
from tests.soak import known
from tests.support.rubbish import is_rubbish


@dataclass
class Soaked(Verdict):
    """The account of a soak; from `good_without_one_fate` on all are 0 in a run that is well."""

    fates: Counter[str] = field(default_factory=Counter[str])  # of good rollouts
    rubbish: int = 0  # records
    dead_lettered: int = 0  # of them
    # the largest step forward and back between two entries of the batcher's journal
    clock_steps_s: tuple[float, float] = (0.0, 0.0)
    # none, and nobody holds it; or more than one; or `invalid` without being too long
    good_without_one_fate: int = 0
    rubbish_not_dead_lettered: int = 0  # without exactly one letter and the one fate `invalid`
    letters_astray: int = 0  # of records that are no rubbish
    # versions that are kept and do not come as announced, and whatever else lies in the store
    weights_astray: int = 0

    @property
    def clean(self) -> bool:
        more = (
            self.good_without_one_fate
            + self.rubbish_not_dead_lettered
            + self.letters_astray
            + self.weights_astray
        )
        return Verdict.clean.fget(self) and not more  # type: ignore[misc]


def verdict(log: Log, run: RunFile) -> Soaked:
    """Read the topics of a run that has come to rest, and its weight store."""
    found = Soaked()
    where = chaos.look_at_rollouts(log, run, found)
    chaos.look_at_groups(log, run, found, where)
    chaos.look_at_batches(log, run, found, announced_as)
    look_at_fates(log, run, found)
    look_at_weights(log, run, found)
    look_at_times(log, found)
    good = found.rollouts
    found.rollouts = found.rollouts + found.rubbish
    found.make(lambda: chaos.look_at_accounts(log, run, found))
    found.make(lambda: chaos.look_at_replay(log, run, found))
    found.rollouts = good
    if (without := found.good_without_one_fate) != found.in_flight:
        found.say(f"{without} good rollouts without a fate, {found.in_flight} in flight")
    found.good_without_one_fate = max(without - found.in_flight, 0)
    return found


def announced_as(weights: str) -> str:
    """The hash of the manifest of what the learner writes."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "model.safetensors").write_bytes(known.weights(weights))
        return describe(Path(directory)).sha256


def look_at_fates(log: Log, run: RunFile, found: Soaked) -> None:
    """Every good rollout has one, and it is `invalid` only where it is too long; every bad one has
    a letter, and is `invalid`.
    """
    fates: dict[Where, list[str]] = {}
    for message in read(log, "fates", 0):
        fate = to_event(message, ("fate",)).record
        assert isinstance(fate, Fate)
        for offset in fate.offsets.tolist():
            fates.setdefault((fate.environment, fate.partition, offset), []).append(fate.fate)
    dead_lettered = Counter(
        (env, letter.partition, letter.offset)
        for env in run.envs
        for letter in letters(log, topology.rollouts(env))
    )
    for env in run.envs:
        for partition in range(run.topics.partitions):
            for message in read(log, topology.rollouts(env), partition, 0):
                place = env, partition, message.offset
                mine = fates.get(place, [])
                letters_here = dead_lettered.pop(place, 0)
                if is_rubbish(message):
                    found.rubbish += 1
                    found.dead_lettered += letters_here
                    found.rubbish_not_dead_lettered += (mine, letters_here) != (["invalid"], 1)
                else:
                    found.fates.update(mine)
                    refused = is_too_long(message, run)
                    found.good_without_one_fate += (
                        len(mine) != 1 or (mine == ["invalid"]) != refused
                    )
                    found.letters_astray += letters_here != (refused and bool(mine))
    found.letters_astray += dead_lettered.total()


def is_too_long(message: Message, run: RunFile) -> bool:
    """Is this rollout longer than the model takes? The buffer puts it aside."""
    record = to_event(message, ("rollout",)).record
    assert isinstance(record, Rollout)
    return record.total_tokens > run.model.max_seq_len


def look_at_weights(log: Log, run: RunFile, found: Soaked) -> None:
    """The store holds the newest versions, each as announced, and nothing else: nothing is left of
    what could not be written.
    """
    announced = {
        v.version: v
        for e in chaos.events(log, "policy-versions", "policy-version")
        if isinstance(v := e.record, PolicyVersion)
    }
    root = f"{run.store}/{run.learner.name}"
    kept = Store(root).versions()
    wanted = sorted(announced)[-known.KEEP_VERSIONS :]
    found.weights_astray = (
        len(set(kept) ^ set(wanted))
        + len([*Path(root.removeprefix("file://")).iterdir()])
        - len(kept)
    )
    for version in kept:
        with tempfile.TemporaryDirectory() as directory:
            try:
                pull(announced[version], root, Path(directory) / "weights")
            except (KeyError, StreamrlError) as error:
                found.weights_astray += 1
                found.say(f"version {version} in the store: {error}")


def look_at_times(log: Log, found: Soaked) -> None:
    times_s = [
        record.time_s
        for _, record in entries(log, "journal.batcher")
        if isinstance(record, JournalEntry)
    ]
    steps = [b - a for a, b in pairwise(times_s)] or [0.0]
    found.clock_steps_s = max(steps), min(steps)
