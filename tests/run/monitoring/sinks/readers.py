"""Read back what TensorBoard, W&B and MLflow were given: (curve, step, value) of every point.

Each function takes the directory that the sink has written to.
"""

# pyright: reportAttributeAccessIssue=false
# Protobuf makes its message classes when it is imported, so pyright does not know them.

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

Points = list[tuple[str, int, float]]

# Sizes in bytes of W&B's files, which have LevelDB's log format after a header.
HEADER = 7
BLOCK = 32_768
HEAD = 7
# the kinds of a piece of a record
FULL = 1
FIRST = 2
LAST = 4


def tensorboard_points(directory: Path) -> Points:
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    return [
        (value.tag, event.step, value.simple_value)
        for path in sorted(directory.glob("events.out.tfevents.*"))
        for event in map(Event.FromString, RawEventFileLoader(str(path)).Load())
        for value in event.summary.value
    ]


def wandb_points(directory: Path) -> Points:
    from wandb.proto import wandb_internal_pb2 as wire

    found: Points = []
    for path in sorted(directory.glob("*run-*/run-*.wandb")):
        for data in leveldb_records(path.read_bytes()):
            record = wire.Record.FromString(data)
            values = {
                (item.key or item.nested_key[0]): json.loads(item.value_json)
                for item in record.history.item
            }
            if "step" in values:
                step = int(values.pop("step"))
                found += [(k, step, v) for k, v in values.items() if not k.startswith("_")]
    return found


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """The records of one file of W&B's. LevelDB's doc/log_format.md describes the format."""
    at = HEADER
    whole = b""
    while at + HEAD <= len(data):
        left = BLOCK - at % BLOCK
        _, size, kind = struct.unpack_from("<IHB", data, at) if left >= HEAD else (0, 0, 0)
        if kind == 0:  # the rest of a block is empty
            at += left
            continue
        piece = data[at + HEAD : at + HEAD + size]
        whole = piece if kind in (FULL, FIRST) else whole + piece
        at += HEAD + size
        if kind in (FULL, LAST):
            yield whole


def mlflow_points(directory: Path) -> Points:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"file://{directory}")
    experiment = client.get_experiment_by_name("streamrl")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    names = [name.replace(":", "@") for name in run.data.metrics]
    return [
        (name, m.step, m.value)
        for name in names
        for m in client.get_metric_history(run.info.run_id, name.replace("@", ":"))
    ]
