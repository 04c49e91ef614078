from __future__ import annotations

from pathlib import Path

from streamrl.run.monitoring.sinks.console import Console
from tests.run.monitoring.sinks import stories


def test_the_console_says_the_steps_of_this_session(tmp_path: Path):

    said: list[str] = []
    sink = Console(
        stories.context(tmp_path, said.append, since_s=1_002.0),
        show=["learner/loss", "batches/*/reward/mean"],
    )
    stories.tell(sink, stories.entries(stories.records(range(4), tries=2)))
    assert said == [
        "step 2: learner/loss 0.3333, batches/copy/reward/mean 0.2",
        "step 3: learner/loss 0.25, batches/copy/reward/mean 0.3",
    ]
