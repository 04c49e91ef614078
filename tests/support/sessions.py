"""Model calls and sessions for tests. The policy's answers are made of the tokens before them, so
that two runs of the same session agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from streamrl.stream.records import (
    InferenceMetadata,
    ModelCall,
    Reward,
    SessionEnd,
    SessionStart,
    VersionSpan,
)

ENV = "agents"


def start(session: str, problem: str = "p", **fields: Any) -> SessionStart:
    return SessionStart(session=session, environment=ENV, problem_id=problem, **fields)


def end(session: str, **fields: Any) -> SessionEnd:
    return SessionEnd(session=session, **fields)


def reward(session: str, value: float = 1.0, name: str = "reward", **fields: Any) -> Reward:
    return Reward(rollout=session, name=name, value=value, **fields)


def call(
    name: str,
    prompt: Sequence[int],
    tokens: Sequence[int],
    continues: str = "",
    session: str = "s",
    said: str = "",
    asked: str = "",
    version: int = 0,
    temperature: float = 1.0,
    **fields: Any,
) -> ModelCall:
    """A call that asked `asked` and got `said`; without, the names of the call stand for them."""
    how = InferenceMetadata(
        server="inference-0",
        temperature=temperature,
        finish_reason="stop",
        version_spans=[VersionSpan(version=version, start=0, end=len(tokens))],
    )
    settings = {"messages": [{"role": "user", "content": asked or f"asked in {name}"}], **fields}
    return ModelCall(
        session=session,
        call=name,
        continues=continues,
        prompt=np.array(prompt, np.uint16),
        tokens=np.array(tokens, np.uint16),
        logprobs=np.full(len(tokens), -0.5, np.float32),
        text=said or f"said in {name}",
        inference_metadata=how,
        **settings,
    )
