import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from streamrl.batcher.parts import split_batch
from streamrl.config.run_file import RunFile, parse
from streamrl.log.codec import to_message
from streamrl.log.memory import MemoryLog
from streamrl.log.meter import Meter
from streamrl.log.protocol import Output
from streamrl.monitoring import report
from streamrl.monitoring.plot import named, spread, trailing_mean
from streamrl.monitoring.report import History, clock, gather, summarise, time_to_target
from streamrl.records import Fate, PolicyVersion, Record, Server
from tests.orchestrator.script import batch
from tests.support import build

TOPICS = {
    "rollouts.copy": 2,
    "rollouts.add": 1,
    "batches": 1,
    "fates": 1,
    "policy-versions": 1,
    "servers": 1,
    "metrics": 1,
    "evals": 1,
}


@pytest.fixture
def run(tmp_path: Path) -> RunFile:
    target = {"env": "copy", "reward": 0.5, "batches": 2}
    return parse(
        {
            "run": "r",
            "runs_dir": str(tmp_path),
            "envs": {"copy": {}, "add": {}},
            "orchestrator": {"target": target},
        }
    )


@pytest.fixture
def log() -> MemoryLog:
    """Three batches of copy, the last of which has a rollout of add too; 4 + 1 rollouts, two of
    copy expired; versions 0 to 3.
    """
    log = MemoryLog(TOPICS)

    def put(topic: str, key: str, record: Record | None) -> None:
        log.append([to_message(Output(topic, key, record))], marker=False)

    for i in range(4):
        put("rollouts.copy", f"g{i}", build.rollout(group=f"g{i}"))
    put("rollouts.add", "g", build.rollout(env="add"))
    put(
        "fates", "copy", Fate(fate="expired", environment="copy", partition=0, offsets=np.arange(2))
    )
    put(
        "fates",
        "copy",
        Fate(fate="batched", environment="copy", partition=1, offsets=np.arange(1), batch=0),
    )
    for number in range(4):
        put(
            "policy-versions",
            "lead",
            PolicyVersion(learner="lead", version=number, uri="x", size_bytes=1, sha256="0"),
        )
    put(
        "policy-versions",
        "second",
        PolicyVersion(learner="second", version=9, uri="x", size_bytes=1, sha256="0"),
    )
    for number, rewards in enumerate(
        ({"copy": [0.0, 0.5]}, {"copy": [0.5]}, {"copy": [0.75, 0.25], "add": [1.0]})
    ):
        put("batches", str(number), batch(number, rewards))
    for version in (0, 20, 20):
        put("evals", "held", build.evaluation(version=version))
    put("evals", "held", build.evaluation(version=21, learner="second"))
    put("evals", "held", build.rollout())  # an answer
    put("servers", "inference-0", Server(server_id="inference-0", url="", version=2, state="ready"))
    put("servers", "inference-1", Server(server_id="inference-1", url="", version=3, state="ready"))
    put("servers", "inference-0", None)  # it left; what it served last counts
    for batch_number, frac, used in ((0, 0.5, 4), (1, 0.0, 4), (1, 0.0, 4)):
        Meter(log, "batcher").publish(
            {"batches/copy/mixed_versions_frac": frac, "batches/copy/rollouts_used": used},
            step=batch_number,
        )
    meter = Meter(log, "inference-0")
    meter.publish({"inference/mismatch_max_abs": 2e-6, "inference/mismatch_tokens": 63.0}, step=1)
    meter.publish({"inference/mismatch_max_abs": 1e-6, "inference/mismatch_tokens": 64.0}, step=2)
    return log


def test_the_report_of_a_small_run(run: RunFile, log: MemoryLog):
    made = summarise(run, gather(run, log), {"kafka": "4"})
    assert made["envs"]["copy"] == {
        "rollouts": 4,
        "reward_mean_first20": pytest.approx(1.25 / 3),  # of the means 0.25, 0.5, 0.5
        "reward_mean_last20": pytest.approx(1.25 / 3),
        "mixed_versions_frac": 0.25,  # 2 of 8; what is said twice counts once
        "expired": 2,
        "batched": 1,
        "fates": {"batched": 1, "expired": 2},
    }
    rewards = {"reward_mean_first20": 1.0, "reward_mean_last20": 1.0}
    assert made["envs"]["add"] == {
        "rollouts": 1,
        **rewards,
        "mixed_versions_frac": None,
        "expired": 0,
        "batched": 0,
        "fates": {},
    }
    assert (made["run"], made["steps"], made["policy_version"], made["versions"]) == (
        "r",
        3,
        3,
        {"kafka": "4"},
    )
    assert made["servers"] == [
        {"id": "inference-0", "version": 2},
        {"id": "inference-1", "version": 3},
    ]
    passed = {"pass@1": [0.25, 0.0625, 0.75], "reward": [0.375, 0.125, 0.625], "problems": 2}
    assert made["evals"] == {"held": [{"version": 0, **passed}, {"version": 20, **passed}]}
    assert (made["logprob_mismatch_max_abs"], made["logprob_mismatch_tokens"]) == (2e-6, 127)
    assert made["time_to_target_s"] is not None and made["wall_s"] >= made["time_to_target_s"]


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e308])
def test_metrics_of_whomever_do_not_end_a_report(run: RunFile, log: MemoryLog, value: float):
    before = summarise(run, gather(run, log), {})
    names = ("inference/mismatch_tokens", "inference/mismatch_max_abs", "orchestrator/active_s")
    if not math.isfinite(value):
        Meter(log, "inference-0").publish(dict.fromkeys(names, value), step=1)
    Meter(log, "env-copy-0").publish(
        {"orchestrator/active_s": value, "batches/copy/mixed_versions_frac": value}, step=1
    )
    Meter(log, "batcher").publish(
        {"batches/copy/mixed_versions_frac": value, "batches/copy/rollouts_used": value}, step=2
    )
    assert summarise(run, gather(run, log), {}) == before
    Meter(log, "inference-0").publish({"inference/mismatch_tokens": 1e308}, step=1)
    report.write(run, log)


def test_a_batch_that_retention_has_cut_is_left_out(run: RunFile, log: MemoryLog):
    before = summarise(run, gather(run, log), {})
    for piece in split_batch(batch(3, {"copy": [0.5]}), limit_bytes=100)[1:]:
        log.append([to_message(Output("batches", "3", piece))], marker=False)
    assert summarise(run, gather(run, log), {}) == before


def test_files_and_words(run: RunFile, log: MemoryLog):
    made = report.write(run, log)
    assert json.loads((run.directory / "report.json").read_text()) == made
    with Image.open(run.directory / "reward.png") as picture:
        assert picture.width > 1_000 and len(set(picture.convert("L").tobytes())) > 20
    assert report.in_words(made).startswith(
        "3 steps in 0 s; reward copy 0.417 -> 0.417 (4 rollouts), add 1.000 -> 1.000 (1 rollouts); logprobs off by 2.0e-06 over 127 tokens"
    )
    assert {"kafka", "vllm", "levanter", "jax", "streamrl", "python"} <= set(made["versions"])


def test_a_run_in_which_nothing_happened_has_a_report(run: RunFile):
    made = report.write(run, MemoryLog(TOPICS))
    assert (
        made["steps"],
        made["policy_version"],
        made["wall_s"],
        made["time_to_target_s"],
        made["servers"],
    ) == (0, -1, 0.0, None, [])
    assert made["envs"]["copy"]["reward_mean_first20"] is None
    assert (run.directory / "reward.png").exists()


def test_time_runs_while_there_is_a_server():
    """Two sessions: a server from 100 to 110, and from 200 on; the orchestrator says how long there
    has been one.
    """
    found = History(active=[(101.0, 1.0), (110.0, 10.0), (201.0, 11.0), (210.0, 20.0)])
    assert [
        clock(found, time_s) for time_s in (100.0, 105.0, 110.0, 201.0, 205.5, 212.0)
    ] == pytest.approx([0.0, 5.0, 10.0, 11.0, 15.5, 22.0])
    assert clock(found, 90.0) == 0.0


class Gone(list[tuple[float, float]]):
    """Counts how often it is gone through."""

    times = 0

    def __iter__(self) -> Iterator[tuple[float, float]]:
        self.times += 1
        return super().__iter__()


def test_the_times_of_a_long_run_are_found_in_one_pass():
    """A server from the first second on: 1,000 batches ask for their time, and what the
    orchestrator said is not gone through for each.
    """
    said = Gone((float(i), float(i)) for i in range(1_000))
    found = History(active=said)
    found.rewards["copy"] = [(i, i + 0.5, 0.0) for i in range(1_000)]
    assert report.curves(found)["copy"].seconds == pytest.approx([i + 0.5 for i in range(1_000)])
    assert said.times <= 1
    assert report.clocks(found, []) == [] and report.clocks(
        History(versions={0: 5.0}), [4.0, 7.0]
    ) == [0.0, 2.0]


def test_of_a_long_run_so_many_points_are_drawn():
    assert spread(0).tolist() == [] and spread(3, most=3).tolist() == [0, 1, 2]
    assert spread(10, most=4).tolist() == [0, 3, 6, 9] and spread(11, most=4).tolist() == [
        1,
        4,
        7,
        10,
    ]
    assert len(spread(1_000_000)) == 5_000


def test_the_target_is_reached_with_its_last_batch(run: RunFile):
    found = History(active=[(0.0, 0.0)])
    found.rewards["copy"] = [(0, 1.0, 0.2), (1, 2.0, 0.4), (2, 3.0, 0.6), (3, 4.0, 0.1)]
    assert time_to_target(run, found) == 3.0
    found.rewards["copy"] = found.rewards["copy"][:2]
    assert time_to_target(run, found) is None


def test_trailing_mean():
    np.testing.assert_allclose(trailing_mean([1, 2, 3, 6], 2), [1, 1.5, 2.5, 4.5])
    assert trailing_mean([], 2).shape == (0,)


def test_versions_that_are_named():
    assert named(3) == [0, 1, 2, 3]
    assert named(142) == [0, 50, 100]
    assert named(69) == [0, 10, 20, 30, 40, 50, 60]
