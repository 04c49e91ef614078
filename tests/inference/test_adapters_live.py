"""With real vLLM: adapters are served beside their base without a pause, each answer by one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from streamrl.config.run_file import changed
from streamrl.config.sections.envs import Env
from streamrl.config.sections.learner import Lora
from streamrl.inference.client import Sampled
from streamrl.learner import adapters, export, model
from streamrl.learner.adapter_base import base_manifest, publish_base, random_adapter
from streamrl.learner.adapters import AdapterFormat
from streamrl.learner.mesh import use_mesh
from streamrl.log.codec import to_event
from streamrl.log.protocol import read
from streamrl.records import Metric, PolicyVersion, Probe
from streamrl.weights.store import version_name
from tests.inference.test_live import TOLERANCE, distances, question, talk_on
from tests.support.live import CONTEXT, KEY, KEY_VARIABLE, START_S, Live, perturbed

pytestmark = pytest.mark.slow

SETTINGS = Lora(rank=4, alpha=8)
PROBED = np.random.default_rng(0).integers(0, 16, 64).astype(np.uint16)


class LiveAdapters(Live):
    """Versions that are random adapters of one base."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.run = changed(self.run, ["learner.lora={rank: 4, alpha: 8}"])
        lively = perturbed(load_file(self._origin / export.WEIGHTS), 0)
        save_file(lively, self._origin / export.WEIGHTS, metadata={"format": "pt"})
        self.form = AdapterFormat(SETTINGS, base_manifest(self._origin))
        with use_mesh():
            base = model.load(self._origin, CONTEXT)
            check = random_adapter(base, SETTINGS, 0, probe_of, self.run.inference.probe_tolerance)
        self.base = publish_base(self._origin, self.form, check, self.run.store)

    def prepare(self, *_: Any) -> PolicyVersion:
        self.version += 1
        with use_mesh():
            base = model.load(self._origin, CONTEXT)
            adapted = adapters.randomized(
                adapters.attach(base, SETTINGS, seed=self.version), self.version, scale=0.1
            )
            tensors = adapters.state_dict(adapted)
            merged = adapters.merged(export.state_dict(base), tensors, 2.0)
        export.save(merged, self._origin, self._origin.parent / version_name(self.version))
        stored = self.store.put(self.version, partial(adapters.save, tensors, self.form))
        probe = Probe(
            tokens=PROBED, logprobs=self.logprobs(self.version, [PROBED], temperature=1.0)[0]
        )
        return PolicyVersion(
            learner="lead",
            version=self.version,
            probe=probe,
            base=self.base,
            **stored._asdict(),
        )


def probe_of(made: Any) -> Probe:
    predicted = model.predict(made, model.single_sequence(PROBED))
    return Probe(tokens=PROBED, logprobs=np.asarray(predicted.logprobs)[0, :-1])


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveAdapters]:
    """One agent on the first version."""
    os.environ[KEY_VARIABLE] = KEY
    made = LiveAdapters(tmp_path_factory.mktemp("live"))
    try:
        first = made.announce()
        made.serving(made.start(0), first, START_S)
        yield made
    finally:
        made.close()
        del os.environ[KEY_VARIABLE]


async def test_each_answer_is_one_versions_and_nothing_pauses(
    live: LiveAdapters, monkeypatch: pytest.MonkeyPatch
):
    """Answers that are under way while two versions come end with the version they began with."""
    talk_on(monkeypatch)
    env = Env(max_tokens=150)
    begun = live.version
    during = list[list[Sampled]]()

    async def update() -> None:
        for _ in range(2):
            version = await asyncio.to_thread(live.announce)
            await asyncio.to_thread(live.serving, "inference-0", version)

    async def ask(number: int) -> None:
        while not updating.done():
            during.append(await client.sample(question(number), 4, env))

    async with live.client("inference-0") as client:
        updating = asyncio.create_task(update())
        await asyncio.gather(*[ask(number) for number in range(4)])
        await updating
        after = await client.sample(question(0), 4, env)
    samples = [*after, *(sample for samples in during for sample in samples)]
    assert all(len(sample.version_spans) == 1 for sample in samples)
    assert {sample.version_spans[0].version for sample in after} == {begun + 2}
    assert begun in {sample.version_spans[0].version for sample in samples}
    assert distances(live, samples).max() <= TOLERANCE
    events = (to_event(message, ("metric",)) for message in read(live.log, "metrics", 0, 0))
    loads = [event.record.values for event in events if isinstance(event.record, Metric)]
    assert [values["inference/pause_s"] for values in loads if "inference/pause_s" in values] == [
        0.0,
        0.0,
    ]
