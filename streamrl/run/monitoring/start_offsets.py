"""Where a reader of a run begins: as late as it can, given what it shows and decides. The run may
be weeks old, its parts publish metrics every second, and batches are large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from streamrl.config import topology
from streamrl.config.sections.batches import Target
from streamrl.run.monitoring.run_view import BATCHES, TOPICS, RunView, latest, update_view
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.protocol import (
    Event,
    Log,
    Offsets,
    TopicPartition,
    beginning_offset,
    end_offset,
    partitions_of,
)
from streamrl.stream.log.reading import read
from streamrl.stream.records import Metric

SCHEMAS: Mapping[str, tuple[str, ...]] = {**TOPICS, **BATCHES}
VERSIONS = topology.sole_partition(topology.POLICY_VERSIONS)
METRICS = topology.sole_partition(topology.METRICS)
# The offsets at the end of a topic that are read first. If they do not have what is needed, four
# times as many are read.
LAST_VERSIONS = 4
LAST_METRICS = 2_000
BATCHES_OF_TARGET = 4  # for each batch that the target needs
MOST_METRICS = 80_000  # A reader takes a few seconds for them.
# Most fates are of a whole group: enough to see what is trained on. Most records of evaluations are
# answers, which the result follows.
LAST_FATES = 20_000
LAST_EVALS = 20_000
ACTIVE_S = "orchestrator/active_s"


def start_offsets(
    log: Log, view: RunView, target: Target | None = None, unwritten: int | None = None
) -> dict[TopicPartition, int]:
    """The offset from which each topic of the run is read, by a reader that folds it into `view`.
    The newest policy version is folded in here: without it the steps of metrics are not believed.

    `unwritten`: the first offset of `metrics` that a sink has not written; None: there are no
    sinks. Raises TopicMissing while the topics are still being made.
    """
    offsets = log.beginning_offsets(partitions_of(log, TOPICS))
    offsets[VERSIONS] = tail_start(
        log, VERSIONS, LAST_VERSIONS, RunView(view.learner), lambda view: view.version >= 0
    )
    fold(log, VERSIONS, view, offsets[VERSIONS])
    first = offsets[METRICS]
    scratch = RunView(view.learner, version=view.version)
    offsets[METRICS] = tail_start(
        log, METRICS, LAST_METRICS, scratch, has_progress, MOST_METRICS, tells_progress
    )
    offsets |= last_offsets(log, offsets)
    if unwritten is not None:
        offsets[METRICS] = max(first, min(unwritten, offsets[METRICS]))
    if target:
        offsets[topology.sole_partition(topology.BATCHES)] = batches_start(log, target)
    return offsets


def last_offsets(log: Log, first: Offsets) -> dict[TopicPartition, int]:
    """The offsets of the last fates and evaluations, where `first` has the first ones."""
    counts = {
        topology.sole_partition(topology.FATES): LAST_FATES,
        topology.sole_partition(topology.EVALS): LAST_EVALS,
    }
    ends = log.end_offsets(counts)
    return {tp: max(first[tp], ends[tp] - count) for tp, count in counts.items()}


def has_progress(view: RunView) -> bool:
    """Whether the newest batch is known, and for how long the run has had a server."""
    return view.batch >= 0 and latest(view, ACTIVE_S) is not None


def tells_progress(event: Event) -> bool:
    """Whether an event has anything that `has_progress` asks for. Most metrics have not, and where
    a run has a thousand envs, each has a thousand values.
    """
    metric = event.record
    return isinstance(metric, Metric) and (metric.step is not None or ACTIVE_S in metric.values)


def batches_start(log: Log, target: Target) -> int:
    """The offset in `batches` from which on there are as many batches of the target's env as the
    verdict needs. It is the first offset if the log has fewer.

    A batch may be large, so no more of them are read than that.
    """
    return tail_start(
        log,
        topology.sole_partition(topology.BATCHES),
        BATCHES_OF_TARGET * target.batches,
        RunView("", counts_batches=True, rewards_kept=target.batches),
        lambda view: len(view.rewards.get(target.env, {})) >= target.batches,
    )


def tail_start(
    log: Log,
    tp: TopicPartition,
    length: int,
    scratch: RunView,
    is_enough: Callable[[RunView], bool],
    most: int | None = None,
    is_needed: Callable[[Event], bool] = lambda event: True,
) -> int:
    """The offset `length`, 4 * `length`, 16 * `length` ... before the end of a partition from which
    on its records are enough: `scratch` satisfies `is_enough` once those that are needed are folded
    in. The first offset, or the one `most` before the end, if no later one is.
    """
    first = beginning_offset(log, *tp)
    end = end_offset(log, *tp)
    if most is not None:
        first = max(first, end - most)
    start = end
    while start > first and not is_enough(scratch):
        before = start
        start = max(first, end - length)
        for event in filter(is_needed, events_of(log, tp, start, before)):
            if is_enough(update_view(scratch, [event])):
                break
        length *= 4
    return start


def fold(log: Log, tp: TopicPartition, view: RunView, start: int, end: int | None = None) -> None:
    """Fold the records of a partition with start <= offset < end into the view."""
    update_view(view, events_of(log, tp, start, end))


def events_of(log: Log, tp: TopicPartition, start: int, end: int | None = None) -> Iterator[Event]:
    """The events of a partition with start <= offset < end."""
    return (to_event(message, SCHEMAS[tp[0]]) for message in read(log, *tp, start, end))
