"""From where a run that goes on is read, so that its target can be judged."""

from __future__ import annotations

from streamrl.config import topology
from streamrl.config.sections.batches import Target
from streamrl.log.codec import to_event
from streamrl.log.protocol import Log, TopicPartition, beginning_offset, end_offset
from streamrl.log.reading import read
from streamrl.monitoring.run_view import BATCHES, RunView, update_view
from streamrl.monitoring.status import view_partitions


def first_offsets(log: Log, target: Target | None) -> dict[TopicPartition, int]:
    """Where the orchestrator begins to read each topic of the run."""
    begin = log.beginning_offsets(view_partitions(log))
    if target:
        begin[topology.sole_partition(topology.BATCHES)] = batches_begin(log, target)
    return begin


def batches_begin(log: Log, target: Target) -> int:
    """The offset in `batches` from which on there are as many batches of the target's env as its
    verdict takes, or all that the log has.

    A batch may be large, so no more of them are read than that.
    """
    batches = topology.sole_partition(topology.BATCHES)
    start = beginning_offset(log, *batches)
    end = end_offset(log, *batches)
    distance = 4 * target.batches
    while True:
        begin = max(start, end - distance)
        messages = read(log, *batches, begin, end)
        seen = RunView("", counts_batches=True)
        update_view(seen, (to_event(message, BATCHES[topology.BATCHES]) for message in messages))
        if begin == start or len(seen.rewards.get(target.env, {})) >= target.batches:
            return begin
        distance *= 4
