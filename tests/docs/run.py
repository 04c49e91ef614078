"""A run as the pages speak of it, `quickstart`, without a model: buffer and batcher at work on a
real broker, rollouts and versions made up.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import yaml

from streamrl.config import run_file
from streamrl.config.run_file import RunFile
from streamrl.stream.log.kafka import topic_changes
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import RunConfig
from tests.docs.blocks import ROOT
from tests.support.build import rollout
from tests.support.data_path import play, publish

SMALL = (  # the quickstart's, for rollouts of a few tokens
    "envs.copy-digits.fraction=0.5",
    "envs.add-digits.fraction=0.5",
    "buffer.group_size=2",
    "buffer.min_group_size=2",
    "batcher.total_token_budget=80",
    "batcher.max_seq_len=10",
    "model.max_seq_len=10",
)


def make(address: str) -> RunFile:
    """Four batches of it, one failed rollout, and one record that cannot be read."""
    run = run_file.load(ROOT / "deploy" / "runs" / "quickstart.yaml", SMALL)
    kafka = {"bootstrap.servers": address}
    topic_changes.apply(run, kafka)
    log = KafkaLog(kafka, run.run)
    publish(log, Output("config", run.run, RunConfig(run=run.run, text=run.to_json(), time_s=0.0)))
    failed = rollout("copy-digits", "copy-digits-9000", failure="timed out")
    publish(log, Output("rollouts.copy-digits", failed.group_id, failed))
    play(log, run=run)
    return run


def place(run: RunFile, directory: Path) -> None:
    """Make `directory` one that a reader could be in: the run in runs/, a run file, the
    examples.
    """
    (directory / "runs" / run.run).mkdir(parents=True)
    (directory / "runs" / run.run / "run.yaml").write_text(
        yaml.safe_dump(run.model_dump(mode="json"))
    )
    shutil.copy(directory / "runs" / run.run / "run.yaml", directory / "RUN.yaml")
    for name in ("deploy", "examples"):
        (directory / name).symlink_to(ROOT / name)
