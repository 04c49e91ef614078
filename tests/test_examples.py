"""The examples and the page that explains them."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import numpy as np
import yaml

from streamrl.config import run_file
from streamrl.envs.api import Completion, PolicyTurn, Problem
from streamrl.envs.catalog import make_reward
from streamrl.envs.sessions.rewards import apply_weights, merge, normalize, totals
from streamrl.stream.log.codec import decode, unpack_array
from streamrl.stream.records import Rollout, VersionSpan
from tests.support.modules import module_of

ROOT = Path(__file__).parents[1]
OUTSIDE = ROOT / "examples" / "external_env.py"
PAGE = (ROOT / "docs" / "add-an-env.md").read_text()
RECORDS = (ROOT / "docs" / "records.md").read_text()


def blocks(language: str) -> list[str]:
    return [part.split("```")[0].strip() for part in PAGE.split(f"```{language}\n")[1:]]


def test_a_whole_env_is_short():
    assert len((ROOT / "examples" / "reverse_digits.py").read_text().splitlines()) <= 45


def test_the_pages_settings_make_a_run_file():
    for block in blocks("yaml"):
        run_file.parse({"run": "mine", **yaml.safe_load(block)})


def test_the_pages_rewards_are_the_examples():
    env = run_file.parse(
        {
            "run": "mine",
            **yaml.safe_load(next(block for block in blocks("yaml") if "reward_weights" in block)),
        }
    ).envs["sums"]
    named = {
        name: make_reward(reward.kind, reward.params, "w") for name, reward in env.rewards.items()
    }
    said = [PolicyTurn("4", np.zeros(3, np.uint16)), PolicyTurn("4", np.zeros(30, np.uint16))]
    for answers, expected in ((said[:1], 0.5 + 0.5), (said, 0.5)):
        earned = normalize({"score": 1.0})
        for name, reward in named.items():
            earned = merge(
                earned,
                normalize(
                    reward(Problem([]), Completion("4", True, answers), totals(earned)), name
                ),
            )  # type: ignore[arg-type]
        assert (
            apply_weights(earned, env.reward_weights, [len(s.tokens) for s in answers]).reward
            == expected
        )


def test_the_pages_record_is_a_rollout():
    (block,) = RECORDS.split("```json\n")[1:]
    shown = json.loads(block.split("```")[0])
    for turn in shown["turns"]:
        for name, dtype in (("tokens", np.uint16), ("logprobs", np.float32)):
            if name in turn:
                turn[name] = np.array(turn[name], dtype)
    made = msgspec.convert(shown, Rollout, dec_hook=lambda _, array: array)
    fields = {field.encode_name for field in msgspec.structs.fields(Rollout)}
    assert shown.keys() <= fields and made.sampled_tokens == 1
    how = made.turns[1].inference_metadata
    assert how is not None and how.version_spans == [VersionSpan(version=3, start=0, end=1)]


def test_the_outside_env_knows_nothing_of_streamrl():
    text = OUTSIDE.read_text()
    imported = {
        name.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import)
        for name in node.names
    }
    imported |= {
        str(node.module) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)
    }
    standard = {"array", "json", "math", "os", "sys", "time", "urllib.request"}
    assert imported <= standard | {"kafka", "msgpack"}


def test_what_the_outside_env_sends_is_a_rollout():
    choice = {
        "text": "4",
        "token_ids": [8],
        "finish_reason": "length",
        "logprobs": {"content": [{"logprob": -0.5}]},
        "weight_versions": [{"version": "3", "start": 0, "end": 1}],
    }
    made = outside().rollout(
        "outside", "g", 0, {"server_id": "inference-0"}, "7=", [1, 11, 15], choice
    )
    record = decode("rollout/1", msgpack.packb(made) or b"")
    assert isinstance(record, Rollout)
    assert (record.reward, record.policy_version, record.group_id, record.rollout_uid) == (
        1.0,
        3,
        "g",
        "g-0",
    )
    prompt, answer = record.turns
    assert prompt.tokens is not None and prompt.tokens.tolist() == [1, 11, 15]
    assert answer.logprobs is not None and answer.logprobs.tolist() == [-0.5]
    assert (
        record.truncated
        and answer.inference_metadata is not None
        and answer.inference_metadata.finish_reason == "length"
    )
    for ids, dtype in (([1, 65535], "<u2"), ([1, 65536], "<u4")):
        array = unpack_array(memoryview(outside().pack_ids(ids).data))
        assert array.tolist() == ids and array.dtype == dtype


def outside() -> Any:
    return module_of(OUTSIDE)


def test_sums_in_words_are_paid_for_the_last_number_and_for_nothing_else():
    """0.8 for the number, 0.2 more where the answer is that number alone and ended by itself."""
    made = module_of(ROOT / "examples" / "sums_in_words.py").SumsInWords(seed=3)
    problems = [made.problem(number) for number in range(200)]
    assert (
        problems[7] == made.problem(7) and len({p.messages[-1]["content"] for p in problems}) > 99
    )
    for problem in problems:
        first, word, second = problem.messages[-1]["content"].split()[2:5]
        left, right = int(first), int(second.rstrip("?"))
        assert 1 <= right < left <= 20
        assert problem.answer == str(left + right if word == "plus" else left - right)

    def paid(text: str, answer: str, finished: bool = True) -> float:
        return sum(made.rewards(Problem([], answer=answer), Completion(text, finished)).values())

    assert paid("12", "12") == 1.0
    assert paid(" 12\n", "12") == 1.0
    assert paid("12", "12", finished=False) == 0.8
    assert paid("7 plus 5 is 12.", "12") == 0.8
    assert paid("012", "12") == 0.8
    assert (
        paid("12 or 13", "12") == paid("112", "12") == paid("twelve", "12") == paid("", "12") == 0
    )
