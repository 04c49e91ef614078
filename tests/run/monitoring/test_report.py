import json
import math
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import ANY

import numpy as np
import pytest
from PIL import Image

from streamrl.config.run_file import RunFile, parse
from streamrl.config.sections.batches import Target
from streamrl.run.monitoring import report
from streamrl.run.monitoring.plot import trailing_mean
from streamrl.run.monitoring.report import elapsed_s, summarise, time_to_target
from streamrl.run.monitoring.run_history import MixedVersions, RunHistory, collect
from streamrl.stream.log import chunks
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.meter import Meter
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import Fate, PolicyVersion, Record, Server
from tests.run.orchestrator.script import batch
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
        "fates",
        "copy",
        Fate(
            fate="expired",
            environment="copy",
            partition=0,
            offsets=np.arange(2),
            tokens=np.array([3, 4], np.int32),
        ),
    )
    put(
        "fates",
        "copy",
        Fate(
            fate="batched",
            environment="copy",
            partition=1,
            offsets=np.arange(1),
            tokens=np.array([9], np.int32),
            batch=0,
        ),
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
    made = summarise(run, collect(run, log), {"kafka": "4"})
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
    before = summarise(run, collect(run, log), {})
    names = ("inference/mismatch_tokens", "inference/mismatch_max_abs", "orchestrator/active_s")
    if not math.isfinite(value):
        Meter(log, "inference-0").publish(dict.fromkeys(names, value), step=1)
    Meter(log, "env-copy-0").publish(
        {"orchestrator/active_s": value, "batches/copy/mixed_versions_frac": value}, step=1
    )
    Meter(log, "batcher").publish(
        {"batches/copy/mixed_versions_frac": value, "batches/copy/rollouts_used": value}, step=2
    )
    assert summarise(run, collect(run, log), {}) == before
    Meter(log, "inference-0").publish({"inference/mismatch_tokens": 1e308}, step=1)
    report.write_report(run, log)


def test_a_batch_that_retention_has_cut_is_left_out(
    run: RunFile, log: MemoryLog, monkeypatch: pytest.MonkeyPatch
):
    before = summarise(run, collect(run, log), {})
    monkeypatch.setattr(chunks, "MESSAGE_BYTES", 300)
    whole = to_message(Output("batches", "3", batch(3, {"copy": [0.5]})))
    pieces = chunks.split([whole])
    assert len(pieces) > 1
    log.append(pieces[1:], marker=False)
    assert summarise(run, collect(run, log), {}) == before


def test_tokens_by_fate_and_what_was_launched_and_trained_on(run: RunFile, log: MemoryLog):
    made = summarise(run, collect(run, log), {})
    assert made["tokens"]["sampled"] == 16
    assert made["tokens"]["fates"] == {"batched": 9, "expired": 7}
    assert made["bias"] == [
        {
            "env": "copy",
            "feature": "length",
            "launched": 16 / 3,
            "trained": 9.0,
            "standard_error": None,
            "alarm": False,
        }
    ]


def test_files_and_words(run: RunFile, log: MemoryLog):
    made = report.write_report(run, log)
    assert json.loads((run.directory / "report.json").read_text()) == made
    with Image.open(run.directory / "reward.png") as picture:
        assert picture.width > 1_000 and len(set(picture.convert("L").tobytes())) > 20
    assert report.summary_line(made).startswith(
        "3 steps in 0 s; reward copy 0.417 -> 0.417 (4 rollouts), add 1.000 -> 1.000 (1 rollouts);"
        " logprobs off by 2.0e-06 over 127 tokens"
    )
    assert {"kafka", "vllm", "levanter", "jax", "streamrl", "python"} <= set(made["versions"])


def test_a_run_in_which_nothing_happened_has_a_report(run: RunFile):
    made = report.write_report(run, MemoryLog(TOPICS))
    assert (
        made["steps"],
        made["policy_version"],
        made["wall_s"],
        made["time_to_target_s"],
        made["servers"],
    ) == (0, -1, 0.0, None, [])
    assert made["envs"]["copy"]["reward_mean_first20"] is None
    assert (run.directory / "reward.png").exists()


def history(active: Sequence[tuple[float, float]] = (), target: Target | None = None) -> RunHistory:
    found = RunHistory(target)
    for point in active:
        found.active.add(point)
    return found


def test_time_runs_while_there_is_a_server():
    """Two sessions: a server from 100 to 110, and from 200 on; the orchestrator says how long there
    has been one.
    """
    found = history([(101.0, 1.0), (110.0, 10.0), (201.0, 11.0), (210.0, 20.0)])
    assert [
        elapsed_s(found, time_s) for time_s in (100.0, 105.0, 110.0, 201.0, 205.5, 212.0)
    ] == pytest.approx([0.0, 5.0, 10.0, 11.0, 15.5, 22.0])
    assert elapsed_s(found, 90.0) == 0.0
    without = history()
    without.add_version(0, 5.0)
    assert report.elapsed_at(without, []) == [] and report.elapsed_at(without, [4.0, 7.0]) == [
        0.0,
        2.0,
    ]


def test_a_curve_has_every_batch_and_the_mean_of_the_last_twenty():
    found = history()
    rewards = [float(i % 7) for i in range(100)]
    for number, reward in enumerate(rewards):
        found.add_rewards(number, number + 0.5, {"copy": reward})
    curve = report.curves(found)["copy"]
    assert (list(curve.steps), list(curve.rewards)) == (list(range(100)), rewards)
    np.testing.assert_allclose(curve.smooth, trailing_mean(rewards, 20))


def long_run(batches: int) -> RunHistory:
    """Of 20 envs; evaluated at every twentieth version, each metric said twice."""
    found = RunHistory()
    means = {f"env-{i}": i / 20 for i in range(20)}
    for number in range(batches):
        found.add_rewards(number, float(number), means)
        found.add_version(number, float(number))
        found.active.add((float(number), float(number)))
        for _ in range(2):
            found.mixed["env-0"].add(number, 1.0, 4.0)
        if number % 20 == 0:
            found.add_evaluation(build.evaluation(version=number))
    return found


def test_a_long_run_takes_no_more_than_a_short_one(run: RunFile):
    """10^5 batches of 20 envs."""
    sizes = list[int]()
    for batches in (10_000, 100_000):
        found = long_run(batches)
        made = summarise(run, found, {})
        sizes.append(len(pickle.dumps((found.rewards, found.active, found.versions))))
        assert len(json.dumps(made)) < 200_000
        assert made["steps"] == made["wall_s"] == batches - 1
        assert found.mixed["env-0"] == MixedVersions(batches, 4 * batches, ANY)
        versions = [entry["version"] for entry in made["evals"]["held"]]
        assert versions[0] == 0 and versions[-1] == batches - 20 and len(versions) <= 1_000
        for curve in report.curves(found).values():
            assert curve.steps[0] == 0 and curve.steps[-1] == batches - 1
            assert 2_500 <= len(curve.steps) <= 5_001
    assert sizes[1] < 1.1 * sizes[0] < 10_000_000


def test_the_target_is_reached_with_its_last_batch():
    target = Target(env="copy", reward=0.5, batches=2)
    found = history([(0.0, 0.0)], target)
    for number, reward in enumerate([0.2, 0.4, 0.6, 0.1]):
        found.add_rewards(number, number + 1.0, {"copy": reward, "add": 1.0})
        assert time_to_target(found) == (3.0 if number >= 2 else None)
    assert time_to_target(history([(0.0, 0.0)])) is None


def test_without_matplotlib_there_is_a_report_and_no_picture(
    run: RunFile, log: MemoryLog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    for module in ("matplotlib", "matplotlib.backends.backend_agg", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    report.write_report(run, log)
    assert [path.name for path in run.directory.iterdir()] == ["report.json"]
    assert "install streamrl[plot]" in caplog.text
