"""Each sink over several lives of its run: what it wrote is read back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from streamrl.monitoring.sinks.runner import running
from tests.monitoring.sinks import stories
from tests.monitoring.sinks.readers import (
    Points,
    mlflow_points,
    tensorboard_points,
    wandb_points,
)

SINKS: dict[str, tuple[Callable[[Path], dict[str, Any]], Callable[[Path], Points]]] = {
    "tensorboard": (lambda directory: {}, tensorboard_points),
    "wandb": (lambda directory: {"mode": "offline"}, wandb_points),
    "mlflow": (
        lambda directory: {"tracking_uri": f"file://{directory / 'digits' / 'mlflow'}"},
        mlflow_points,
    ),
}


@pytest.fixture(autouse=True)
def mlflow_in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its store without a server and without a database."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


@pytest.mark.parametrize("name", SINKS)
def test_a_resumed_run_continues_its_curves(name: str, tmp_path: Path):
    params, read = SINKS[name]
    context = stories.context(tmp_path, sinks=({"kind": name, "params": params(tmp_path)},))
    for known in (3, 3, 7):  # steps that there are in each life; in the second nothing happens
        with running(context) as sinks:
            sinks.write(enumerate(stories.records(range(known))))
    found = stories.only_once(read(tmp_path / "digits" / name))
    assert {name: dict(sorted(points.items())) for name, points in found.items()} == {
        name: {step: pytest.approx(value, rel=1e-6) for step, value in points.items()}
        for name, points in stories.curves(range(7)).items()
    }


# ---- lines ---------------------------------------------------------------------------------------


def lines(path: Path) -> Iterator[dict[str, object]]:
    return (json.loads(line) for line in path.read_text().splitlines())


@pytest.mark.parametrize("torn", [0, 1, 30])
def test_jsonl_has_every_record_once(torn: int, tmp_path: Path):
    from streamrl.monitoring.sinks.jsonl import JsonLines

    told = stories.entries(stories.records(range(5)))
    path = tmp_path / "digits" / "metrics.jsonl"
    for life in (told[:7], told, told):
        sink = JsonLines(stories.context(tmp_path))
        stories.tell(sink, life)
        sink.close()
        if torn and life is not told:
            path.write_bytes(path.read_bytes()[:-torn])
    found = list(lines(path))
    assert [line["offset"] for line in found] == [entry.offset for entry in told]
    assert [line["values"] for line in found] == [entry.metric.values for entry in told]
    assert (
        found[1]["source"] == "batcher" and found[1]["step"] == 0 and found[1]["time_s"] == 1_000.0
    )


@pytest.mark.parametrize(
    "before", ["", '{"source": "buffer", "time_s": 1.0, "values": {}}\n', '{"sour']
)
def test_jsonl_that_has_no_offsets_is_written_anew(before: str, tmp_path: Path):
    from streamrl.monitoring.sinks.jsonl import JsonLines

    told = stories.entries(stories.records(range(2)))
    path = tmp_path / "digits" / "metrics.jsonl"
    path.parent.mkdir()
    path.write_text(before)
    sink = JsonLines(stories.context(tmp_path))
    stories.tell(sink, told)
    sink.close()
    assert [line["offset"] for line in lines(path)] == [entry.offset for entry in told]


def test_the_console_says_the_steps_of_this_session(tmp_path: Path):
    from streamrl.monitoring.sinks.console import Console

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
