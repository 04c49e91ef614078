"""The example that asks chat completions itself, as it is run: a stub of vLLM with a real BPE
tokenizer, a log in memory, and what lies in it afterwards.
"""

from __future__ import annotations

import itertools
import runpy
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import run_file, topology
from streamrl.config.run_file import RunFile
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Output
from streamrl.stream.log.records_of import records_of
from streamrl.stream.records import Demand, Metric, Rollout
from tests.inference.stub import Stub
from tests.support.bpe import bpe
from tests.support.modules import module_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "chat_env.py"
ENV = "outside"
TOKENIZER: Any = bpe()
TOPICS = {topology.rollouts(ENV): 2, topology.SERVERS: 1, topology.DEMAND: 1, topology.METRICS: 1}


class ChatStub(Stub):
    """Answers a chat completion with a digit a choice, as vLLM does with `return_token_ids`."""

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path != "/v1/chat/completions":
            return super().answer(path, body)
        prompt = TOKENIZER.apply_chat_template(body["messages"], add_generation_prompt=True)
        choices = [answered(str(index), index) for index in range(body["n"])]
        return 200, {
            "id": "a",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": choices,
            "prompt_token_ids": list(prompt),
        }


def answered(text: str, index: int) -> dict[str, Any]:
    ids = TOKENIZER.encode(f"{text}<eos>")
    content = [{"token": "?", "logprob": -0.5, "top_logprobs": []} for _ in ids]
    return {
        "index": index,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": text},
        "logprobs": {"content": content},
        "token_ids": ids,
    }


def run_of(directory: Path) -> RunFile:
    return run_file.parse(
        {
            "run": "chat",
            "runs_dir": str(directory),
            "envs": {"copy-digits": {}, ENV: {"replicas": 0, "temperature": 0.7}},
            "buffer": {"group_size": 4},
        }
    )


def produced(directory: Path, template: str) -> tuple[ChatStub, MemoryLog]:
    """The log after two groups of a producer whose tokenizer has this chat template."""
    tokenizer = bpe(template)
    tokenizer.save_pretrained(directory / "model")
    log = MemoryLog(TOPICS)
    wanted = Demand(environment=ENV, wanted_tokens=10_000, held_tokens=0, closed_groups={})
    writer = log.producer()
    writer.send(to_message(Output(topology.DEMAND, ENV, wanted)))
    over = threading.Event()

    def beat(stub: Stub) -> None:
        for number in itertools.count(1):
            record = stub.record(heartbeat_s=float(number))
            writer.send(to_message(Output(topology.SERVERS, stub.name, record)))
            if over.wait(0.1):
                return

    with ChatStub("inference-0") as stub:
        beating = threading.Thread(target=beat, args=(stub,))
        beating.start()
        try:
            module_of(EXAMPLE).main(run_of(directory), log, ENV, directory / "model", 2)
        finally:
            over.set()
            beating.join()
    return stub, log


def rollouts(log: MemoryLog) -> list[Rollout]:
    return [record for record, _ in records_of(log, topology.rollouts(ENV), Rollout)]


def counted(log: MemoryLog) -> dict[str, float]:
    """The last metrics of the producer."""
    (*_, (last, _)) = records_of(log, topology.METRICS, Metric)
    assert last.source == "outside-outside"
    return last.values


def test_its_rollouts_have_the_servers_tokens_and_its_counts_are_published(tmp_path: Path):
    stub, log = produced(tmp_path, TOKENIZER.chat_template)
    made = rollouts(log)
    assert len(made) == 8 and len({rollout.rollout_uid for rollout in made}) == 8
    assert sorted(rollout.reward for rollout in made) == [0.0] * 4 + [1.0] * 4
    assert {(each.misaligned, each.temperature, each.policy_version) for each in made} == {
        ("", 0.7, 3)
    }
    assert all(not rollout.metadata for rollout in made)  # every prompt was compared
    (prompt, answer) = made[0].turns
    assert prompt.tokens is not None and answer.tokens is not None and answer.logprobs is not None
    assert TOKENIZER.decode(prompt.tokens).startswith("<|user|>")
    assert answer.tokens.tolist() == TOKENIZER.encode(f"{answer.message}<eos>")
    asked = [body for path, body in stub.asked if path == "/v1/chat/completions"]
    assert [(body["temperature"], body["return_token_ids"]) for body in asked] == [(0.7, True)] * 2
    counts = counted(log)
    assert counts["inference_context/rollouts"] == 8
    assert counts["inference_context/misaligned"] == counts["inference_context/unchecked"] == 0


def test_with_another_template_than_the_servers_nothing_is_trained_on(tmp_path: Path):
    _, log = produced(tmp_path, "{{ messages[0]['content'] }}")
    assert all("tokenize_prompt gives" in rollout.misaligned for rollout in rollouts(log))
    assert counted(log)["inference_context/misaligned"] == 8


def test_without_arguments_it_says_how_it_is_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["chat_env.py"])
    with pytest.raises(SystemExit, match=r"chat_env\.py RUN ENV MODEL GROUPS"):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
