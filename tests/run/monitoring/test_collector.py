"""The real buffer and batcher behind `/metrics`, with the log in memory."""

from __future__ import annotations

import pytest

from streamrl.batcher import process as batcher
from streamrl.buffer import process as buffer
from streamrl.config.run_file import RunFile
from streamrl.run.monitoring.http import serving
from streamrl.run.monitoring.metric_names import find_metric
from streamrl.stream.log.instrumented import InstrumentedLog
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import end_offset
from tests.run.monitoring.endpoints import get, metrics_urls, samples
from tests.support import data_path
from tests.support.life import run_until


def test_what_the_page_shows_is_what_the_records_say(run: RunFile):
    """The real parts: every name is known, every number is that of the topic."""
    memory = MemoryLog(data_path.TOPICS)
    data_path.announce(memory, 0)
    for env in run.envs:
        data_path.send_groups(memory, env, range(8), 0)
    for main, part, wanted in (
        (buffer.main, "buffer", "groups.add"),
        (batcher.main, "batcher", "batches"),
    ):
        with serving(run, memory, part) as log:
            assert isinstance(log, InstrumentedLog)
            run_until(
                lambda stop, main=main, log=log: main(run, log, stop),
                lambda log=log, wanted=wanted: (
                    bool(log.reports)
                    and end_offset(log, wanted, 0) > 0
                    and (wanted != "batches" or bool(log.steps))
                ),
            )
            names = (
                {name for report in log.reports.values() for name in report}
                | {name for _, name in log.steps}
                | log.metrics().keys()
            )
            assert [name for name in names if find_metric(name) is None] == []
            # its reader is closed
            assert (
                log.is_ready
                and any(name.startswith("part/lag_records/") for name in log.metrics()) is False
            )
            page = samples(get(metrics_urls(run, part)[0])[1])
            for (source, name), value in log.steps.items():
                known, of = find_metric(name) or pytest.fail(name)
                labels = {
                    "run": "small",
                    "part": source,
                    **dict(zip(known.labels, of, strict=True)),
                }
                assert page[known.prometheus, tuple(sorted(labels.items()))] == pytest.approx(value)
