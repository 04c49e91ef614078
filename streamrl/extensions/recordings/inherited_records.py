"""The records of a parent that its fork has too, from what the parent's topics hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.extensions.recordings.inheritance import GroupIndex, GroupKey, next_problem
from streamrl.learner.inputs import read_batches
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.protocol import Log, Message, Output
from streamrl.stream.log.records_of import records_of, rollouts_of
from streamrl.stream.processor.journal import last_record
from streamrl.stream.records import EnvProgress, Visit
from streamrl.weights.announcements import read_announcements
from streamrl.weights.bases import copy_base


def inherited_versions(old: Log, parent: RunFile, run: RunFile, uri: str) -> Iterator[Message]:
    """The parent's announcements up to the fork's first version, whose weights are at `uri`. If it
    is an adapter, its base is copied to the fork's store.
    """
    assert run.fork is not None
    learner = run.learner.name
    for record in read_announcements(old, parent.learner.name):
        if record.version <= run.fork.version:
            inherited = msgspec.structs.replace(record, learner=learner)
            if record.version == run.fork.version:
                base = record.base and copy_base(record.base, parent.store, run.store)
                inherited = msgspec.structs.replace(inherited, uri=uri, base=base)
            yield to_message(Output(topology.POLICY_VERSIONS, learner, inherited))


def env_progress(
    old: Log, parent: RunFile, run: RunFile, groups: Mapping[str, int]
) -> Iterator[Message]:
    """The first journal entry of each env replica: it continues after the parent's problems.

    `groups` has the number of groups that the fork inherits, by producer.
    """
    posed: dict[str, int] = {}  # producer -> its next problem
    for topic in old.topics():
        if topic.startswith(f"{topology.JOURNAL}.env-"):
            last = last_record(old, topic, EnvProgress)
            if last is not None:
                posed[last.producer] = last.next_problem
    for name, env in run.envs.items():
        parents_next: list[int] = []
        if name in parent.envs:
            producers = [topology.producer(name, i) for i in range(parent.envs[name].producers)]
            parents_next = [posed[producer] for producer in producers if producer in posed]
        for i in range(env.producers):
            producer = topology.producer(name, i)
            record = EnvProgress(
                producer=producer,
                next_problem=next_problem(parents_next, i, env.producers),
                published_groups=groups.get(producer, 0),
                replicas=env.producers,
                begins=max(parents_next, default=0),
            )
            yield to_message(Output(topology.env_journal(run, name, i), producer, record))


def inherited_visits(old: Log, parent: RunFile, run: RunFile) -> Iterator[Message]:
    """The visits to problems that versions up to the fork's first one have made, as far as
    compaction has left them. An env whose kind or params have changed inherits none.
    """
    assert run.fork is not None
    for name, env in run.envs.items():
        topic = topology.visits(name)
        before = parent.envs.get(name)
        if (
            not env.pass_rate
            or before is None
            or (before.kind, before.params) != (env.kind, env.params)
            or topic not in old.topics()
        ):
            continue
        for visit, message in records_of(old, topic, Visit):
            if visit.policy_version <= run.fork.version:
                yield message


def index_groups(old: Log, parent: RunFile, run: RunFile) -> GroupIndex:
    """All recorded groups of the envs that parent and fork share, and those of them that are in
    batches before the fork's first.
    """
    assert run.fork is not None
    index = GroupIndex()
    for batch, _ in read_batches(old):
        if batch.number >= run.fork.version:
            break
        index.add_batch(batch)
    for _, rollout, _ in rollouts_of(old, [env for env in run.envs if env in parent.envs]):
        index.add_rollout(rollout)
    return index


def inherited_rollouts(
    old: Log, run: RunFile, groups: Mapping[GroupKey, None]
) -> Iterator[Message]:
    """The recorded rollouts of these groups, in the order of their topics."""
    for _, rollout, message in rollouts_of(old, run.envs):
        if (rollout.environment, rollout.group_id) in groups:
            yield message
