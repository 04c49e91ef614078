"""The run file of old rollouts, as it is: they are as old as it says, they are corrected, and the
run reaches its target.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest
import yaml

from streamrl.stream.local_kafka import connect
from tests.loop.runs import ROOT, live, metric_values


@pytest.mark.live
@pytest.mark.slow
def test_rollouts_up_to_eight_versions_old_teach(tmp_path: Path):
    settings = yaml.safe_load((ROOT / "deploy" / "runs" / "stale.yaml").read_text())
    with live(tmp_path, settings) as run:
        run.up()
        assert run.wait(900) == 0, run.said()
        run.nothing_left()
        report = run.report()["envs"]["copy-digits"]
        with connect.connect_or_start(run.run):
            names = (
                "batch_age_mean",
                "batch_age_max",
                "mismatch_kl",
                "effective_sample_size",
                "rejected_frac",
            )
            found = {name: metric_values(run, f"learner/{name}") for name in names}
    print(
        report, {name: (min(values), fmean(values), max(values)) for name, values in found.items()}
    )
    assert report["reward_mean_last20"] >= 0.9 > 0.2 > report["reward_mean_first20"]
    assert max(found["batch_age_max"]) == 8 and fmean(found["batch_age_mean"]) > 4
    assert fmean(found["mismatch_kl"]) > 1e-4 and 0 < min(found["effective_sample_size"]) < 0.99
    assert all(0 <= value < 1 for value in found["rejected_frac"])
