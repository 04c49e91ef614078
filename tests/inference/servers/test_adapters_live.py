"""With real vLLM: adapters are served beside their base without a pause, each answer by one."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from streamrl.config.run_file import with_overrides
from streamrl.config.sections.envs import Env
from streamrl.config.sections.learner import Lora
from streamrl.inference.clients.client import SampledCompletion
from streamrl.learner import adapters
from streamrl.learner.adapter_base import base_manifest, publish_base, random_adapter
from streamrl.learner.adapters import AdapterFormat
from streamrl.learner.files import export
from streamrl.learner.model import model
from streamrl.learner.parallel.mesh import use_mesh
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.reading import read
from streamrl.stream.records import Metric, PolicyVersion, Probe
from streamrl.weights.store import Store, version_name
from tests.inference.test_live import TOLERANCE, distances, question, talk_on
from tests.support.live import CONTEXT, KEY, KEY_VARIABLE, START_S, LiveServers, perturb
from tests.support.waiting import until

pytestmark = pytest.mark.slow

SETTINGS = Lora(rank=4, alpha=8)
# Variables with the keys of the runs that the server serves as well.
GUEST_KEYS = {"second": "STREAMRL_TEST_SECOND_KEY", "large": "STREAMRL_TEST_LARGE_KEY"}
PROBED = np.random.default_rng(0).integers(0, 16, 64).astype(np.uint16)


class LiveAdapters(LiveServers):
    """Versions that are random adapters of one base, of which every run has a copy. `settings`: of
    its adapters; `seed`: other runs have others; `changes`: of its run file; `origin`: the
    directory of the base, by default a tiny model.
    """

    def __init__(
        self,
        directory: Path,
        name: str = "live",
        settings: Lora = SETTINGS,
        seed: int = 0,
        changes: Sequence[str] = (),
        origin: Path | None = None,
    ) -> None:
        super().__init__(directory / name, origin)
        self.directory = directory  # with a directory for each run
        self.settings = settings
        self.seed = seed
        lora = f"learner.lora={settings.model_dump_json()}"
        shared = [f"run={name}", f"runs_dir={directory}"]
        self.run = with_overrides(self.run, [lora, *shared, *changes])
        self.store = Store(self.run.store)
        if origin is None:
            lively = perturb(load_file(self._origin / export.WEIGHTS), 0)
            save_file(lively, self._origin / export.WEIGHTS, metadata={"format": "pt"})
        self.form = AdapterFormat(settings, base_manifest(self._origin))
        with use_mesh():
            base = model.load(self._origin, CONTEXT)
            check = random_adapter(base, settings, 0, probe_of, self.run.inference.probe_tolerance)
        self.base = publish_base(self._origin, self.form, check, self.run.store)

    def prepare(self, *_: Any) -> PolicyVersion:
        self.version += 1
        with use_mesh():
            base = model.load(self._origin, CONTEXT)
            seed = self.seed + self.version
            adapted = adapters.randomized(
                adapters.attach(base, self.settings, seed), seed, scale=0.1
            )
            tensors = adapters.state_dict(adapted)
            scale = self.settings.alpha / self.settings.rank
            merged = adapters.merged(export.state_dict(base), tensors, scale)
        export.save(merged, self._origin, self._versions / version_name(self.version))
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
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveAdapters]:
    """One agent on the first version. It may serve two more runs."""
    os.environ[KEY_VARIABLE] = KEY
    for guest, variable in GUEST_KEYS.items():
        os.environ[variable] = f"a-key-of-run-{guest}"
    keys = {guest: {"api_key": f"env:{variable}"} for guest, variable in GUEST_KEYS.items()}
    guests = [f"inference.also_serves={json.dumps(keys)}"]
    made = LiveAdapters(tmp_path_factory.mktemp("live"), changes=guests)
    made.logs = {"second": MemoryLog({}), "large": MemoryLog({})}
    try:
        first = made.announce()
        made.serving(made.start(0), first, START_S)
        yield made
    finally:
        made.close()
        for variable in (KEY_VARIABLE, *GUEST_KEYS.values()):
            del os.environ[variable]


async def test_each_answer_is_one_versions_and_nothing_pauses(
    servers: LiveAdapters, monkeypatch: pytest.MonkeyPatch
):
    """Answers that are under way while two versions come end with the version they began with."""
    talk_on(monkeypatch)
    env = Env(max_tokens=150)
    begun = servers.version
    during = list[list[SampledCompletion]]()

    async def update() -> None:
        for _ in range(2):
            version = await asyncio.to_thread(servers.announce)
            await asyncio.to_thread(servers.serving, "inference-0", version)

    async def ask(number: int) -> None:
        while not updating.done():
            during.append(await client.sample(question(number), 4, env))

    async with servers.client("inference-0") as client:
        updating = asyncio.create_task(update())
        await asyncio.gather(*[ask(number) for number in range(4)])
        await updating
        after = await client.sample(question(0), 4, env)
    samples = [*after, *(sample for samples in during for sample in samples)]
    assert all(len(sample.version_spans) == 1 for sample in samples)
    assert {sample.version_spans[0].version for sample in after} == {begun + 2}
    assert begun in {sample.version_spans[0].version for sample in samples}
    assert distances(servers, samples).max() <= TOLERANCE
    events = (to_event(message, ("metric",)) for message in read(servers.log, "metrics", 0, 0))
    loads = [event.record.values for event in events if isinstance(event.record, Metric)]
    assert [values["inference/pause_s"] for values in loads if "inference/pause_s" in values] == [
        0.0,
        0.0,
    ]


async def test_two_runs_are_sampled_by_their_own_adapters_on_one_server(
    servers: LiveAdapters, monkeypatch: pytest.MonkeyPatch
):
    """Both ask at the same time, and have versions of the same number."""
    talk_on(monkeypatch)
    env = Env(max_tokens=40)
    second = LiveAdapters(
        servers.directory,
        "second",
        Lora(rank=8, alpha=8),
        seed=100,
        changes=[f"inference.api_key=env:{GUEST_KEYS['second']}"],
    )
    for version in range(servers.version):
        assert second.announce() == version
    shared = second.announce()
    servers.logs["second"] = second.log
    record = second.serving("live.inference-0", shared)
    assert record.url == servers.records()["inference-0"].url and record.mismatch_tokens == 63

    async with servers.client("inference-0") as own, second.client("live.inference-0") as other:
        asked = [client.sample(question(0), 8, env) for client in (own, other) for _ in range(3)]
        answers = await asyncio.gather(*asked)
    by_own = [sample for samples in answers[:3] for sample in samples]
    by_other = [sample for samples in answers[3:] for sample in samples]
    versions = {span.version for sample in [*by_own, *by_other] for span in sample.version_spans}
    assert versions == {shared} == {servers.version}
    assert distances(servers, by_own).max() <= TOLERANCE
    assert distances(second, by_other).max() <= TOLERANCE
    assert distances(servers, by_other).max() > 100 * TOLERANCE, "the two policies differ"
    until(lambda: answers_of(servers, "second") == 24, 30)
    assert answers_of(servers, "large") == 0


def answers_of(servers: LiveAdapters, run: str) -> float:
    """The answers that requests with the run's key asked for, by the server's last metrics."""
    name = f"inference/answers/{run}"
    events = (to_event(message, ("metric",)) for message in read(servers.log, "metrics", 0, 0))
    values = [event.record.values for event in events if isinstance(event.record, Metric)]
    return [found[name] for found in values if name in found][-1]


def test_a_run_whose_adapters_vllm_does_not_take_hears_why(servers: LiveAdapters):
    large = LiveAdapters(servers.directory, "large", Lora(rank=16, alpha=8))
    large.announce()
    servers.logs["large"] = large.log
    refused = large.until("live.inference-0", lambda server: bool(server.error))
    assert refused.state == "starting" and "rank 16" in refused.error
    servers.serving("inference-0", servers.announce())
