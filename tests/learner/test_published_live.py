"""With real vLLM: adapters of published models, with two layers and random weights, are served as
the learner computes them. vLLM itself is held to every family in `test_published.py`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from streamrl.config.sections.envs import Env
from streamrl.inference.clients.client import SampledCompletion
from tests.inference.servers.test_adapters_live import LiveAdapters
from tests.inference.test_live import TOLERANCE, distances, question, talk_on
from tests.learner.test_adapters import ATTENTION
from tests.learner.test_published import write_origins
from tests.support.live import KEY, KEY_VARIABLE, START_S

pytestmark = pytest.mark.slow

ENV = Env(max_tokens=40)
ANSWERS = 8


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-30b-a3b"])
async def test_adapters_of_attention_are_served(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """In a mixture of experts too, and each version by its own adapter."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    talk_on(monkeypatch)
    origin = write_origins(tmp_path / "published", [name]) / name
    servers = LiveAdapters(tmp_path, settings=ATTENTION, origin=origin)
    samples = list[list[SampledCompletion]]()
    try:
        server = servers.start(0)
        for _ in range(2):
            version = await asyncio.to_thread(servers.announce)
            ready = await asyncio.to_thread(servers.serving, server, version, START_S)
            assert ready.mismatch_tokens == 63 and ready.mismatch_max_abs <= TOLERANCE
            async with servers.client(server) as client:
                samples.append(await client.sample(question(0), ANSWERS, ENV))
    finally:
        servers.close()
    for version, answers in enumerate(samples):
        assert {span.version for answer in answers for span in answer.version_spans} == {version}
        found = distances(servers, answers)
        print(f"{name}, version {version}: {len(found)} tokens, max |difference| {found.max():.1e}")
        assert len(found) == ANSWERS * ENV.max_tokens and found.max() <= TOLERANCE
    texts = [np.concatenate([answer.prompt_tokens, answer.tokens]) for answer in samples[1]]
    first, second = (np.concatenate(servers.logprobs(version, texts, 1.0)) for version in (0, 1))
    assert np.abs(first - second).mean() > 100 * TOLERANCE, "the two adapters differ"
