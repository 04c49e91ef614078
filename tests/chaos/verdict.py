"""What came of a run, from its topics alone: every rollout there as it is known to be, trained once
at most, with one fate at most; and the same when replayed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.config.topology import env_part, journal
from streamrl.extensions.recordings.audit import audit
from streamrl.extensions.recordings.processors import processors_of
from streamrl.extensions.recordings.replay import replay
from streamrl.learner.inputs import read_batches
from streamrl.stream.log.codec import encode, to_event
from streamrl.stream.log.protocol import Event, Log
from streamrl.stream.log.reading import portions, read
from streamrl.stream.log.records_of import messages_of
from streamrl.stream.processor.joiner import Joiner
from streamrl.stream.processor.journal import last_record
from streamrl.stream.records import (
    Batch,
    EnvProgress,
    Fate,
    JoinedGroup,
    PolicyVersion,
    Rollout,
    ScoredGroup,
)
from streamrl.stream.records.sequences import sampled_counts
from streamrl.system.errors import StreamrlError
from tests.chaos import known
from tests.support.rubbish import is_rubbish

NAMED = 20  # faults in words, beside the errors of whole accounts; all are counted

Where = tuple[str, int, int]  # env, partition, offset


@dataclass
class Verdict:
    """The account of a run; all but the first five are 0, or true, in a run that is well."""

    rollouts: int = 0
    groups: int = 0
    batches: int = 0
    versions: int = 0
    in_flight: int = 0  # rollouts that a part holds in the end
    # rollouts that their env has published or the batcher put into a batch, and that are not there
    lost: int = 0
    trained_twice: int = 0  # further occurrences of a rollout in the batches
    two_fates: int = 0
    without_fate: int = 0  # and nobody holds them
    audit_balanced: bool = False
    # to those of the replay of the journals, byte for byte; groups as well
    batches_identical: bool = False
    wrong: int = 0  # whatever else is not as it must be
    faults: list[str] = field(default_factory=list[str])  # some of it, in words

    @property
    def clean(self) -> bool:
        bad = self.lost + self.trained_twice + self.two_fates + self.without_fate + self.wrong
        return not bad and self.audit_balanced and self.batches_identical and self.batches > 0

    def fault(self, what: str) -> None:
        """Count a fault, and name it if it is among the first."""
        self.wrong += 1
        if self.wrong <= NAMED:
            self.say(what)

    def say(self, what: str) -> None:
        self.faults.append(what)

    def make(self, account: Callable[[], None]) -> None:
        """Make an account that may end in an error, as of a journal that cannot be folded again."""
        try:
            account()
        except StreamrlError as error:
            self.wrong += 1
            self.say(str(error))


def verdict(log: Log, run: RunFile) -> Verdict:
    """Read the topics of a run that has come to rest."""
    found = Verdict()
    where = look_at_rollouts(log, run, found)
    look_at_groups(log, run, found, where)
    look_at_batches(log, run, found)
    found.make(lambda: look_at_accounts(log, run, found))
    found.make(lambda: look_at_replay(log, run, found))
    return found


def look_at_rollouts(log: Log, run: RunFile, found: Verdict) -> dict[Where, str]:
    """Each env has published what it says, each problem once and as known. Returns whose uid lies
    where.
    """
    where: dict[Where, str] = {}
    for env in run.envs:
        there: dict[int, list[str]] = {}
        for event in events(log, topology.rollouts(env), "rollout"):
            found.rollouts += 1
            if not isinstance(event.record, Rollout) or not is_known(env, event.record):
                found.fault(f"{event} is not a rollout of {env}")
                continue
            where[env, event.partition, event.offset] = event.record.rollout_uid
            there.setdefault(number_of(event.record.group_id), []).append(event.record.rollout_uid)
        progress = last_record(log, journal(env_part(env, 0)), EnvProgress) or EnvProgress(
            producer="", next_problem=0
        )
        published = set(range(progress.next_problem)) - set(progress.open_problems)
        for number in sorted(published | there.keys()):
            wanted = (
                [rollout.rollout_uid for rollout in known.rollouts(env, number)]
                if number in published
                else []
            )
            if there.get(number, []) != wanted:
                found.lost += (Counter(wanted) - Counter(there.get(number, []))).total()
                found.fault(
                    f"problem {number} of {env} has rollouts {there.get(number, [])}, not {wanted}"
                )
    return where


def is_known(env: str, rollout: Rollout) -> bool:
    same = [
        one
        for one in known.rollouts(env, number_of(rollout.group_id))
        if one.rollout_uid == rollout.rollout_uid
    ]
    return bool(same) and encode(known.at_version(same[0], rollout.policy_version)) == encode(
        rollout
    )


def look_at_groups(log: Log, run: RunFile, found: Verdict, where: dict[Where, str]) -> None:
    """Each group closed once, of rollouts that lie where it says, with their tokens and the
    advantages of their rewards.
    """
    closed = Counter[str]()
    for env in run.envs:
        for group in joined_groups(log, run, env):
            found.groups += 1
            closed[group.group_id] += 1
            there = [where.get((env, group.partition, offset)) for offset in group.offsets.tolist()]
            if there != group.uids or len(set(there)) != len(there):
                found.fault(
                    f"group {group.group_id} has the rollouts {group.uids}; where it says lie"
                    f" {there}"
                )
            members = members_of_group(group) if isinstance(group, JoinedGroup) else ()
            for member, advantage in zip(members, group.advantages, strict=True):
                # of the others
                mean = (float(group.rewards.sum()) - float(member.reward)) / max(
                    len(group.uids) - 1, 1
                )
                if not is_same(member) or not np.isclose(advantage, member.reward - mean):
                    found.fault(f"{member.uid} is not in group {group.group_id} as it was sampled")
    for name in [name for name, times in closed.items() if times > 1]:
        found.fault(f"group {name} was closed {closed[name]} times")


def joined_groups(log: Log, run: RunFile, env: str) -> Iterator[ScoredGroup]:
    """The groups of an env, joined with their rollouts."""
    joiner = Joiner(log, processors_of(run)["batcher"])
    with closing(joiner):
        for portion in portions(messages_of(log, topology.groups(env))):
            for event in joiner.events(portion):
                assert isinstance(event.record, ScoredGroup), event
                yield event.record


def look_at_batches(
    log: Log, run: RunFile, found: Verdict, sha256_of: Callable[[str], str] = str
) -> None:
    """Batches follow each other, hold what their fates say, each rollout once, as it was sampled;
    and versions are what training on them gives.

    `sha256_of`: what weights are announced as.
    """
    weights = [known.FIRST_WEIGHTS]
    trained = Counter[tuple[str, int]]()
    for batch, _ in read_batches(log):
        if batch.number != found.batches:
            found.fault(f"batch {batch.number} came where batch {found.batches} was due")
        found.batches += 1
        weights.append(known.trained(weights[-1], batch))
        trained.update((uid, batch.number) for uid in batch.uids)
        for member in members_of_batch(batch):
            if not is_same(member):
                found.fault(f"{member.uid} is not in batch {batch.number} as it was sampled")
    fated = Counter(
        (uid, f.batch or 0)
        for event in events(log, "fates", "fate")
        if (f := fate_of(event)).fate == "batched"
        for uid in f.uids
    )
    found.lost += (fated - trained).total()
    for uid, number in trained - fated:
        found.fault(f"{uid} is in batch {number}, and no fate says so")
    found.trained_twice = sum(
        times - 1 for times in Counter(uid for uid, _ in trained.elements()).values()
    )
    announced = [event.record for event in events(log, "policy-versions", "policy-version")]
    found.versions = len(announced)
    wanted = [
        (version, sha256_of(of), version - 1 if version else None)
        for version, of in enumerate(weights)
    ]
    if (
        there := [(v.version, v.sha256, v.batch) for v in announced if isinstance(v, PolicyVersion)]
    ) != wanted:
        found.fault(
            f"{len(there)} versions are announced and are not the {len(wanted)} that the batches"
            " give"
        )


def look_at_accounts(log: Log, run: RunFile, found: Verdict) -> None:
    account = audit(log, run)
    found.two_fates, found.without_fate, found.in_flight = (
        account.repeated,
        account.lost,
        account.total("in flight"),
    )
    found.audit_balanced = account.balanced and account.published == found.rollouts
    for problem in account.problems:
        found.say(problem)


def look_at_replay(log: Log, run: RunFile, found: Verdict) -> None:
    """Groups and batches are those of the journals: no other, no more and no less."""
    replayed = {name: replay(log, part)[0] for name, part in processors_of(run).items()}
    for result in replayed.values():
        if result.difference:
            found.say(f"replay: {result.difference}")
    counts = (
        sum(result.identical.get("groups", 0) for result in replayed.values()),
        replayed["batcher"].identical.get("batches"),
    )
    found.batches_identical = counts == (found.groups, found.batches) and not any(
        result.difference for result in replayed.values()
    )


class Member(NamedTuple):
    """A rollout as a group or a batch has it."""

    uid: str
    group_id: str
    prompt: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    reward: np.float32


def members_of_group(group: JoinedGroup) -> Iterator[Member]:
    tokens = pieces(group.tokens, group.lengths)
    logprobs = pieces(group.policy_logprobs, sampled_counts(group))
    for i, uid in enumerate(group.uids):
        yield Member(uid, group.group_id, group.prompt, tokens[i], logprobs[i], group.rewards[i])


def members_of_batch(batch: Batch) -> Iterator[Member]:
    tokens = pieces(batch.tokens, batch.lengths)
    logprobs = pieces(batch.policy_logprobs, sampled_counts(batch))
    prompts = pieces(batch.prompts, batch.prompt_lengths)
    for i, (uid, group) in enumerate(zip(batch.uids, batch.groups, strict=True)):
        yield Member(
            uid, batch.group_ids[group], prompts[group], tokens[i], logprobs[i], batch.rewards[i]
        )


def is_same(member: Member) -> bool:
    """Is it what its env made?"""
    env, number = member.group_id.split("-")
    made = next(
        (
            one
            for one in known.rollouts(env, int(number))
            if one.rollout_uid == member.uid and not one.failure
        ),
        None,
    )
    if made is None or made.sampled_tokens != len(member.tokens):
        return False
    asked, answered = made.turns
    pairs = (
        (asked.tokens, member.prompt),
        (answered.tokens, member.tokens),
        (answered.logprobs, member.logprobs),
    )
    return made.reward == member.reward and all(
        np.array_equal(then, now) for then, now in pairs if then is not None
    )


def pieces(array: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """(sum of lengths,) cut into pieces of these lengths."""
    return np.split(array, np.cumsum(lengths)[:-1]) if len(lengths) else []


def fate_of(event: Event) -> Fate:
    assert isinstance(event.record, Fate)
    return event.record


def number_of(group_id: str) -> int:
    return int(group_id.rpartition("-")[2])


def events(log: Log, topic: str, schema: str) -> Iterator[Event]:
    """All of a topic, partition by partition, but for what `tests/support/rubbish.py` has put
    there.
    """
    for partition in range(log.topics()[topic]):
        for message in read(log, topic, partition):
            if not is_rubbish(message):
                yield to_event(message, (schema,))
