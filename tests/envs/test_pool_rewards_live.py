"""Judges in a pool of the run, on real vLLM with a model of their own: what they say of recorded
rollouts are records, and a judge's server that is killed in the middle makes no reward.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from safetensors.numpy import load_file, save_file

from streamrl.config.run_file import RunFile, parse
from streamrl.config.sections.learner import TinyModel
from streamrl.envs.pool_rewards import connected, wait_until_ready
from streamrl.extensions.recordings.rescore import (
    RescoreResult,
    rescore,
    rewards_of_scorer,
    scorer_of,
)
from streamrl.learner.files.export import WEIGHTS
from streamrl.learner.initial import tiny_tokenizer, write_tiny
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import Reward
from tests.support.build import rollout_saying
from tests.support.data_path import publish
from tests.support.live import START_S, LiveServers, vllm_processes
from tests.support.waiting import patience

pytestmark = pytest.mark.slow

CONTEXT = 64  # tokens
ROLLOUTS = 60
JUDGES = ("inference-judge-0", "inference-judge-1")
# The judge answers a digit. No digit is worth 0, so a reward of 0 would be made up.
LOW = -1
SCORES = [(digit - LOW) / (9 - LOW) for digit in range(10)]


class LiveJudges(LiveServers):
    """The servers of the judges' pool, without a policy."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.run = run_of(directory, write_judge(directory / "judge"))
        topics = ("rollouts.copy", "rewards.copy", "servers", "metrics", "policy-versions")
        self.log = MemoryLog(dict.fromkeys(topics, 1))
        for number in range(ROLLOUTS):
            record = rollout_saying(number)
            publish(self.log, Output("rollouts.copy", record.group_id, record))

    def rescored(self, version: str, each: Callable[[int], None]) -> RescoreResult:
        """Have the judges judge what is recorded."""
        made = scorer_of(self.run, "copy", "quality", version)
        scorer = replace(made, env=None)

        async def judged() -> RescoreResult:
            async with connected(self.run, self.log, [scorer.function]) as clients:
                await wait_until_ready(clients)
                return await rescore(
                    self.log, "copy", scorer, {}, progress=lambda done, total: each(done)
                )

        return asyncio.run(asyncio.wait_for(judged(), patience(START_S)))

    def rewards(self, version: str) -> dict[str, Reward]:
        found = rewards_of_scorer(self.log, "copy", "quality", version)
        return {uid: reward for uid, (reward,) in found.items()}


def run_of(directory: Path, judge: Path) -> RunFile:
    params = {
        "pool": "judge",
        "prompt": "{completion}",
        "score": "([0-9])",
        "low": LOW,
        "high": 9,
        "max_tokens": 1,
        "attempts": 8,
        "timeout_s": patience(10),
    }
    return parse(
        {
            "run": "judged",
            "runs_dir": str(directory),
            "envs": {
                "copy": {
                    "kind": "copy-digits",
                    "env_timeout_s": START_S,
                    "rewards": {"quality": {"kind": "judge", "params": params}},
                }
            },
            "batcher": {"max_seq_len": CONTEXT},
            "model": {"max_seq_len": CONTEXT},
            "inference": {
                "max_model_len": CONTEXT,
                "heartbeat_s": 0.2,
                "pools": {"judge": {"replicas": 2, "model": str(judge)}},
            },
        }
    )


def write_judge(directory: Path) -> Path:
    """A tiny model whose likeliest token is a digit, whatever it is asked: half of the digits have
    the opposite logits of the others, and every other token has 0.
    """
    tiny = TinyModel(seed=7)
    write_tiny(directory, tiny, CONTEXT)
    tensors = load_file(directory / WEIGHTS)
    digits = tiny_tokenizer(tiny.alphabet).convert_tokens_to_ids(list("0123456789"))
    head = tensors["lm_head.weight"] * 0
    head[digits[:5]] = 100 * tensors["lm_head.weight"][digits[:5]]
    head[digits[5:]] = -head[digits[:5]]
    save_file({**tensors, "lm_head.weight": head}, directory / WEIGHTS, metadata={"format": "pt"})
    return directory


@pytest.fixture
def judges(tmp_path: Path) -> Iterator[LiveJudges]:
    made = LiveJudges(tmp_path)
    try:
        for index in range(len(JUDGES)):
            made.start(index, "judge")
        for name in JUDGES:
            made.until(name, lambda server: server.state == "ready", START_S)
        yield made
    finally:
        made.close()


def is_alive(process: psutil.Process) -> bool:
    """False for a zombie too, which nobody has waited for."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_a_judge_that_is_killed_in_the_middle_makes_no_reward(
    judges: LiveJudges, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("streamrl.extensions.recordings.rescore.PORTION", 10)
    record = judges.records()[JUDGES[1]]
    assert record is not None
    family = vllm_processes(record.url)
    assert family
    cut = list[int]()

    def kill() -> None:
        for process in family:
            process.kill()
        psutil.wait_procs(family, 10)

    def freeze(done: int) -> None:
        """It is frozen first, so that what is sent to it before its death is not answered."""
        if done == 20:
            for process in family:
                process.suspend()
            threading.Timer(1.0, kill).start()
            cut.append(done)

    result = judges.rescored("1", freeze)
    assert cut and (result.rescored, result.failed) == (ROLLOUTS, 0)
    rewards = judges.rewards("1")
    assert {(r.name, r.scorer, r.scorer_version, r.failure) for r in rewards.values()} == {
        ("quality", "quality", "1", "")
    }
    values = {uid: reward.value for uid, reward in rewards.items()}
    assert len(values) == ROLLOUTS and len(set(values.values())) > 2
    assert all(min(abs(value - score) for score in SCORES) < 1e-9 for value in values.values())
    assert not any(is_alive(process) for process in family)
    # The server that is left says the same of all of them.
    assert judges.rescored("2", lambda done: None).failed == 0
    assert {uid: reward.value for uid, reward in judges.rewards("2").items()} == values
