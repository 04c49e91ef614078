"""The facts of a small run, for the tests of advice."""

from __future__ import annotations

from typing import Any

import msgspec

from streamrl.config.run_file import RunFile, parse
from streamrl.extensions.advisor.facts import (
    Call,
    Engine,
    Facts,
    Load,
    SampledGroup,
    SampledRollout,
    Step,
)

TOKENS = 40
PROMPT = 10
GROUPS = 4  # in a batch
SIZE = 8
# An env that shows what to imitate, of half of the batches.
DEMONSTRATIONS: dict[str, Any] = {
    "kind": "demonstrations",
    "params": {"file": "shown.jsonl"},
    "fraction": 0.5,
    "loss": {"policy_gradient": 0, "cross_entropy": 1},
    "buffer": {"group_size": 1, "min_group_size": 1},
}


def run_of(**sections: dict[str, Any]) -> RunFile:
    """A run whose batches are four groups of eight rollouts, with some settings changed."""
    settings: dict[str, dict[str, Any]] = {
        "buffer": {"group_size": SIZE, "max_age": 4},
        "batcher": {
            "total_token_budget": GROUPS * SIZE * (TOKENS + PROMPT),
            "max_seq_len": 256,
            "lookahead": 2,
        },
        "inference": {"replicas": 1, "max_num_seqs": 16},
        "envs": {"copy-digits": {"fraction": 1.0}},
    }
    for name, changed in sections.items():
        settings[name] = {**settings.get(name, {}), **changed}
    return parse({"run": "r", "model": {"max_seq_len": 256}, **settings})


def group_of(*tokens: int, reward: float = 0.5, end_s: float = 0.0) -> SampledGroup:
    """A group whose rollouts have one answer each, of these lengths."""
    return SampledGroup(
        [SampledRollout([Call(0.0, count)], count + PROMPT, reward) for count in tokens], end_s
    )


FACTS = Facts(
    steps=[Step(train_s=0.1, publish_s=0.0, announce_s=0.0)],
    loads=[Load(0.0, 0.0)],
    engines={"generation": Engine(0.0, 0.01, 0.0)},
    servers={"generation": 1},
    groups={"copy-digits": [group_of(*[TOKENS] * SIZE)]},
    hops_s=[],
    fractions={},
)


def facts(**changed: Any) -> Facts:
    """The facts with some of them changed. Without: everything but sampling is quick."""
    return msgspec.structs.replace(FACTS, **changed)
