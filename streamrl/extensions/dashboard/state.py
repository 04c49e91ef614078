"""The dashboard's state of a run, folded from its topics message by message, by pure functions.

`views.py`, `panels.py` and `rollout_views.py` have what the page shows of it. Every event belongs
to the step in which it happened (`steps.py`), so the run can be shown as it was at the end of any
step. The state does not grow with the number of steps.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import msgspec
import numpy as np

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.extensions.dashboard.index import LIMIT, Index, RolloutLocation
from streamrl.extensions.dashboard.loop import Node, nodes
from streamrl.extensions.dashboard.sessions import SessionCounts
from streamrl.extensions.dashboard.steps import StepCounter, Steps, up_to
from streamrl.run.monitoring import run_view
from streamrl.run.monitoring.metric_validation import validate_metric
from streamrl.run.monitoring.run_view import RunView
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.protocol import Event, Message, TopicPartition
from streamrl.stream.records import Evaluation, Fate, JournalEntry, Metric, PolicyVersion, Rollout

VERSIONS = topology.POLICY_VERSIONS
# The kinds of the large topics. Rollouts are indexed, groups and batches are counted.
DATA = (topology.ROLLOUTS, topology.GROUPS, topology.BATCHES)
# Of metrics with a step, those are kept whose names begin with one of these.
CURVES = (
    "learner/",
    "batcher/batch_age_mean",
    "batcher/batch_age_max",
    "inference/swap_s",
    "inference/pause_s",
)
# The mean reward of an env in a batch is a metric `batches/ENV/reward/mean` of this part.
REWARD = "/reward/mean"
REWARD_OF = topology.BATCHER.name
# The offsets of this many of the newest batches are kept. The advantages of a rollout are read
# there.
BATCHES = 65_536
DIGITS = 18  # of a batch's number
# The loop is kept at the ends of at most this many steps: of a longer run, every second, fourth,
# eighth, ... step.
MOMENTS = 512


@dataclass
class LoopHistory:
    """The state of the loop at the ends of at most `MOMENTS` steps."""

    kept: dict[int, list[Node]] = field(default_factory=dict[int, list[Node]])  # by step
    every: int = 1  # steps that are divisible by it are kept

    def wanted(self, step: int) -> bool:
        """Whether the loop of this step is kept."""
        return step % self.every == 0

    def keep(self, step: int, loop: list[Node]) -> None:
        """Keep the loop of a wanted step. If there are too many, every second one is dropped."""
        self.kept[step] = loop
        if len(self.kept) > MOMENTS:
            self.every *= 2
            wanted = [kept for kept in self.kept if self.wanted(kept)]
            self.kept = {kept: self.kept[kept] for kept in wanted}

    def at(self, step: int) -> list[Node]:
        """The loop at the last kept step that is not after `step`."""
        before = up_to(self.kept, step)
        return self.kept[before[-1]] if before else []


@dataclass
class State:
    """All that the dashboard knows of a run. `fold` changes it in place."""

    run: RunFile
    view: RunView  # what `streamrl status` shows
    index: Index
    steps: Steps = field(default_factory=Steps)
    step: int = -1  # the step of the newest record of `books`
    time_s: float = 0.0  # the time of the newest record
    # (topic, partition) -> the number of its records, for rollouts and groups
    published: dict[TopicPartition, StepCounter] = field(
        default_factory=lambda: defaultdict[TopicPartition, StepCounter](StepCounter)
    )
    # env -> the number of its rollouts
    published_by: dict[str, StepCounter] = field(
        default_factory=lambda: defaultdict[str, StepCounter](StepCounter)
    )
    # (part, topic) -> the number of records that the part has read
    taken: dict[tuple[str, str], StepCounter] = field(
        default_factory=lambda: defaultdict[tuple[str, str], StepCounter](StepCounter)
    )
    # (env, fate) -> the number of sampled tokens
    ended_tokens: dict[tuple[str, str], StepCounter] = field(
        default_factory=lambda: defaultdict[tuple[str, str], StepCounter](StepCounter)
    )
    # (env, fate) -> the number of rollouts
    ended: dict[tuple[str, str], StepCounter] = field(
        default_factory=lambda: defaultdict[tuple[str, str], StepCounter](StepCounter)
    )
    # the last batch of a piece -> (env, age) -> the number of rollouts in the batches of the piece
    made_of: dict[int, Counter[tuple[str, int]]] = field(
        default_factory=lambda: defaultdict[int, Counter[tuple[str, int]]](Counter)
    )
    # number -> offset, of the newest `BATCHES` batches
    batches: dict[int, int] = field(default_factory=dict[int, int])
    # one more than the number of the newest batch
    built: StepCounter = field(default_factory=StepCounter)
    # (metric, source) -> step -> value
    curves: dict[tuple[str, str], dict[int, float]] = field(
        default_factory=lambda: defaultdict[tuple[str, str], dict[int, float]](dict)
    )
    # name -> the last version of a piece -> results
    evals: dict[str, dict[int, Evaluation]] = field(
        default_factory=lambda: defaultdict[str, dict[int, Evaluation]](dict)
    )
    # env -> its sessions that have become rollouts; envs without sessions have none
    sessions: dict[str, SessionCounts] = field(
        default_factory=lambda: defaultdict[str, SessionCounts](SessionCounts)
    )
    # the first offsets that the log had when it was first read
    starts: dict[TopicPartition, int] = field(default_factory=dict[TopicPartition, int])
    moments: LoopHistory = field(default_factory=LoopHistory)
    messages: int = 0  # the number of messages that have been folded

    @cached_property
    def books(self) -> Mapping[str, tuple[str, ...]]:
        """The schemas of the small topics, which are folded in the order of time."""
        journals = [topology.journal(part.identity) for part in topology.processors(self.run)]
        return {**run_view.TOPICS, **dict.fromkeys(journals, ("journal-entry",))}


def new(run: RunFile, limit: int = LIMIT) -> State:
    """The state before any message. `limit`: the largest number of rollouts in the index."""
    view = run_view.new_view(run)
    view.rewards_kept = 1  # Rewards are kept as curves instead.
    return State(run, view, Index(list(run.envs), limit))


def fold(state: State, message: Message) -> State:
    """Apply one message. A record that cannot be read is ignored, except that a rollout then has a
    row without values.
    """
    state.messages += 1
    state.time_s = max(state.time_s, message.timestamp_s)
    kind = topology.kind_of(message.topic)
    if kind == topology.ROLLOUTS:
        _on_rollout(state, message)
    elif kind == topology.GROUPS:
        _count(state, message)
    elif kind == topology.BATCHES:
        _on_batch(state, message)
    elif message.topic in state.books:
        _on_book(state, message)
    return state


def on_version(state: State, message: Message) -> None:
    """Note when a policy version was announced. Once all versions are noted, records may be folded
    that are older than the newest of them: each is counted in its own step.
    """
    record = to_event(message, state.books[VERSIONS]).record
    if not isinstance(record, PolicyVersion) or record.learner != state.run.learner.name:
        return
    if state.steps.add(record.version, message.timestamp_s):
        _regroup(state)


def _regroup(state: State) -> None:
    """Merge everything that is kept by step, after steps have been merged."""
    steps = state.steps
    counters: list[StepCounter] = []
    for each in (state.published, state.published_by, state.taken, state.ended, state.ended_tokens):
        counters += each.values()
    for counter in counters:
        counter.regroup(steps)
    state.built.regroup(steps)
    for sessions in state.sessions.values():
        sessions.regroup(steps)
    for name, values in state.curves.items():
        state.curves[name] = {steps.end_of(step): values[step] for step in sorted(values)}
    for name, results in state.evals.items():
        state.evals[name] = {steps.end_of(version): results[version] for version in sorted(results)}
    together = defaultdict[int, Counter[tuple[str, int]]](Counter)
    for number in sorted(state.made_of):
        together[steps.end_of(number)] += state.made_of[number]
    state.made_of = together


def _count(state: State, message: Message) -> None:
    step = state.steps.at(message.timestamp_s)
    state.published[message.topic, message.partition].add(step, 1)


def _on_rollout(state: State, message: Message) -> None:
    _count(state, message)
    record = to_event(message, ("rollout",)).record
    named = record.environment if isinstance(record, Rollout) else ""
    env = topology.env_of(message.topic, named, state.run.envs)
    step = state.steps.at(message.timestamp_s)
    state.published_by[env].add(step, 1)
    settings = state.run.envs.get(env)
    if settings is not None and settings.sessions and isinstance(record, Rollout):
        state.sessions[env].add(record, step)
    state.index.add(
        place=RolloutLocation(env, message.partition, message.offset),
        time_s=message.timestamp_s,
        rollout=record if isinstance(record, Rollout) else None,
        group=(message.key or b"").decode("utf-8", "replace"),
    )


def _on_batch(state: State, message: Message) -> None:
    key = message.key or b""
    if not key.isdigit() or len(key) > DIGITS:
        return
    number = int(key)
    if number in state.batches:
        return  # The batch is in the topic twice, and the first copy counts.
    state.batches[number] = message.offset
    if len(state.batches) > BATCHES:
        del state.batches[next(iter(state.batches))]
    more = number + 1 - state.built.until(None)
    if more > 0:
        state.built.add(state.steps.at(message.timestamp_s), more)


def _on_book(state: State, message: Message) -> None:
    """Apply a message of a small topic."""
    if message.topic == VERSIONS:
        on_version(state, message)
    step = state.steps.at(message.timestamp_s)
    if step > state.step:
        _keep_loop(state, message.timestamp_s)
        state.step = step
    event = to_event(message, state.books[message.topic])
    if message.topic in run_view.TOPICS:
        run_view.update_view(state.view, [event])
    match event.record:
        case Fate() as fate:
            _on_fate(state, fate, step)
        case Metric(step=int()):
            _on_step_metric(state, event)
        case Evaluation(learner=state.view.learner) as evaluation:
            _on_evaluation(state, evaluation)
        case JournalEntry() as entry:
            _on_journal_entry(state, topology.subject_of(message.topic), entry, step)
        case _:
            pass


def _keep_loop(state: State, time_s: float) -> None:
    """Keep the loop as it was at the end of the step before, if that step is wanted."""
    start = state.steps.start_of(state.step)
    if state.step >= 0 and state.moments.wanted(start):
        state.moments.keep(start, loop(state, time_s, state.step))


def _on_fate(state: State, fate: Fate, step: int) -> None:
    env = fate.environment
    if env not in state.run.envs:  # it has left the run
        env = topology.family_of(env)
    state.ended[env, fate.fate].add(step, len(fate.offsets))
    if fate.tokens is not None:
        tokens = int(fate.tokens.sum(dtype=np.int64))
        state.ended_tokens[env, fate.fate].add(step, tokens)
    state.index.end(fate, step)
    if fate.batch is None or fate.policy_versions is None:
        return
    piece = state.steps.end_of(fate.batch)
    for version in fate.policy_versions.tolist():
        state.made_of[piece][env, fate.batch - version] += 1


def _on_step_metric(state: State, event: Event) -> None:
    metric = validate_metric(event, state.view.version)
    if metric is None or metric.step is None:
        return
    step = state.steps.end_of(metric.step)
    for name, value in metric.values.items():
        is_reward = name.startswith("batches/") and name.endswith(REWARD)
        if is_reward or name.startswith(CURVES):
            state.curves[name, event.key][step] = value


def _on_evaluation(state: State, evaluation: Evaluation) -> None:
    """Keep the results of an evaluation, without its problems and answers."""
    counts = np.zeros(0, np.int32)
    results = msgspec.structs.replace(
        evaluation,
        problems=np.zeros(0, np.int64),
        samples=counts,
        passed=counts,
        rewards=np.zeros(0, np.float32),
    )
    state.evals[evaluation.name][state.steps.end_of(evaluation.version)] = results


def _on_journal_entry(state: State, part: str, entry: JournalEntry, step: int) -> None:
    """Count what the part has read, without what retention had removed before the log was read."""
    for piece in entry.slices:
        start = state.starts.get((piece.topic, piece.partition), 0)
        if topology.kind_of(piece.topic) in DATA and piece.end > start:
            state.taken[part, piece.topic].add(step, piece.count)


# ---- questions -----------------------------------------------------------------------------------


def rewards(state: State, env: str) -> Mapping[int, float]:
    """By batch, the mean reward of the env's rollouts in it."""
    return state.curves.get((f"batches/{env}/reward/mean", REWARD_OF), {})


def published(state: State, env: str = "", step: int | None = None) -> int:
    """The number of rollouts of the env, or of all, at the end of `step`, or now if no step is
    given.
    """
    if env:
        counter = state.published_by.get(env)
        return counter.until(step) if counter else 0
    return sum(counter.until(step) for counter in state.published_by.values())


def lags(state: State, step: int | None = None) -> dict[str, int | None]:
    """By part, the number of records that it had not read yet, by its journal. Of the learner
    these are the batches that it had not trained on. None if nothing is known of the part.
    """
    by_part: dict[str, int | None] = {}
    for part in topology.processors(state.run):
        kinds = [kind for kind in topology.role_of(part).consumes if kind in DATA]
        taken = 0
        for (identity, topic), counts in state.taken.items():
            if identity == part.identity and topology.kind_of(topic) in kinds:
                taken += counts.until(step)
        published = 0
        for (topic, partition), counts in state.published.items():
            if topology.kind_of(topic) in kinds and part.takes(topic, partition):
                published += counts.until(step)
        by_part[part.identity] = max(0, published - taken) if taken else None
    trained = state.view.version if step is None else step
    built = state.built.until(step)
    learner = topology.learner_identity(state.run.learner.name)
    by_part[learner] = max(0, built - trained) if built and trained >= 0 else None
    return by_part


def loop(state: State, time_s: float, step: int | None = None) -> list[Node]:
    """The parts as they are now, with their lags at the end of `step`."""
    return nodes(state.run, state.view, lags(state, step), time_s)


def loop_at_step(state: State, step: int | None, time_s: float) -> list[Node]:
    """The parts at the end of `step`, or as they are now if no step is given."""
    if step is None or step >= state.step:
        return loop(state, time_s)
    return state.moments.at(step)
