"""The run file of the curriculum: stages follow one another by reward, the last env is learned, and
replay makes the same batches.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from streamrl.stream.local_kafka import connect
from tests.loop.runs import ROOT, live, metric_values


@pytest.mark.live
@pytest.mark.slow
def test_stages_follow_one_another_and_the_last_is_learned(tmp_path: Path):
    settings = yaml.safe_load((ROOT / "deploy" / "runs" / "curriculum.yaml").read_text())
    with live(tmp_path, settings) as run:
        run.up()
        ended = run.wait(900)
        assert ended == 0, run.said()
        run.nothing_left()
        report = run.report()["envs"]
        with connect.connect_or_start(run.run):
            stages = metric_values(run, "batcher/curriculum_stage")
            left_out = metric_values(run, "env/left_out")
            used = {env: metric_values(run, f"batches/{env}/frac_used") for env in settings["envs"]}
        replayed = run.command("replay", str(run.file), timeout_s=300)
    print(
        report,
        {stage: stages.count(stage) for stage in (0, 1, 2)},
        f"left out {max(left_out):.0f}",
        replayed.stdout,
    )
    assert stages == sorted(stages) and {*stages} == {0, 1, 2}
    assert (
        max(used["one-digit"][: stages.count(0)]) == 1
        and report["three-digits"]["reward_mean_last20"] >= 0.8
    )
    assert max(left_out) > 0 and replayed.returncode == 0, replayed.stdout + replayed.stderr
