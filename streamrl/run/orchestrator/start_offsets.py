"""The offsets from which the orchestrator reads its run, so that the target of a resumed run can be
judged.
"""

from __future__ import annotations

from streamrl.config import topology
from streamrl.config.sections.batches import Target
from streamrl.run.monitoring.run_view import BATCHES, RunView, update_view
from streamrl.run.monitoring.status import view_partitions
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.protocol import Log, TopicPartition, beginning_offset, end_offset
from streamrl.stream.log.reading import read


def start_offsets(log: Log, target: Target | None) -> dict[TopicPartition, int]:
    """The offset from which each topic of the run is read."""
    offsets = log.beginning_offsets(view_partitions(log))
    if target:
        offsets[topology.sole_partition(topology.BATCHES)] = batches_start(log, target)
    return offsets


def batches_start(log: Log, target: Target) -> int:
    """The offset in `batches` from which on there are as many batches of the target's env as the
    verdict needs. It is the first offset if the log has fewer.

    A batch may be large, so no more of them are read than that.
    """
    batches = topology.sole_partition(topology.BATCHES)
    first = beginning_offset(log, *batches)
    end = end_offset(log, *batches)
    distance = 4 * target.batches
    while True:
        start = max(first, end - distance)
        messages = read(log, *batches, start, end)
        view = RunView("", counts_batches=True)
        update_view(view, (to_event(message, BATCHES[topology.BATCHES]) for message in messages))
        if start == first or len(view.rewards.get(target.env, {})) >= target.batches:
            return start
        distance *= 4
