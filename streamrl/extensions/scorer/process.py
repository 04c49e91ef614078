"""Scorer: batches in, their logprobs under the reference and the teacher out. The scorer is a pool
of n workers; worker i scores the batches i, i + n, i + 2 n, ...

A worker has no state. Its work is the batches that the lead learner has not trained on and no
worker has scored. So a worker may be killed at any time, and a run may continue with more workers
or fewer. If two workers score the same batch, the second result is ignored.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.extensions.scorer.extension import SCORER
from streamrl.extensions.scorer.reference import ensure_reference
from streamrl.extensions.scorer.scoring import open_models, open_updater, score_all, to_metrics
from streamrl.extensions.scorer.work import check_worker, follow_work
from streamrl.learner.update import Updater
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.protocol import Log, Output, Writer
from streamrl.stream.processor.part import OpenPart, open_part
from streamrl.stream.records import Batch


def main(run: RunFile, log: Log, stop: threading.Event, worker: int = 0) -> None:
    """Run worker number `worker` until `stop` is set. Raises ConfigError if the run has no such
    worker.
    """
    check_worker(run, worker)
    identity = topology.numbered(SCORER.name, worker)
    with (
        open_part(log, identity, log.writer(identity, topology.SCORES)) as part,
        open_updater(run) as updater,
    ):
        batches = follow_work(run, log, worker, stop)
        part.mark_ready()
        score_batches(run, part, updater, batches, stop)


def score_batches(
    run: RunFile,
    part: OpenPart[Writer],
    updater: Updater,
    batches: Iterable[tuple[Batch, int]],
    stop: threading.Event,
) -> None:
    """The loop: score one batch after the other. Each comes with the offset after it."""
    models = None
    idle_since_s = time.monotonic()
    for batch, offset in batches:
        # There is a batch, so the learner has made the model by now.
        models = models or open_models(run)
        reference = models.reference
        if reference and not ensure_reference(run, part.log, reference, batch.number, stop):
            break
        begun_s = time.monotonic()
        scores, not_finite = score_all(updater, models, batch, part.name)
        part.writer.commit([to_message(Output(topology.SCORES, str(batch.number), scores))])
        part.writer.commit_offsets({topology.BATCHES_PARTITION: offset})
        score_s = time.monotonic() - begun_s
        values = to_metrics(batch, scores.reference, begun_s - idle_since_s, score_s, not_finite)
        part.meter.publish(values, step=batch.number)
        idle_since_s = time.monotonic()
