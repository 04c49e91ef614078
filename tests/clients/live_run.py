"""A run for the clients: broker, gateway, assembler, buffer, batcher, learner and vLLM in processes
of their own, and the server that scripts the answers between gateway and vLLM.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from transformers import AutoTokenizer

from streamrl.batcher.packing import pack
from streamrl.config import topology
from streamrl.learner.inputs import read_batches
from streamrl.stream.log.records_of import records_of
from streamrl.stream.records import Batch, PolicyVersion, ScoredGroup, Server
from streamrl.stream.records.sequences import sampled_counts
from streamrl.weights.pull import pull
from tests.agents.chaos import BEAT_S, ENV, ROOT, Run
from tests.clients.model import CONTEXT
from tests.clients.scripted_server import ScriptedServer
from tests.support.parity import batch_logprobs
from tests.support.waiting import until

POOL = "scripted"
VLLM = topology.inference_part(topology.GENERATION, 0)
START_S = 300.0  # of learner and vLLM
TRAIN_S = 1_800.0  # of a step on rows of 24,000 tokens, on two cores
ROW_GRAIN = 1_024  # tokens; attention is computed in such blocks


class Trained(NamedTuple):
    """What the learner was given of a session."""

    tokens: int  # that it trains on
    mean: float  # of |its logprob - vLLM's|
    max: float


class ClientRun(Run):
    """`scripted` samples for the gateway. The batcher starts with `train`: it makes a batch of a
    number of tokens, and nobody knows before how many tokens the clients will send.
    """

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        model = directory / "model"
        # In a process of its own, because JAX starts threads, and other processes are started here.
        subprocess.run([sys.executable, "-m", "tests.clients.model", model], cwd=ROOT, check=True)
        tokenizer = AutoTokenizer.from_pretrained(model)
        self.scripted = ScriptedServer(POOL, tokenizer)
        super().__init__(directory, stack, self.scripted)
        until(lambda: self.scripted.vllm, START_S, self._last_lines)

    def train(self, sessions: Sequence[str]) -> Batch:
        """The batch of all rollouts of these sessions, once the learner has trained on it, and vLLM
        serves what it has learned.
        """
        groups = until(lambda: self._groups_of(sessions), 120, self._last_lines)
        file = self.directory / "train.yaml"
        file.write_text(yaml.safe_dump(for_batch(yaml.safe_load(self.file.read_text()), groups)))
        self.commands["batcher"] = ("batcher", str(file))
        batch, _ = until(lambda: next(read_batches(self.log), None), 120, self._last_lines)
        assert sorted(set(batch.uids)) == sorted(sessions)
        until(lambda: len(self._versions()) > 1, TRAIN_S, self._last_lines, every_s=1)
        before, after = self._versions()
        assert not after.skipped and before.sha256 != after.sha256, "nothing was learned"
        until(lambda: self._served(after.version), START_S, self._last_lines, every_s=1)
        return batch

    def compare(self, batch: Batch) -> dict[str, Trained]:
        """How far the learner's logprobs of the trained tokens are from vLLM's, by session."""
        announced = self._versions()[0]
        weights = pull(announced, self.run.store, self.directory / "weights")
        return by_session(batch, batch_logprobs(weights, batch, CONTEXT))

    def _groups_of(self, sessions: Sequence[str]) -> list[ScoredGroup]:
        """The groups of these sessions, or none while one is missing."""
        groups = [group for group, _ in records_of(self.log, topology.groups(ENV), ScoredGroup)]
        found = [group for group in groups if set(group.uids) & set(sessions)]
        return found if len(found) == len(sessions) else []

    def _versions(self) -> list[PolicyVersion]:
        announced = records_of(self.log, topology.POLICY_VERSIONS, PolicyVersion)
        return [version for version, _ in announced]

    def _served(self, version: int) -> Server | None:
        """The record of a vLLM that is ready with this version."""
        servers = (server for server, _ in records_of(self.log, topology.SERVERS, Server))
        newest = {server.server_id: server for server in servers}.get(VLLM)
        is_ready = newest is not None and newest.state == "ready" and newest.version == version
        return newest if is_ready else None

    def _last_lines(self) -> str:
        """The last line that each part has logged."""
        logs = sorted(self.directory.glob("*.log"))
        return "\n".join(f"{log.name}: {log.read_text().splitlines()[-1:]}" for log in logs)

    def _settings(self, port: int) -> dict[str, Any]:
        return with_all_parts(super()._settings(port), self.directory / "model")

    def _commands(self) -> dict[str, tuple[str, ...]]:
        file = str(self.file)
        return {
            "learner": ("learner", file),
            VLLM: ("inference", file, "--index", "0"),
            **super()._commands(),
            "buffer": ("buffer", file),
        }

    def _beat(self) -> None:
        while self.scripted.vllm is None:
            if self.over.wait(BEAT_S):
                return
            self.scripted.vllm = self._served(0)
        super()._beat()


def with_all_parts(settings: dict[str, Any], model: Path) -> dict[str, Any]:
    """The settings of a run file of the gateway, with those of learner and vLLM."""
    env = settings["envs"][ENV] | {
        "pool": POOL,
        "timeout_s": 600,
        # Each session is a group, and one alone has no advantage.
        "buffer": {"group_size": 1, "min_group_size": 1},
        "loss": {"policy_gradient": 0, "cross_entropy": 1},
    }
    return settings | {
        "run": "clients",
        "envs": {ENV: env},
        "model": {"path": str(model), "max_seq_len": CONTEXT},
        "batcher": {"max_seq_len": CONTEXT, "total_token_budget": CONTEXT},
        "inference": {
            "pools": {POOL: {"replicas": 0}},
            "max_model_len": CONTEXT,
            "dtype": "float32",
        },
        "learner": {
            "precision": "float32",
            "learning_rate": 1e-3,
            "warmup_steps": 0,
            "micro_batch_rows": 1,
            "logprob_chunk": 1_024,
            "remat": "full",
        },
    }


def for_batch(settings: dict[str, Any], groups: Sequence[ScoredGroup]) -> dict[str, Any]:
    """These settings for a batcher that makes one batch of all these groups."""
    batcher = batch_of(groups)
    longest = batcher["max_seq_len"]
    return settings | {
        "batcher": batcher,
        "model": settings["model"] | {"max_seq_len": longest},
        "inference": settings["inference"] | {"max_model_len": longest},
    }


def batch_of(groups: Sequence[ScoredGroup]) -> dict[str, int]:
    """The settings of a batcher that makes one batch of these groups: in the shortest rows that
    hold the longest sequence, and as few of them as hold all.
    """
    lengths = np.concatenate([group.sequence_lengths for group in groups])
    row = -(-int(lengths.max()) // ROW_GRAIN) * ROW_GRAIN
    return {
        "total_token_budget": sum(group.total_tokens for group in groups),
        "max_seq_len": row,
        "row_count": next(
            count for count in itertools.count(1) if pack(lengths, row, count) is not None
        ),
    }


def by_session(batch: Batch, expected: np.ndarray) -> dict[str, Trained]:
    """How far the recorded logprobs of each session are from these. `expected`: (sampled tokens,)
    float32.
    """
    off = np.abs(expected - batch.policy_logprobs)
    sessions = np.repeat(np.array(batch.uids), sampled_counts(batch))
    compared = {uid: off[sessions == uid] for uid in dict.fromkeys(batch.uids)}
    return {
        uid: Trained(len(each), float(each.mean(dtype=np.float64)), float(each.max()))
        for uid, each in compared.items()
    }
