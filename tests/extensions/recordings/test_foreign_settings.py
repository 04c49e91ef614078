from __future__ import annotations

from typing import Any

import pytest

from streamrl.config.run_file import RunFile, parse
from streamrl.extensions.recordings.foreign_settings import KEPT, LEFT_OUT, harmless_settings
from tests.run.orchestrator.test_resuming import settings


def test_every_setting_is_kept_or_left_out():
    """A new one fails here: can it reach a file, an address, a program, a device or another run?"""
    known = set(settings(RunFile))
    assert known == KEPT | LEFT_OUT
    assert not KEPT & LEFT_OUT


def taken(trusted: frozenset[str] = frozenset(), **run_file: Any) -> dict[str, Any]:
    return harmless_settings(run_file, trusted)


@pytest.mark.parametrize(
    "run_file",
    [
        {"envs": {"a": {"python": "/bin/sh"}}},
        {"envs": {"a": {"kind": "export/task.py"}}},
        {"envs": {"a": {"kind": "verifiers:gsm8k"}}},
        {"envs": {"a": {"kind": "openenv:http://attacker.example"}}},
        {"envs": {"a": {"kind": "evil:Env"}}},
        {"envs": {"a": {"variables": ["HOME"]}}},
        {"envs": {"a": {"params": {"file": "/etc/passwd", "allow_reading": True}}}},
        {"envs": {"a": {"params": {"url": {"deep": ["http://attacker.example"]}}}}},
        {"envs": {"a": {"rewards": {"q": {"kind": "judge", "params": {"base_url": "http://x"}}}}}},
        {"envs": {"a": {"rewards": {"q": {"kind": "evil.py:f"}}}}},
        {"envs": {"a": {"api_key": "env:HOME"}}},
        {"envs": {"a": {"sessions": {"rewards": ["env:HOME"]}}}},
        {"envs": {"a": {"sessions": {"tool_syntax": "evil:parse"}}}},
        {"envs": {"a": {"chat_template_kwargs": {"x": "env:HOME"}}}},
        {"envs": {"a": {"later_setting": "x"}}},
        {"later_section": {"x": 1}},
        {"kafka": {"bootstrap.servers": "attacker:9092"}},
        {"model": {"path": "/etc"}},
        {"learner": {"checkpoint_copies": "http://attacker.example"}},
        {"learner": {"name": "../../elsewhere"}},
        {"learner": {"kl": {"reference": {"path": "/etc"}}}},
        {"learner": {"loss": "evil:loss"}},
        {"weights": {"store": "s3://attacker"}},
        {"inference": {"python": "/bin/sh", "extra_args": ["--x"], "engine": {"a": 1}}},
        {"inference": {"also_serves": {"other": {"api_key": "env:HOME"}}}},
        {"inference": {"dtype": "--trust-remote-code"}},
        {"gateway": {"host": "0.0.0.0", "signing_secret": "env:HOME", "url": "http://x"}},
        {"orchestrator": {"sinks": [{"kind": "wandb"}]}},
        {"topics": {"config": {"compression.type": "x"}}},
        {"placement": {"learner": {"devices": [0]}}},
        {"eval": {"envs": {"e": {"env": "/etc", "params": {"file": "/etc/passwd"}}}}},
    ],
)
def test_what_reaches_out_of_the_run_is_left_out(run_file: dict[str, Any]):
    def leaves(value: Any) -> list[Any]:
        if isinstance(value, dict):
            return [leaf for inner in value.values() for leaf in leaves(inner)]
        return value if isinstance(value, list) else [value]

    assert leaves(taken(**run_file)) == []


def test_numbers_names_and_nothing_are_kept():
    kept: dict[str, Any] = {
        "run": "small",
        "envs": {
            "a": {
                "kind": "copy-digits",
                "params": {"digits": 3},
                "rewards": {"m": {"kind": "math-verify", "params": {}}},
                "reward_weights": {"correct": 0.5},
                "pass_rate": None,
                "sessions": {"rewards": ["call", "answer"], "reward_ranges": {"call": [0, 1]}},
                "chat_template_kwargs": {"enable_thinking": False},
            }
        },
        "model": {"tiny": {"alphabet": "0123456789+*[]=? /:"}},
        "learner": {"loss": "grpo", "lora": {"rank": 8, "targets": ["q_proj"]}},
        "fork": {"run": "other", "version": 3, "sha256": "ab", "scorers": ["style@2"]},
        "eval": {"envs": {"e": {"env": "a", "seed": 7, "params": {"digits": 4}}}},
    }
    assert taken(**kept) == kept


def test_code_that_ones_own_run_names_stays():
    run_file = {"learner": {"loss": "mine:loss", "correction": {"weights": {"by": "token"}}}}
    assert taken(frozenset({"mine:loss"}), **run_file) == run_file
    assert taken(frozenset(), **run_file) == {"learner": {}}


def test_a_whole_run_file_is_still_one():
    whole = parse({"run": "r", "envs": {"copy-digits": {}}}).model_dump(mode="json")
    assert parse(harmless_settings(whole, frozenset())).envs["copy-digits"].max_tokens == 16
