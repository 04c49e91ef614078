from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config import run_file
from streamrl.system.errors import ConfigError

QUICKSTART = Path(__file__).parents[3] / "deploy" / "runs" / "quickstart.yaml"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("envs.copy-digits.fraction=0.9", "add up to 1.2"),
        ("orchestrator.target.env=nope", "'nope' is not one of the envs: copy-digits, add-digits"),
        ("envs.copy-digits.top_p=0.9", "unknown key 'envs.copy-digits.top_p'"),
        (
            "envs.copy-digits.chat_template_kwargs={tools: []}",
            "chat_template_kwargs: 'tools' is given by streamrl and vLLM; leave it out",
        ),
        (
            "envs.copy-digits.tool_syntax=brackets",
            "unknown key 'envs.copy-digits.tool_syntax'",
        ),
        (
            "envs.copy-digits={sessions: {}, replicas: 1}",
            "unknown key 'envs.copy-digits.replicas'",
        ),
        (
            "envs.copy-digits.pass_rate={between: [0.9, 0.1]}",
            "pass_rate.between: 0.9 is the lowest value and is above 0.1, the highest",
        ),
        (
            "envs.copy-digits={kind: demonstrations, params: {file: shown.jsonl}}",
            r"copy-digits\.loss: demonstrations are imitated, .*; set policy_gradient: 0 and",
        ),
        (
            "envs.copy-digits={kind: 'streamrl.envs.shipped.demonstrations:Demonstrations'}",
            r"copy-digits\.loss: demonstrations are imitated",
        ),
        (
            "envs.copy-digits={kind: demonstrations, loss: {policy_gradient: 0, cross_entropy: 1}}",
            r"copy-digits\.buffer: nothing in demonstrations is compared; set {group_size: 1,",
        ),
        (
            "envs.copy-digits={kind: 'openenv:http://127.0.0.1:8000'}",
            "python: openenv:http://127.0.0.1:8000 runs in an environment with its own packages",
        ),
        (
            "envs.copy-digits={kind: 'openenv:127.0.0.1:8000', python: python3}",
            "kind: openenv: is followed by the server's address, http://HOST:PORT",
        ),
        (
            "envs.copy-digits={kind: 'nemo-gym:http://127.0.0.1:8000', python: python3}",
            "params.dataset: the tasks of the agent server are needed",
        ),
    ],
)
def test_what_cannot_work_is_named(override: str, says: str):
    with pytest.raises(ConfigError, match=says):
        run_file.load(QUICKSTART, [override])
