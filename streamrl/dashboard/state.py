"""The dashboard's state of a run, folded from its topics message by message. Pure.

`views.py` has what the page shows of it. A step is a policy version: step k lasts from the
announcement of version k to that of version k + 1, and the learner trains on batch k in it. Every
event belongs to the step in which it happened, by its time in the log. So the run can be shown as
it was at the end of any step.

The state does not grow with the number of steps. The newest steps are kept one by one. Older steps
are merged into pieces of neighbouring steps, and their values are those at the end of the piece:
sums and counts are exact there, and of a curve the last value is kept.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import msgspec
import numpy as np

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.dashboard.index import LIMIT, Index, RolloutLocation
from streamrl.dashboard.loop import Node, nodes
from streamrl.log.codec import to_event
from streamrl.log.protocol import Message, TopicPartition
from streamrl.monitoring import run_view
from streamrl.monitoring.run_view import RunView
from streamrl.records import Evaluation, Fate, JournalEntry, Metric, PolicyVersion, Rollout

VERSIONS = topology.POLICY_VERSIONS
# kinds of large ones: rollouts are indexed, the others counted
DATA = (topology.ROLLOUTS, topology.GROUPS, topology.BATCHES)
CURVES = (
    "learner/",
    "batcher/batch_age_mean",
    "batcher/batch_age_max",
    "inference/swap_s",
    "inference/pause_s",
)
"""How the names of those metrics with a step begin that are kept."""
# how the name of the reward of an env's batches ends, and who measures it
REWARD = "/reward/mean"
REWARD_OF = "batcher"
RECENT = 2_048  # steps that are kept one by one, the newest
OLDER = 1_024  # pieces that older steps are put together to, at most
MOST = RECENT + 2 * OLDER  # when steps are put together, so that this costs a constant for each
# whose place in the log is kept, the newest: the advantages of a rollout are read there
BATCHES = 65_536
MOMENTS = 512  # steps whose loop is kept; of a longer run every second, every fourth, ... step


class StepCounter:
    """A count, with its value at the end of every step."""

    def __init__(self) -> None:
        # ascending; how many by the end of each
        self._steps, self._totals = list[int](), list[int]()

    def add(self, step: int, count: int) -> None:
        at = bisect_left(self._steps, step)
        if at == len(self._steps) or self._steps[at] != step:
            self._steps.insert(at, step)
            self._totals.insert(at, self._totals[at - 1] if at else 0)
        for later in range(at, len(self._totals)):  # one, but for a record that comes late
            self._totals[later] += count

    def until(self, step: int | None) -> int:
        """The count at the end of `step`, or now if no step is given."""
        at = len(self._steps) if step is None else bisect_right(self._steps, step)
        return self._totals[at - 1] if at else 0

    def regroup(self, steps: Steps) -> None:
        """Keep only the counts at the ends of the pieces of `steps`."""
        totals = {
            steps.end_of(step): total for step, total in zip(self._steps, self._totals, strict=True)
        }
        self._steps, self._totals = list(totals), list(totals.values())

    def __len__(self) -> int:
        return len(self._steps)


def thinned(
    versions: Sequence[int], width: int, recent: int = RECENT, older: int = OLDER
) -> tuple[list[int], int]:
    """Merge all but the newest `recent` of the ascending versions into at most `older` pieces.

    Returns the first version of each piece followed by the recent versions, and the new width.
    Versions whose quotient by the width is equal form a piece. The width is doubled until there are
    few enough pieces. So wider pieces consist of whole narrower ones, and it does not matter how
    often a run has been thinned.
    """
    old = versions[: max(0, len(versions) - recent)]
    new = versions[max(0, len(versions) - recent) :]
    while True:
        firsts = [
            version
            for i, version in enumerate(old)
            if i == 0 or version // width != old[i - 1] // width
        ]
        if len(firsts) <= older:
            return [*firsts, *new], width
        width *= 2


@dataclass
class Steps:
    """When the lead learner announced each policy version; of a piece, its first version."""

    versions: list[int] = field(default_factory=list[int])  # ascending
    times_s: list[float] = field(default_factory=list[float])
    width: int = 1  # of a piece

    def hear(self, version: int, time_s: float) -> bool:
        """Add a version. Returns whether steps were merged.

        A version that is announced again changes nothing.
        """
        if self.versions and version <= self.versions[-1]:
            return False
        self.versions.append(version)
        self.times_s.append(max(time_s, self.times_s[-1]) if self.times_s else time_s)
        if len(self.versions) <= MOST:
            return False
        starts_s = dict(zip(self.versions, self.times_s, strict=True))
        self.versions, self.width = thinned(self.versions, self.width)
        self.times_s = [starts_s[version] for version in self.versions]
        return True

    def at(self, time_s: float) -> int:
        """The last step of the piece at this time, -1 before the first version."""
        index = bisect_right(self.times_s, time_s)
        return self.end_of(self.versions[index - 1]) if index else -1

    def end_of(self, step: int) -> int:
        """The last step of the piece that `step` is in.

        This is `step` itself where steps are kept one by one. Everything before the first version
        is one piece.
        """
        index = bisect_right(self.versions, step)
        return self.versions[index] - 1 if index < len(self.versions) else step

    def start_of(self, step: int) -> int:
        """The first step of the piece that `step` is in."""
        index = bisect_right(self.versions, step)
        return self.versions[index - 1] if 0 < index < len(self.versions) else step

    def end_s(self, step: int) -> float:
        """When the piece of `step` ended, infinity for the newest."""
        index = bisect_right(self.versions, step)
        return self.times_s[index] if index < len(self.versions) else float("inf")


@dataclass
class LoopHistory:
    """The state of the loop at the ends of at most `MOMENTS` steps."""

    kept: dict[int, list[Node]] = field(default_factory=dict[int, list[Node]])
    every: int = 1

    def wanted(self, step: int) -> bool:
        return step % self.every == 0

    def keep(self, step: int, loop: list[Node]) -> None:
        self.kept[step] = loop
        if len(self.kept) > MOMENTS:
            self.every *= 2
            self.kept = {step: loop for step, loop in self.kept.items() if self.wanted(step)}

    def at(self, step: int) -> list[Node]:
        """The loop at the last kept step that is not after `step`."""
        there = [kept for kept in self.kept if kept <= step]
        return self.kept[max(there)] if there else []


@dataclass
class State:
    """`fold` changes it in place and gives it back."""

    run: RunFile
    view: RunView  # as `streamrl status` sees it
    index: Index
    steps: Steps = field(default_factory=Steps)
    step: int = -1  # that the books have come to
    time_s: float = 0.0  # of the newest record
    # rollouts and groups
    published: dict[TopicPartition, StepCounter] = field(
        default_factory=lambda: defaultdict[TopicPartition, StepCounter](StepCounter)
    )
    # (part, topic) -> records
    taken: dict[tuple[str, str], StepCounter] = field(
        default_factory=lambda: defaultdict[tuple[str, str], StepCounter](StepCounter)
    )
    # (env, fate) -> rollouts
    ended: dict[tuple[str, str], StepCounter] = field(
        default_factory=lambda: defaultdict[tuple[str, str], StepCounter](StepCounter)
    )
    made_of: dict[int, Counter[tuple[str, int]]] = field(
        default_factory=lambda: defaultdict[int, Counter[tuple[str, int]]](Counter)
    )  # batch, the last of its piece -> (env, age) -> rollouts
    # number -> its offset, of the newest `BATCHES`
    batches: dict[int, int] = field(default_factory=dict[int, int])
    built: StepCounter = field(
        default_factory=StepCounter
    )  # one more than the number of the newest batch
    curves: dict[tuple[str, str], dict[int, float]] = field(
        default_factory=lambda: defaultdict[tuple[str, str], dict[int, float]](dict)
    )  # (metric, source) -> step -> value
    evals: dict[str, dict[int, Evaluation]] = field(
        default_factory=lambda: defaultdict[str, dict[int, Evaluation]](dict)
    )  # name -> version, the last of its piece -> results
    # the first offset that the log still had
    starts: dict[TopicPartition, int] = field(default_factory=dict[TopicPartition, int])
    moments: LoopHistory = field(default_factory=LoopHistory)
    messages: int = 0  # folded

    @cached_property
    def books(self) -> Mapping[str, tuple[str, ...]]:
        """Small topics, folded in the order of their times: topic -> schemas."""
        journals = [topology.journal(part.identity) for part in topology.processors(self.run)]
        return {**run_view.TOPICS, **dict.fromkeys(journals, ("journal-entry",))}


def new(run: RunFile, limit: int = LIMIT) -> State:
    view = run_view.new_view(run)
    view.rewards_kept = 1  # their curves are kept here
    return State(run, view, Index(list(run.envs), limit))


def hear(state: State, message: Message) -> None:
    """Note when a policy version was announced: all that the fold has to know of a step before it
    comes to what happened in it.
    """
    record = to_event(message, state.books[VERSIONS]).record
    if not isinstance(record, PolicyVersion) or record.learner != state.run.learner.name:
        return
    if state.steps.hear(record.version, message.timestamp_s):
        _regroup(state)


def _regroup(state: State) -> None:
    """Steps were put together: so is everything that is kept by step."""
    steps = state.steps
    for counts in (
        state.built,
        *state.published.values(),
        *state.taken.values(),
        *state.ended.values(),
    ):
        counts.regroup(steps)
    for name, values in state.curves.items():
        state.curves[name] = {steps.end_of(step): values[step] for step in sorted(values)}
    for name, made in state.evals.items():
        state.evals[name] = {steps.end_of(version): made[version] for version in sorted(made)}
    together = defaultdict[int, Counter[tuple[str, int]]](Counter)
    for number in sorted(state.made_of):
        together[steps.end_of(number)] += state.made_of[number]
    state.made_of = together


def fold(state: State, message: Message) -> State:
    """Take one message in. What cannot be read is passed over; a rollout that cannot has its row
    all the same.
    """
    state.messages += 1
    state.time_s = max(state.time_s, message.timestamp_s)
    kind, _, of = message.topic.partition(".")
    step = state.steps.at(message.timestamp_s)
    match kind:
        case "rollouts":
            state.published[message.topic, message.partition].add(step, 1)
            record = to_event(message, ("rollout",)).record
            key = (message.key or b"").decode("utf-8", "replace")
            place = RolloutLocation(of, message.partition, message.offset)
            state.index.add(
                place, message.timestamp_s, record if isinstance(record, Rollout) else None, key
            )
        case "groups":
            state.published[message.topic, message.partition].add(step, 1)
        case "batches":
            # else: it is there twice
            if (message.key or b"").isdigit() and (
                number := int(message.key or b"")
            ) not in state.batches:
                state.batches[number] = message.offset
                if len(state.batches) > BATCHES:
                    del state.batches[next(iter(state.batches))]
                if (more := number + 1 - state.built.until(None)) > 0:
                    state.built.add(step, more)
        case _ if message.topic in state.books:
            _book(state, message)
        case _:
            pass
    return state


def _book(state: State, message: Message) -> None:
    if message.topic == VERSIONS:
        hear(state, message)
    step = state.steps.at(message.timestamp_s)
    if step > state.step:
        start = state.steps.start_of(state.step)
        if state.step >= 0 and state.moments.wanted(start):
            state.moments.keep(start, loop(state, message.timestamp_s, state.step))
        state.step = step
    event = to_event(message, state.books[message.topic])
    if message.topic in run_view.TOPICS:
        run_view.update_view(state.view, [event])
    match event.record:
        case Fate() as fate:
            _end(state, fate, step)
        case Metric(step=int(number)):
            metric = run_view.believable(event, state.view.version)
            for name, value in metric.values.items() if metric else ():
                if name.startswith(CURVES) or (
                    name.startswith("batches/") and name.endswith(REWARD)
                ):
                    state.curves[name, event.key][state.steps.end_of(number)] = value
        case Evaluation(learner=state.view.learner) as made:
            _evaluated(state, made)
        case JournalEntry() as entry:
            part = topology.subject_of(message.topic)
            for piece in entry.slices:
                if topology.kind_of(piece.topic) in DATA and piece.end > state.starts.get(
                    (piece.topic, piece.partition), 0
                ):
                    state.taken[part, piece.topic].add(step, piece.count)
        case _:
            pass


def _end(state: State, fate: Fate, step: int) -> None:
    state.ended[fate.environment, fate.fate].add(step, len(fate.offsets))
    state.index.end(fate, step)
    if fate.batch is not None and fate.policy_versions is not None:
        for version in fate.policy_versions.tolist():
            state.made_of[state.steps.end_of(fate.batch)][
                fate.environment, fate.batch - version
            ] += 1


def _evaluated(state: State, made: Evaluation) -> None:
    """Of an evaluation its results are kept, not its problems."""
    ids = np.zeros(0, np.int64)
    counts = np.zeros(0, np.int32)
    rewards = np.zeros(0, np.float32)
    results = msgspec.structs.replace(
        made, problems=ids, samples=counts, passed=counts, rewards=rewards
    )
    state.evals[made.name][state.steps.end_of(made.version)] = results


# ---- questions -----------------------------------------------------------------------------------


def rewards(state: State, env: str) -> Mapping[int, float]:
    """batch -> mean reward of the env's rollouts in it."""
    return state.curves.get((f"batches/{env}/reward/mean", REWARD_OF), {})


def published(state: State, kind: str, of: str = "", step: int | None = None) -> int:
    """Records of `rollouts` or `groups`, of one env or all, up to the end of `step`; default: by
    now.
    """
    wanted = [
        counts
        for (topic, _), counts in state.published.items()
        if (topic == f"{kind}.{of}" if of else topic.startswith(f"{kind}."))
    ]
    return sum(counts.until(step) for counts in wanted)


def lags(state: State, step: int | None = None) -> dict[str, int | None]:
    """Records that a part had not taken yet, as its journal says; the learner's are batches. None
    where nothing is known of it.
    """
    found: dict[str, int | None] = {}
    for part in topology.processors(state.run):
        kinds = [kind for kind in topology.role_of(part).consumes if kind in DATA]
        taken = sum(
            counts.until(step)
            for (who, topic), counts in state.taken.items()
            if who == part.identity and topology.kind_of(topic) in kinds
        )
        there = sum(
            counts.until(step)
            for (topic, partition), counts in state.published.items()
            if topology.kind_of(topic) in kinds and part.takes(topic, partition)
        )
        found[part.identity] = max(0, there - taken) if taken else None
    trained = state.view.version if step is None else step
    built = state.built.until(step)
    found[topology.learner_identity(state.run.learner.name)] = (
        max(0, built - trained) if built and trained >= 0 else None
    )
    return found


def loop(state: State, time_s: float, step: int | None = None) -> list[Node]:
    """The parts as they stand."""
    return nodes(state.run, state.view, lags(state, step), time_s)


def loop_at_step(state: State, step: int | None, time_s: float) -> list[Node]:
    """The parts at the end of that step; default: as they stand."""
    return loop(state, time_s) if step is None or step >= state.step else state.moments.at(step)
