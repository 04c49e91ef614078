from pathlib import Path

import pytest

from bench.weights import gaps, middle, plain, stages
from streamrl.stream.records import PolicyVersion


def test_the_stages_of_the_server_that_was_last():
    record = PolicyVersion(learner="lead", version=3, uri="", size_bytes=0, sha256="", time_s=100.7)
    learner = {"export_s": 0.3, "hash_s": 0.2, "announce_s": 0.4}
    swap = {
        "inference/pause_s": 0.01,
        "inference/reload_s": 0.1,
        "inference/resume_s": 0.02,
        "inference/swap_s": 0.13,
    }
    fast = {"inference/heard_s": 0.05, "inference/pull_s": 0.1, **swap}
    slow = {"inference/heard_s": 0.04, "inference/pull_s": 0.2, **swap}
    found = stages(learner, record, 100.0, [fast, slow])
    wanted = {
        "export": 0.3,
        "hash": 0.2,
        "probe": 0.2,
        "announce": 0.04,
        "pull": 0.2,
        "pause": 0.01,
        "reload": 0.1,
        "resume": 0.02,
    }
    assert found == pytest.approx({**wanted, "all": 0.7 + 0.37})


def test_a_chain_may_end_before_vllm():
    record = PolicyVersion(learner="lead", version=3, uri="", size_bytes=0, sha256="", time_s=1.5)
    found = stages(
        {"export_s": 1.0, "hash_s": 0.5},
        record,
        0.0,
        [{"inference/heard_s": 0.25, "inference/pull_s": 1.0}],
    )
    assert found == pytest.approx(
        {"export": 1.0, "hash": 0.5, "probe": 0.0, "announce": 0.25, "pull": 1.0, "all": 2.75}
    )


def test_the_middle_of_some_rounds():
    rounds = [
        {"all": seconds, "ratio": ratio} for seconds, ratio in ((3.0, 1.5), (1.0, 1.0), (2.0, 1.25))
    ]
    assert middle(rounds) == {"all": 2.0, "ratio": {"median": 1.25, "min": 1.0, "max": 1.5}}


def test_the_gaps_in_requests():
    times = [[1.0, 1.5, 3.5], [4.0], [2.0, 3.0]]
    assert gaps(times) == [0.5, 2.0, 1.0]
    assert (
        gaps(times, 2.5, 2.75) == [2.0, 1.0]
        and gaps(times, end=1.25) == [0.5]
        and gaps(times, 3.25) == [2.0]
    )


def test_plain_copies_leave_nothing(tmp_path: Path):
    (tmp_path / "version").mkdir()
    (tmp_path / "version" / "model.safetensors").write_bytes(bytes(1000))
    assert plain(tmp_path / "version", 2, tmp_path) > 0
    assert [path.name for path in tmp_path.iterdir()] == ["version"]
