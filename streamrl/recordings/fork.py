"""`streamrl fork`: makes a run that begins with a policy version of another run, its parent, under
a changed configuration.

A fork at version k announces version k first and trains on batch k first, so ages and probes keep
their meaning. Its topics begin with the versions up to k, the positions of its envs in their
problems and, on request, the parent's rollouts. From these rollouts the fork makes its first batch
at once, in the parent's recorded order. The batch is journaled as usual, so the fork's parts start
as after any restart. The parent's topics are only read.
"""

from __future__ import annotations

import heapq
import shutil
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
from rich.console import Console

from streamrl.batcher import process as batcher
from streamrl.batcher.curriculum import advance
from streamrl.batcher.settings import curriculum_rules, first_state
from streamrl.buffer import process as buffer
from streamrl.config import topology
from streamrl.config.choices import NAME
from streamrl.config.run_file import RunFile, changed
from streamrl.config.sections.batches import Curriculum
from streamrl.config.sections.operation import Fork
from streamrl.errors import ConfigError, InputGone, StreamrlError
from streamrl.learner.inputs import announced_hashes, read_announcements, read_batches
from streamrl.local_kafka import connect
from streamrl.log import topics
from streamrl.log.codec import encode, to_event, to_message
from streamrl.log.kafka import KafkaLog
from streamrl.log.protocol import (
    Event,
    Log,
    Message,
    Output,
    TopicPartition,
    portions,
)
from streamrl.log.records_of import messages_of, records_of
from streamrl.orchestrator.run_directory import write_run_file
from streamrl.processor.definition import Processor, ProcessorState
from streamrl.processor.journal import SliceReader, entries, last_record
from streamrl.processor.restore import replay_entry, restore_earliest
from streamrl.processor.retention import is_gone
from streamrl.processor.transaction import process_batch
from streamrl.recordings.fork_rewards import (
    RewardedCopy,
    RewardsByUid,
    ScorerVersion,
    read_rewards,
)
from streamrl.recordings.inheritance import BatcherCut, GroupIndex, GroupKey, next_problem
from streamrl.recordings.progress import OnProgress, progress_bar
from streamrl.records import (
    EnvProgress,
    JournalEntry,
    PolicyVersion,
    Record,
    Rollout,
    ScoredGroup,
    Visit,
)
from streamrl.weights.bases import copy_base
from streamrl.weights.store import WeightRef


class ForkResult(NamedTuple):
    """The records that a fork begins with."""

    run: RunFile
    groups: int
    rollouts: int
    has_batch: bool  # whether the rollouts were enough for its first batch
    batches: int = 0  # made of rollouts with new rewards


def show_fork(
    parent: RunFile,
    name: str,
    version: int,
    overrides: Sequence[str],
    with_rollouts: bool,
    scorers: Sequence[ScorerVersion],
    time_s: float,
    console: Console,
) -> None:
    """Make the fork and print what it begins with. For the arguments and errors see `fork`."""
    with progress_bar(f"computing version {version}", Console(stderr=True)) as progress:
        made = fork(parent, name, version, overrides, with_rollouts, scorers, time_s, progress)
    assert made.run.fork is not None
    console.print(
        f"run {name} begins with version {version} of {parent.run}, sha256 {made.run.fork.sha256}"
        " as announced",
        highlight=False,
    )
    if with_rollouts:
        batch = (
            f"batch {version} is made of them" if made.has_batch else "they do not make a batch yet"
        )
        console.print(
            f"it has {made.rollouts:,} rollouts of {made.groups:,} groups; {batch}", highlight=False
        )
    if scorers:
        console.print(
            f"it has {made.rollouts:,} rollouts of {made.groups:,} groups with rewards of"
            f" {', '.join(map(str, scorers))}, and {made.batches:,} batches of them; its envs have"
            " `replicas: 0`",
            highlight=False,
        )
    console.print(f"go on with it: streamrl up {name} --resume", highlight=False, soft_wrap=True)


def fork(
    parent: RunFile,
    name: str,
    version: int,
    overrides: Sequence[str],
    with_rollouts: bool,
    scorers: Sequence[ScorerVersion],
    time_s: float,
    progress: OnProgress,
) -> ForkResult:
    """Fork `parent` at `version` as run `name`. With `scorers` it has all recorded rollouts from
    there on, with their rewards.

    This makes the run's directory, and its topics on the parent's cluster or on a local broker.
    `time_s` is now, in seconds since the epoch. If it fails, it leaves nothing behind. Raises
    ConfigError for a version or a setting that cannot be forked, InputGone if retention has deleted
    what is needed, and VersionMismatch if the weights do not come out as announced.
    """
    run = child_run_file(parent, name, overrides)
    with ExitStack() as stack:
        old = KafkaLog(stack.enter_context(connect.connect_or_start(parent)), parent.run)
        announced = announced_hashes(old, parent.learner.name)
        if version not in announced:
            raise ConfigError(
                f"--at {version}: run {parent.run} has not announced that version; the newest is"
                f" {max(announced, default=-1)}"
            )
        run = run.model_copy(
            update={"fork": Fork(run=parent.run, version=version, sha256=announced[version])}
        )
        shared = [env for env in run.envs if env in parent.envs]
        rewards = read_rewards(old, shared, scorers)
        stack.enter_context(_new_directory(run))
        settings = stack.enter_context(connect.connect_or_start(run, create=True))
        recorded = {topology.rewards(env): run.topics.partitions for env in rewards}
        topics.create(run, settings, recorded)
        with _topics_gone_on_failure(run, settings):
            stored = _seed(parent, run, old, version, progress)
            new = KafkaLog(settings, run.run)
            made = (
                copy_rewarded(old, new, parent, run, stored.uri, scorers, rewards)
                if scorers
                else copy_topics(old, new, parent, run, stored.uri, with_rollouts, time_s)
            )
            # The run file comes last, because a directory without one is no run.
            write_run_file(made.run)
    return made


def child_run_file(parent: RunFile, name: str, overrides: Sequence[str]) -> RunFile:
    """The run file of a fork, without its section `fork`.

    Raises ConfigError for a change that does not fit the parent's weights.
    """
    for override in overrides:
        if override.startswith(("fork", "run=")):
            raise ConfigError(f"--set {override}: --as and --at say that")
    if not NAME.fullmatch(name):
        raise ConfigError(f"--as {name}: not a name of lowercase letters, digits and '-'")
    run = changed(parent, overrides).model_copy(update={"run": name})
    if run.model != parent.model:
        raise ConfigError(
            f"--set model...: a fork goes on with the weights of {parent.run}, so model, vocabulary"
            " and tokenizer stay what they are"
        )
    if run.learner.optimizer != parent.learner.optimizer:
        raise ConfigError(
            f"--set learner.optimizer: a fork goes on with the state of {parent.learner.optimizer};"
            " begin a new run from an export instead (`streamrl export-model`, then model.path)"
        )
    if run.learner.lora != parent.learner.lora:
        raise ConfigError(
            f"--set learner.lora...: a fork goes on with the weights of {parent.run}, which are"
            " those of its adapters, or of a whole model; begin a new run from an export instead"
            " (`streamrl export-model`, then model.path)"
        )
    return run


def _seed(parent: RunFile, run: RunFile, old: Log, version: int, progress: OnProgress) -> WeightRef:
    # JAX does not support that its process forks, so it is imported after the broker has started.
    from streamrl.learner.recompute import seed_fork

    return seed_fork(parent, run, old, version, progress)


# ---- the first records of the topics -------------------------------------------------------------


def copy_topics(
    old: Log, new: Log, parent: RunFile, run: RunFile, uri: str, with_rollouts: bool, time_s: float
) -> ForkResult:
    """Write the first records of a fork to its topics.

    The fork's first version is `run.fork.version`, and its weights lie at `uri`. The run file that
    is returned also has the states of the curriculum and of the batcher's balance.
    """
    run = with_curriculum_state(old, parent, run)
    assert run.fork is not None
    writer = new.writer("fork")
    _copy(writer.commit, inherited_versions(old, parent, run, uri))
    _copy(writer.commit, inherited_visits(old, parent, run))
    if not with_rollouts:
        _copy(writer.commit, env_progress(old, parent, run, {}))
        return ForkResult(run, 0, 0, False)
    version = run.fork.version
    cut = batcher_cut(old, parent, version)
    # The balance between the envs' shares means nothing when the shares have changed.
    if curriculum_settings(run) == curriculum_settings(parent):
        run = run.model_copy(update={"fork": run.fork.model_copy(update={"balance": cut.balance})})
    index = index_groups(old, parent, run)
    max_age = max(run.buffer_of(env).max_age for env in run.envs)
    groups = index.inherited(version, max_age) | dict.fromkeys(cut.held)
    # The groups that the parent's batcher held come first, in the order in which its buffer read
    # their rollouts.
    recorded_order = list(in_buffer_order(old, parent, dict.fromkeys(cut.held), version))
    first = [message for message in recorded_order if message.topic.startswith(topology.ROLLOUTS)]
    _copy(writer.commit, first)
    has_batch = first_batch(new, run, recorded_order, cut, time_s)
    copied = {(message.topic, message.partition, message.offset) for message in first}
    others = (
        message
        for message in inherited_rollouts(old, run, groups)
        if (message.topic, message.partition, message.offset) not in copied
    )
    count = len(first) + _copy(writer.commit, others)
    groups_of_producers = Counter(index.producers[group] for group in groups)
    _copy(writer.commit, env_progress(old, parent, run, groups_of_producers))
    writer.close()
    return ForkResult(run, len(groups), count, has_batch)


def copy_rewarded(
    old: Log,
    new: Log,
    parent: RunFile,
    run: RunFile,
    uri: str,
    scorers: Sequence[ScorerVersion],
    rewards: Mapping[str, RewardsByUid],
) -> ForkResult:
    """Write the first records of a fork that trains on recorded rollouts with other rewards: those
    of `scorers`, which are `rewards` by env.

    The run file that is returned starts no env: what an env sampled before the recorded rollouts
    are trained on would be too old.
    """
    run = with_curriculum_state(old, parent, run)
    assert run.fork is not None
    version = run.fork.version
    writer = new.writer("fork")
    _copy(writer.commit, inherited_versions(old, parent, run, uri))
    _copy(writer.commit, inherited_visits(old, parent, run))
    writer.close()
    changes: dict[str, Any] = {"scorers": [str(scorer) for scorer in scorers]}
    if curriculum_settings(run) == curriculum_settings(parent):
        changes["balance"] = batcher_cut(old, parent, version).balance
    envs = {name: env.model_copy(update={"replicas": 0}) for name, env in run.envs.items()}
    stopped = run.model_copy(update={"fork": run.fork.model_copy(update=changes), "envs": envs})
    trained = groups_before(old, version)
    copy = RewardedCopy(
        old=old, new=new, parent=parent, run=stopped, rewards=rewards, trained=trained
    )
    copy.copy()
    writer = new.writer("fork")
    _copy(writer.commit, env_progress(old, parent, run, copy.groups_of_producers()))
    writer.close()
    batches = sum(1 for _ in read_batches(new))
    return ForkResult(
        run=stopped,
        groups=len(copy.producers),
        rollouts=copy.rollouts,
        has_batch=batches > 0,
        batches=batches,
    )


def groups_before(old: Log, version: int) -> dict[GroupKey, None]:
    """The groups in the batches before `version`."""
    index = GroupIndex()
    for batch, _ in read_batches(old):
        if batch.number >= version:
            break
        index.add_batch(batch)
    return index.trained


def inherited_versions(old: Log, parent: RunFile, run: RunFile, uri: str) -> Iterator[Message]:
    """The parent's announcements up to the fork's first version, whose weights lie at `uri`. If it
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
            yield to_message(Output(topology.journal(topology.env_part(name, i)), producer, record))


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


def batcher_cut(old: Log, parent: RunFile, version: int) -> BatcherCut:
    """The parent's batcher when it made batch `version`, from a replay of its journal.

    Raises InputGone if retention has deleted what the batch was made of, and StreamrlError if the
    replay leads to another batch than the recorded one.
    """
    cut = BatcherCut(version)
    part = replace(batcher.part(parent), step=cut.step)
    fold, start, tape = restore_earliest(old, part)
    if fold.state.next_batch > version:
        before = (
            f"retention has deleted what batch {version} of run {parent.run} was made of; the first"
            f" that is there is {fold.state.next_batch}"
        )
        raise InputGone(f"{before}: fork without --rollouts, or at a later version")
    for _, entry in entries(old, topology.journal(part.name), start):
        if isinstance(entry, JournalEntry) and entry.sequence > fold.sequence and cut.batch is None:
            replay_entry(part, fold, entry, tape)
    tape.close()
    if cut.batch is None:
        cut.remember(fold.state)
    recorded = next((batch for batch, _ in read_batches(old) if batch.number == version), None)
    if (cut.batch and encode(cut.batch)) != (recorded and encode(recorded)):
        wrong = (
            f"the journal of {part.name} of run {parent.run} does not lead to its batch {version}"
        )
        raise StreamrlError(
            f"{wrong}: the code has changed since (`streamrl replay {parent.run}` says where); fork"
            " without --rollouts"
        )
    return cut


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
    for _, event in recorded_rollouts(old, [env for env in run.envs if env in parent.envs]):
        if isinstance(event.record, Rollout):
            index.add_rollout(event.record)
    return index


def inherited_rollouts(
    old: Log, run: RunFile, groups: Mapping[GroupKey, None]
) -> Iterator[Message]:
    """The recorded rollouts of these groups, in the order of their topics."""
    for message, event in recorded_rollouts(old, run.envs):
        record = event.record
        if isinstance(record, Rollout) and (record.environment, record.group_id) in groups:
            yield message


def in_buffer_order(
    old: Log, parent: RunFile, groups: Mapping[GroupKey, None], version: int
) -> Iterator[Message]:
    """The rollouts of these groups and the versions up to `version`, in the order in which the
    parent's buffer read them. Its shards are merged by the times of their journal entries.
    """
    newest = -1
    shards = [read_by_shard(old, parent, shard, version) for shard in buffer.shards(parent)]
    for _, message, record in heapq.merge(*shards, key=lambda found: found[0]):
        if isinstance(record, PolicyVersion) and record.version > newest:
            newest = record.version  # Each shard has read the version, and it is yielded once.
            yield message
        elif isinstance(record, Rollout) and (record.environment, record.group_id) in groups:
            yield message


def read_by_shard(
    old: Log, parent: RunFile, shard: Processor[Any, Any], version: int
) -> Iterator[tuple[float, Message, Record]]:
    """The messages that a shard of the parent's buffer read before the first version above
    `version`. Each comes with the time of its journal entry and its record.
    """
    reader = SliceReader(old, shard.schemas_of)
    begin = old.beginning_offsets(shard.partitions(old))
    slices = (
        (entry.time_s, piece)
        for _, entry in entries(old, shard.journal)
        if isinstance(entry, JournalEntry)
        for piece in entry.slices
        if not is_gone(piece.start, begin.get((piece.topic, piece.partition), 0))
    )
    with closing(reader):
        for time_s, piece in slices:
            for message in reader.read_slice(piece):
                record = to_event(message, shard.schemas_of(message.topic)).record
                if isinstance(record, PolicyVersion):
                    if record.learner != parent.learner.name:
                        continue
                    if record.version > version:
                        return
                if isinstance(record, Record):
                    yield time_s, message, record


# ---- the first batch -----------------------------------------------------------------------------


def first_batch(
    new: Log, run: RunFile, order: Sequence[Message], cut: BatcherCut, time_s: float
) -> bool:
    """Do the first work of the fork's buffer and batcher, and write it to their journals.

    The buffer reads the rollouts that the parent's batcher held, in the recorded `order`. The
    batcher reads their groups, and then the version that the parent's batcher had read. Returns
    whether that makes a batch. Under other settings a batch may need more groups.
    """
    versions = {
        record.version: message
        for record, message in records_of(new, topology.POLICY_VERSIONS, PolicyVersion)
    }
    if not cut.held or cut.version not in versions:
        return False
    read = _copies_in_order(new, run, order, versions)
    for shard in buffer.shards(run):
        own = [message for message in read if shard.takes(message.topic, message.partition)]
        _process_as(new, shard, own, {}, time_s)
    scored = {
        (record.environment, record.group_id): message
        for env in run.envs
        for record, message in records_of(new, topology.groups(env), ScoredGroup)
    }
    version = versions[cut.version]
    groups = [scored[group] for group in cut.held if group in scored]
    offsets = {(version.topic, version.partition): version.offset}
    _process_as(new, batcher.part(run), [*groups, version], offsets, time_s)
    return next(read_batches(new), None) is not None


def _copies_in_order(
    new: Log, run: RunFile, order: Sequence[Message], versions: Mapping[int, Message]
) -> list[Message]:
    """The fork's copies of the parent's messages, in the order of `order`.

    `versions` has the announcements in the fork's topic, by version.
    """
    # Messages with the same key lie in one partition, so they have kept their order.
    copies: dict[tuple[str, bytes | None], deque[Message]] = {}
    for topic in (topology.rollouts(env) for env in run.envs):
        for _, message in records_of(new, topic, Rollout):
            copies.setdefault((topic, message.key), deque()).append(message)
    announced = deque(versions[number] for number in sorted(versions))
    found: list[Message] = []
    for message in order:
        is_version = message.topic == topology.POLICY_VERSIONS
        queue = announced if is_version else copies[message.topic, message.key]
        found.append(queue.popleft())
    return found


def _process_as(
    log: Log,
    part: Processor[Any, Any],
    messages: Sequence[Message],
    offsets: Mapping[TopicPartition, int],
    time_s: float,
) -> None:
    """Process these messages as the part would, in its first transactions.

    `offsets` has the partitions that the part does not begin to read at their start.
    """
    writer = log.writer(part.name)
    meter = log.producer()
    fold = ProcessorState(part.initial(), offsets=dict(offsets))
    for portion in portions(messages):
        for metric in process_batch(part, fold, portion, time_s, writer.commit).metrics:
            meter.send(metric)
    meter.flush()
    meter.close()
    writer.close()


# ---- messages ------------------------------------------------------------------------------------


def _copy(commit: Any, messages: Iterable[Message]) -> int:
    """Write copies of messages to the partitions of their keys. Returns the number of messages."""
    count = 0
    for portion in portions(messages):
        commit([message._replace(partition=-1, offset=-1) for message in portion])
        count += len(portion)
    return count


def recorded_rollouts(log: Log, envs: Iterable[str]) -> Iterator[tuple[Message, Event]]:
    """All messages in the rollout topics of these envs, each with its event."""
    for env in envs:
        for message in messages_of(log, topology.rollouts(env)):
            yield message, to_event(message, ("rollout",))


def curriculum_settings(run: RunFile) -> tuple[dict[str, float], Curriculum]:
    """The settings that decide the envs' shares of a batch."""
    return {name: env.fraction for name, env in run.envs.items()}, run.batcher.curriculum


def with_curriculum_state(old: Log, parent: RunFile, run: RunFile) -> RunFile:
    """The fork's run file, with the curriculum's state after the parent's earlier batches."""
    assert run.fork is not None
    rules = curriculum_rules(run)
    progress = first_state(parent.fork).progress
    if rules.kind == "none":
        return run
    for batch, _ in read_batches(old):
        if batch.number >= run.fork.version:
            break
        progress = advance(rules, progress, batch)
    state = {"stage": progress.stage, "rewards": progress.rewards}
    return run.model_copy(update={"fork": run.fork.model_copy(update=state)})


# ---- undone on failure ---------------------------------------------------------------------------


@contextmanager
def _new_directory(run: RunFile) -> Iterator[None]:
    """Make the fork's directory, and remove it if the block fails."""
    try:
        run.directory.mkdir(parents=True)
    except FileExistsError:
        raise StreamrlError(
            f"{run.directory} exists; take another name for the fork, or remove it"
        ) from None
    try:
        yield
    except BaseException:
        shutil.rmtree(run.directory, ignore_errors=True)
        raise


@contextmanager
def _topics_gone_on_failure(run: RunFile, settings: Mapping[str, Any]) -> Iterator[None]:
    """Delete the fork's topics if the block fails."""
    try:
        yield
    except BaseException:
        topics.delete(run, settings)
        raise
