import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench import loop
from bench.loop import Heard, figures
from streamrl.stream.records import Metric


def said(source: str, time_s: float, step: int | None = None, **values: float) -> Metric:
    return Metric(
        source=source,
        time_s=time_s,
        step=step,
        values={
            f"{source}/{name.replace('SHARE', 'share_s/add')}": v for name, v in values.items()
        },
    )


def learner(step: int, time_s: float, idle_s: float) -> Metric:
    return said(
        "learner", time_s, step, idle_s=idle_s, step_s=0.5, publish_s=0.2, batch_age_mean=1.0
    )


def test_the_time_of_a_loop_by_cause():
    """Steps of 2 s: 1 s idle, 0.5 s training, 0.2 s publishing, 0.3 s between. Each batch is built
    0.9 s into the idle second, after 0.4 s for data and 0.3 s for a share; the server stands still
    for 0.05 s of it, as soon as the version is announced, 0.05 s into it.
    """
    metrics = [learner(0, 10.0, 5.0)]
    versions = {0: 8.0}
    for step in (1, 2):
        begun = 8.0 + 2 * step
        versions[step] = begun + 0.05
        metrics.append(
            said("batcher", begun + 0.9, step, waited_for_data_s=0.4, waited_for_SHARE=0.3)
        )
        metrics.append(said("inference", begun + 0.2, step, heard_s=0.0, pull_s=0.0, swap_s=0.05))
        metrics.append(learner(step, begun + 2.0, 1.0))
    metrics += [
        said("inference", 10.0 + i, asked_s=5 + 0.5 * i, paused_s=1 + 0.1 * i, idle_s=4 + 0.4 * i)
        for i in range(5)
    ]
    found = figures(
        Heard(metrics, versions, {"batched": 90, "expired": 10}), skipped=0, lookahead=0
    )
    assert (found["steps"], found["steps_per_s"], found["expired_frac"]) == (2, 0.5, 0.1)
    wanted = {
        "training": 0.25,
        "publishing": 0.1,
        "version": 0.025,
        "weights": 0.025,
        "share": 0.15,
        "data": 0.2,
        "log": 0.1,
        "other": 0.15,
    }
    assert found["learner"] == pytest.approx(wanted)
    # 0.6 s in two of its four seconds of looks were spent waiting for the share: 0.3 of each idle
    # 0.4
    assert found["server"] == pytest.approx(
        {"sampling": 0.5, "weights": 0.1, "share": 0.15, "demand": 0.25}
    )


def test_a_run_without_a_step_that_counts_is_refused():
    with pytest.raises(SystemExit, match="the run ended after step 1, and the first 20 steps"):
        figures(Heard([learner(1, 3.0, 1.0)], {}, {}), skipped=20, lookahead=0)


def test_both_loops_run_in_turns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    rates = iter([3.0, 2.0, 5.0, 2.5])

    def run_one(name: str, overrides: Sequence[str], steps: int) -> loop.Run:
        shares = {part: dict.fromkeys(labels, 0.25) for part, labels in loop.LABELS.items()}
        return {
            "name": name,
            "steps_per_s": next(rates),
            "step_s": 0.1,
            "swap_s": 0.05,
            "batch_age_mean": 1.0,
            "expired_frac": 0.0,
            **shares,
        }

    out = tmp_path / "loop.json"
    monkeypatch.setattr(loop, "run_one", run_one)
    monkeypatch.setattr("sys.argv", ["bench.loop", "--rounds", "2", "--out", str(out)])
    loop.main()
    assert [run["name"] for run in json.loads(out.read_text())["runs"]] == [
        loop.OVERLAPPED,
        loop.ONE_AT_A_TIME,
    ] * 2
    said = capsys.readouterr().out
    assert "overlapped to one at a time: 1.75 (1.50 to 2.00)" in said
    monkeypatch.setattr("sys.argv", ["bench.loop", "--table", "--out", str(out)])
    loop.main()
    # again, from the file
    assert capsys.readouterr().out.strip() == said[said.index("|") :].strip()
