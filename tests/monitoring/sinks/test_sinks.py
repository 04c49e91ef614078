"""Each sink over several lives of its run: what it wrote is read back, and has every step once. A
life may end in the middle of anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streamrl.monitoring.sinks.base import Sink, SinkContext
from tests.monitoring.sinks import stories

Points = list[tuple[str, int, float]]


def tensorboard(context: SinkContext) -> Sink:
    from streamrl.monitoring.sinks.tensorboard import TensorBoard

    return TensorBoard(context)


def tensorboard_points(directory: Path) -> Points:
    from streamrl.monitoring.sinks.tensorboard import points

    return list(points(directory / "digits" / "tensorboard"))


def wandb(context: SinkContext) -> Sink:
    from streamrl.monitoring.sinks.wandb import WandB

    return WandB(context, mode="offline")


def wandb_points(directory: Path) -> Points:
    from streamrl.monitoring.sinks.wandb import rows

    return [
        (name, int(row["step"]), value)
        for row in rows(directory / "digits" / "wandb")
        for name, value in row.items()
        if name != "step"
    ]


def mlflow(context: SinkContext) -> Sink:
    from streamrl.monitoring.sinks.mlflow import MLflow

    return MLflow(context, tracking_uri=f"file://{context.run.directory / 'mlflow'}")


def mlflow_points(directory: Path) -> Points:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"file://{directory / 'digits' / 'mlflow'}")
    experiment = client.get_experiment_by_name("streamrl")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    names = [name.replace(":", "@") for name in run.data.metrics]
    return [
        (name, m.step, m.value)
        for name in names
        for m in client.get_metric_history(run.info.run_id, name.replace("@", ":"))
    ]


SINKS: dict[str, tuple[Callable[[SinkContext], Sink], Callable[[Path], Points]]] = {
    "tensorboard": (tensorboard, tensorboard_points),
    "wandb": (wandb, wandb_points),
    "mlflow": (mlflow, mlflow_points),
}


@pytest.fixture(autouse=True)
def mlflow_in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its store without a server and without a database."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


@pytest.mark.parametrize("name", SINKS)
def test_a_resumed_run_continues_its_curves(name: str, tmp_path: Path):
    opened, read = SINKS[name]
    for known in (3, 3, 7):  # steps that there are in each life; in the second nothing happens
        sink = opened(stories.context(tmp_path))
        stories.tell(sink, stories.entries(stories.records(range(known), tries=2)))
        sink.close()
    found = stories.only_once(read(tmp_path))
    assert {name: dict(sorted(points.items())) for name, points in found.items()} == {
        name: {step: pytest.approx(value, rel=1e-6) for step, value in points.items()}
        for name, points in stories.curves(range(7)).items()
    }


def test_tensorboard_passes_over_what_was_torn_off(tmp_path: Path):
    told = stories.entries(stories.records(range(4)))
    sink = tensorboard(stories.context(tmp_path))
    stories.tell(sink, told[:8])
    sink.close()
    [file] = (tmp_path / "digits" / "tensorboard").iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    assert 0 < len(tensorboard_points(tmp_path)) < 8
    sink = tensorboard(stories.context(tmp_path))
    stories.tell(sink, told)
    sink.close()
    assert {
        name: points.keys()
        for name, points in stories.only_once(tensorboard_points(tmp_path)).items()
    } == {name: points.keys() for name, points in stories.curves(range(4)).items()}


def test_wandb_passes_over_what_was_torn_off():
    from streamrl.monitoring.sinks.wandb import BLOCK, HEADER, records

    def piece(kind: int, data: bytes) -> bytes:
        return b"\0\0\0\0" + len(data).to_bytes(2, "little") + bytes([kind]) + data

    start = b"x" * HEADER + piece(1, b"whole") + piece(2, b"two ") + piece(4, b"pieces")
    # the rest of a block is empty
    padded = start + bytes(BLOCK - len(start)) + piece(1, b"behind the block")
    assert list(records(padded)) == [b"whole", b"two pieces", b"behind the block"]
    assert list(records(padded[:-1])) == [b"whole", b"two pieces"]
    assert list(records(b"")) == []


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


def test_the_shipped_names_are_those_of_the_run_file():
    from streamrl.config.run_file import SINKS as NAMES
    from streamrl.monitoring.sinks.runner import NEEDS, SHIPPED

    assert tuple(SHIPPED) == NAMES and NEEDS.keys() <= SHIPPED.keys()
