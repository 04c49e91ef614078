"""`streamrl fork`: a new run that begins with a policy version of another one's, under a changed
configuration.

The numbers go on: a fork at version k announces k first and trains batch k first, so ages and
probes mean what they meant. Its topics begin with the versions up to k, what its envs have posed,
and, on request, the parent's rollouts. Of these the fork makes its first batch at once, in the
parent's recorded order and journaled as ever; from there its parts go on as after any restart. The
parent's topics are only read.
"""

from __future__ import annotations

import heapq
import shutil
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import msgspec
from rich.console import Console

from streamrl.batcher import process as batcher
from streamrl.batcher.curriculum import advance
from streamrl.buffer import process as buffer
from streamrl.config import topology
from streamrl.config.choices import NAME
from streamrl.config.run_file import Curriculum, Fork, RunFile, changed
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
from streamrl.weights.store import WeightRef

T = TypeVar("T")


class ForkResult(NamedTuple):
    """What a fork begins with."""

    run: RunFile
    groups: int
    rollouts: int
    has_batch: bool  # its first


def show_fork(
    parent: RunFile,
    name: str,
    version: int,
    overrides: Sequence[str],
    with_rollouts: bool,
    time_s: float,
    console: Console,
) -> None:
    """Make the fork and say what it begins with."""
    with progress_bar(f"computing version {version}", Console(stderr=True)) as progress:
        made = fork(parent, name, version, overrides, with_rollouts, time_s, progress)
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
    console.print(f"go on with it: streamrl up {name} --resume", highlight=False, soft_wrap=True)


def fork(
    parent: RunFile,
    name: str,
    version: int,
    overrides: Sequence[str],
    with_rollouts: bool,
    time_s: float,
    progress: OnProgress,
) -> ForkResult:
    """Make run `name` of `parent` at `version`: its directory, its broker's data or its topics on
    the parent's cluster. Leaves nothing when it fails.

    Raises ConfigError for what cannot be forked, ModelError when the version does not come out as
    announced.
    """
    run = child_run_file(parent, name, overrides)
    with ExitStack() as held:
        old = KafkaLog(held.enter_context(connect.connect_or_start(parent)), parent.run)
        announced = announced_hashes(old, parent.learner.name)
        if version not in announced:
            raise ConfigError(
                f"--at {version}: run {parent.run} has not announced that version; the newest is"
                f" {max(announced, default=-1)}"
            )
        run = run.model_copy(
            update={"fork": Fork(run=parent.run, version=version, sha256=announced[version])}
        )
        held.enter_context(_new_directory(run))
        settings = held.enter_context(connect.connect_or_start(run, create=True))
        topics.create(run, settings, {})
        with _topics_gone_on_failure(run, settings):
            stored = _seed(parent, run, old, version, progress)
            made = copy_topics(
                old, KafkaLog(settings, run.run), parent, run, stored.uri, with_rollouts, time_s
            )
            write_run_file(made.run)  # last: without it there is no run
    return made


def child_run_file(parent: RunFile, name: str, overrides: Sequence[str]) -> RunFile:
    """The run file of a fork, but for what it begins with. Raises ConfigError for a change that its
    weights would not bear.
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
    return run


def _seed(parent: RunFile, run: RunFile, old: Log, version: int, progress: OnProgress) -> WeightRef:
    # JAX, and only now: it does not like processes to be started beside it
    from streamrl.learner.recompute import seed_fork

    return seed_fork(parent, run, old, version, progress)


# ---- what the topics begin with ------------------------------------------------------------------


def copy_topics(
    old: Log, new: Log, parent: RunFile, run: RunFile, uri: str, with_rollouts: bool, time_s: float
) -> ForkResult:
    """Fill the topics of a fork. `uri`: where its first version lies; `run.fork` says which one
    that is. Returns it with the balance completed.
    """
    run = with_curriculum_state(old, parent, run)
    assert run.fork is not None
    writer = new.writer("fork")
    _copy(writer.commit, announced_before(old, parent, run, uri))
    _copy(writer.commit, visits(old, parent, run))
    if not with_rollouts:
        _copy(writer.commit, progress_of(old, parent, run, {}))
        return ForkResult(run, 0, 0, False)
    version = run.fork.version
    cut = batcher_cut(old, parent, run.fork.version)
    # what one share owes another means nothing under other shares
    if curriculum_settings(run) == curriculum_settings(parent):
        run = run.model_copy(update={"fork": run.fork.model_copy(update={"balance": cut.balance})})
    index = index_groups(old, parent, run)
    groups = index.inherited(
        version, max(run.buffer_of(env).max_age for env in run.envs)
    ) | dict.fromkeys(cut.held)
    recorded_order = list(in_buffer_order(old, parent, dict.fromkeys(cut.held), version))
    first = [message for message in recorded_order if message.topic.startswith(topology.ROLLOUTS)]
    _copy(writer.commit, first)
    batch = first_batch(new, run, recorded_order, cut, time_s)
    done = {(message.topic, message.partition, message.offset) for message in first}
    rest = _copy(
        writer.commit,
        (m for m in rollouts(old, run, groups) if (m.topic, m.partition, m.offset) not in done),
    )
    _copy(
        writer.commit,
        progress_of(old, parent, run, Counter(index.producers[group] for group in groups)),
    )
    writer.close()
    return ForkResult(run, len(groups), len(first) + rest, batch)


def announced_before(old: Log, parent: RunFile, run: RunFile, uri: str) -> Iterator[Message]:
    """The parent's versions up to the fork's first, which lies in the fork's own store."""
    assert run.fork is not None
    for record in read_announcements(old, parent.learner.name):
        if record.version <= run.fork.version:
            where = uri if record.version == run.fork.version else record.uri
            yield to_message(
                Output(
                    topology.POLICY_VERSIONS,
                    run.learner.name,
                    msgspec.structs.replace(record, learner=run.learner.name, uri=where),
                )
            )


def progress_of(
    old: Log, parent: RunFile, run: RunFile, groups: Mapping[str, int]
) -> Iterator[Message]:
    """Each env goes on behind the problems that the parent's has posed. `groups`: by producer,
    those that the fork has already.
    """
    there = [topic for topic in old.topics() if topic.startswith(f"{topology.JOURNAL}.env-")]
    posed = {
        record.producer: record.next_problem
        for topic in there
        if (record := last_record(old, topic, EnvProgress))
    }
    for name, env in run.envs.items():
        numbers = (
            [
                posed[producer]
                for i in range(parent.envs[name].replicas)
                if (producer := topology.producer(name, i)) in posed
            ]
            if name in parent.envs
            else []
        )
        for i in range(env.replicas):
            producer = topology.producer(name, i)
            first = next_problem(numbers, i, env.replicas)
            count = groups.get(producer, 0)
            record = EnvProgress(
                producer=producer,
                next_problem=first,
                published_groups=count,
                replicas=env.replicas,
                begins=max(numbers, default=0),
            )
            yield to_message(Output(topology.journal(topology.env_part(name, i)), producer, record))


def visits(old: Log, parent: RunFile, run: RunFile) -> Iterator[Message]:
    """What the parent's envs knew of their problems by the fork's first version, as far as
    compaction has left it, where they are still the same.
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
    """The parent's batcher when it made batch `version`, by its journal. Raises StreamrlError when
    that now leads elsewhere.
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
    then = next((batch for batch, _ in read_batches(old) if batch.number == version), None)
    if (cut.batch and encode(cut.batch)) != (then and encode(then)):
        wrong = (
            f"the journal of {part.name} of run {parent.run} does not lead to its batch {version}"
        )
        raise StreamrlError(
            f"{wrong}: the code has changed since (`streamrl replay {parent.run}` says where); fork"
            " without --rollouts"
        )
    return cut


def index_groups(old: Log, parent: RunFile, run: RunFile) -> GroupIndex:
    """Every recorded group, and which of them are in batches before the fork's first."""
    assert run.fork is not None
    index = GroupIndex()
    for batch, _ in read_batches(old):
        if batch.number >= run.fork.version:
            break
        index.add_batch(batch)
    for _, event in _rollouts(old, [env for env in run.envs if env in parent.envs]):
        if isinstance(event.record, Rollout):
            index.add_rollout(event.record)
    return index


def rollouts(old: Log, run: RunFile, groups: Mapping[GroupKey, None]) -> Iterator[Message]:
    """The recorded rollouts of these groups, as they lie there."""
    for message, event in _rollouts(old, run.envs):
        if (
            isinstance(event.record, Rollout)
            and (event.record.environment, event.record.group_id) in groups
        ):
            yield message


def in_buffer_order(
    old: Log, parent: RunFile, groups: Mapping[GroupKey, None], version: int
) -> Iterator[Message]:
    """The rollouts of these groups and the versions up to `version`, in the order in which the
    parent's buffer took them; its shards are merged by the times of their entries.
    """
    newest = -1
    shards = [taken_by(old, parent, shard, version) for shard in buffer.shards(parent)]
    for _, message, record in heapq.merge(*shards, key=lambda found: found[0]):
        if isinstance(record, PolicyVersion) and record.version > newest:
            newest = record.version  # each shard has taken it
            yield message
        elif isinstance(record, Rollout) and (record.environment, record.group_id) in groups:
            yield message


def taken_by(
    old: Log, parent: RunFile, shard: Processor[Any, Any], version: int
) -> Iterator[tuple[float, Message, Record]]:
    """What a shard of the parent's buffer took until it heard of a version above this one: when,
    the message, and its record.
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
        for time_s, message in ((t, m) for t, piece in slices for m in reader.read_slice(piece)):
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
    """The first turns of the fork's buffer and batcher: what the parent's batcher held, in the
    recorded `order`, then the version it had heard.

    Journaled like any other, so restart and replay know nothing of it. Returns whether there is a
    batch: under other settings it may take more.
    """
    heard = {
        record.version: message
        for record, message in records_of(new, topology.POLICY_VERSIONS, PolicyVersion)
    }
    if not cut.held or cut.version not in heard:
        return False
    copies: dict[tuple[str, bytes | None], deque[Message]] = {}
    for topic in (topology.rollouts(env) for env in run.envs):
        for _, message in records_of(new, topic, Rollout):
            # one key, one partition: the order is kept
            copies.setdefault((topic, message.key), deque()).append(message)
    numbers = iter(sorted(heard))
    taken = [
        (
            heard[next(numbers)]
            if m.topic == topology.POLICY_VERSIONS
            else copies[m.topic, m.key].popleft()
        )
        for m in order
    ]
    for shard in buffer.shards(run):
        own = [message for message in taken if shard.takes(message.topic, message.partition)]
        _process_as(new, shard, own, {}, time_s)
    scored = {
        (r.environment, r.group_id): m
        for env in run.envs
        for r, m in records_of(new, topology.groups(env), ScoredGroup)
    }
    version = heard[cut.version]
    groups = [scored[group] for group in cut.held if group in scored]
    _process_as(
        new,
        batcher.part(run),
        [*groups, version],
        {(version.topic, version.partition): version.offset},
        time_s,
    )
    return next(read_batches(new), None) is not None


def _process_as(
    log: Log,
    part: Processor[Any, Any],
    messages: Sequence[Message],
    positions: Mapping[TopicPartition, int],
    time_s: float,
) -> None:
    """Be that part for these messages of its inputs. `positions`: where it begins to read, if not
    at the start.
    """
    writer = log.writer(part.name)
    meter = log.producer()
    fold = ProcessorState(part.initial(), offsets=dict(positions))
    for some in portions(messages):
        for metric in process_batch(part, fold, some, time_s, writer.commit).metrics:
            meter.send(metric)
    meter.flush()
    meter.close()
    writer.close()


# ---- messages ------------------------------------------------------------------------------------


def _copy(commit: Any, messages: Iterable[Message]) -> int:
    """Write messages as they are, to the partitions of their keys. Returns how many."""
    number = 0
    for some in portions(messages):
        commit([message._replace(partition=-1, offset=-1) for message in some])
        number += len(some)
    return number


def _rollouts(log: Log, envs: Iterable[str]) -> Iterator[tuple[Message, Event]]:
    for env in envs:
        for message in messages_of(log, topology.rollouts(env)):
            yield message, to_event(message, ("rollout",))


def curriculum_settings(run: RunFile) -> tuple[dict[str, float], Curriculum]:
    return {name: env.fraction for name, env in run.envs.items()}, run.batcher.curriculum


def with_curriculum_state(old: Log, parent: RunFile, run: RunFile) -> RunFile:
    """The fork with its curriculum where the parent's batches before it bring that."""
    assert run.fork is not None
    rules = batcher.curriculum(run)
    progress = batcher.first_state(parent.fork).progress
    if rules.kind == "none":
        return run
    for batch, _ in read_batches(old):
        if batch.number >= run.fork.version:
            break
        progress = advance(rules, progress, batch)
    return run.model_copy(
        update={
            "fork": run.fork.model_copy(
                update={"stage": progress.stage, "rewards": progress.rewards}
            )
        }
    )


# ---- nothing half-made ---------------------------------------------------------------------------


@contextmanager
def _new_directory(run: RunFile) -> Iterator[None]:
    """The fork's, gone again when the block fails."""
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
    try:
        yield
    except BaseException:
        topics.delete(run, settings)
        raise
