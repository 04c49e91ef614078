"""The run file of GRPO with a reference pool, as it is: it learns while a scorer is killed, every
batch is scored once, and it can be run again.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest
import yaml

from streamrl.stream.local_kafka import connect
from streamrl.stream.records import Scores
from tests.loop.runs import ROOT, any_part, live, metric_values

WORKER = "scorer --index 1"


@pytest.mark.live
@pytest.mark.slow
def test_grpo_learns_with_a_pool_that_loses_a_worker(tmp_path: Path):
    settings = yaml.safe_load((ROOT / "deploy" / "runs" / "grpo-reference-pool.yaml").read_text())
    with live(tmp_path, settings) as run:
        run.up()
        run.until(lambda: run.version() >= 4, "version 4", 400)
        old = run.part(WORKER).pid
        os.kill(old, signal.SIGKILL)
        run.until(lambda: any_part(run, WORKER, old), "the worker's next life")
        assert run.wait(900) == 0, run.said()
        run.nothing_left()
        report = run.report()
        file = str(run.run.directory / "run.yaml")
        with connect.connect_or_start(run.run):
            scores = [
                record for record in run.records("scores", "scores") if isinstance(record, Scores)
            ]
            followed = metric_values(run, "scorer/reference_version")
            spent = {
                name: metric_values(run, name)
                for name in ("scorer/score_s", "scorer/idle_s", "learner/idle_s", "learner/kl")
            }
        account = run.command("audit", file, timeout_s=200)
        replayed = run.command("replay", file, "--weights", timeout_s=600)
    print(
        report,
        {
            name: (min(values), sum(values) / len(values), max(values))
            for name, values in spent.items()
        },
        account.stdout,
        replayed.stdout,
    )
    env = report["envs"]["copy-digits"]
    assert env["reward_mean_last20"] >= 0.9 > 0.2 > env["reward_mean_first20"]
    numbers = Counter(record.number for record in scores)
    assert set(numbers.values()) == {1} and set(range(report["steps"])) <= set(numbers)
    assert all(record.scorer == f"scorer-{record.number % 2}" for record in scores)
    assert (
        all(record.reference == record.number - record.number % 25 for record in scores)
        and max(followed) >= 25
    )
    assert account.returncode == 0 and replayed.returncode == 0, (
        account.stdout + replayed.stdout + replayed.stderr
    )
