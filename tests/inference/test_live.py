"""With real vLLM: logprobs are those of the version that each span names; what is not as announced
is not served; nothing is left behind.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import psutil
import pytest

from streamrl.config.sections.envs import Env
from streamrl.inference.clients.client import SampledCompletion, SamplingFailed
from streamrl.inference.clients.server_connection import ServerConnection
from streamrl.learner.files.export import WEIGHTS
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.reading import read
from streamrl.stream.records import PolicyVersion, Server
from streamrl.system.errors import InferenceError
from tests.support.live import KEY, LiveServers, vllm_processes
from tests.support.waiting import patience

T = TypeVar("T")
WITH_KEY = {"Authorization": f"Bearer {KEY}"}
TOLERANCE = 1e-4  # of a logprob, in float32
TEMPERATURES = (1.0, 0.7)
# longer than a block: the second request with it finds it in the prefix cache
SHARED = "1234567890+0987654321=13579+24680=55555="


def question(i: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": SHARED + str(i % 4)}]


def distances(servers: LiveServers, samples: list[SampledCompletion]) -> np.ndarray:
    """|server's logprob - learner's|, token by token, each under the weights of its own span with
    the whole prefix.
    """
    versions = sorted({span.version for sample in samples for span in sample.version_spans})
    texts = [np.concatenate([sample.prompt_tokens, sample.tokens]) for sample in samples]
    expected = {
        version: servers.logprobs(version, texts, samples[0].temperature) for version in versions
    }
    return np.concatenate(
        [
            np.abs(
                expected[span.version][i][len(sample.prompt_tokens) - 1 :][span.start : span.end]
                - sample.logprobs[span.start : span.end]
            )
            for i, sample in enumerate(samples)
            for span in sample.version_spans
        ]
    )


def cache_hits(servers: LiveServers) -> float:
    lines = httpx.get(
        servers.records()["inference-0"].url + "/metrics", headers=WITH_KEY
    ).text.splitlines()
    return sum(
        float(line.split()[-1])
        for line in lines
        if line.startswith("vllm:prefix_cache_hits_total{")
    )


def talk_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers take their last token: this model's own are over before an update comes."""
    post = ServerConnection.post

    def without_end(
        self: ServerConnection, path: str, body: Any, answer_type: Any, tokens: int = 0
    ) -> Any:
        body.get("sampling_params", {})["ignore_eos"] = True
        return post(self, path, body, answer_type, tokens)

    monkeypatch.setattr(ServerConnection, "post", without_end)


async def test_logprobs_are_those_of_the_version_that_each_span_names(
    servers: LiveServers, monkeypatch: pytest.MonkeyPatch
):
    """Before, during and after two updates, with repeated prompts and two temperatures at once; no
    request is lost.
    """
    talk_on(monkeypatch)
    envs = [Env(temperature=temperature, max_tokens=150) for temperature in TEMPERATURES]
    hits = cache_hits(servers)

    versions = list[PolicyVersion]()
    during = list[list[SampledCompletion]]()

    def crossing(temperature: float) -> list[SampledCompletion]:
        return [
            choice
            for choices in during
            for choice in choices
            if len(choice.version_spans) > 1 and choice.temperature == temperature
        ]

    def too_few_cross() -> bool:
        return min(len(crossing(temperature)) for temperature in TEMPERATURES) < 2

    async def update() -> None:
        """Twice; and again while too few answers happened to be under way."""
        while len(versions) < 2 or (too_few_cross() and len(versions) < 8):
            versions.append(await asyncio.to_thread(servers.prepare))
            await asyncio.sleep(0.5)
            await asyncio.to_thread(servers.serving, "inference-0", servers.tell(versions[-1]))

    async def ask(i: int) -> None:
        while not updating.done():
            during.append(await client.sample(question(i), 4, envs[i % 2]))

    async def ask_four() -> list[list[SampledCompletion]]:
        return await asyncio.gather(*[client.sample(question(i), 4, envs[i % 2]) for i in range(4)])

    async with servers.client("inference-0") as client:
        before = await ask_four()
        updating = asyncio.create_task(update())
        await asyncio.gather(*[ask(i) for i in range(6)])
        await updating
        after = await ask_four()
    samples = [choice for choices in (*before, *during, *after) for choice in choices]
    assert len(samples) == 4 * (8 + len(during)) and cache_hits(servers) > hits
    assert not too_few_cross()
    assert {sample.version_spans[-1].version for choices in after for sample in choices} == {
        versions[-1].version
    }
    for temperature in TEMPERATURES:
        found = distances(servers, [s for s in samples if s.temperature == temperature])
        print(
            f"T={temperature}: {len(found)} tokens, {len(crossing(temperature))} choices cross an"
            f" update, max |difference| {found.max():.2e}"
        )
        assert len(found) >= 500
        assert found.max() <= TOLERANCE, (
            f"{(found > TOLERANCE).sum()} of {len(found)} tokens differ, up to {found.max():.2e}"
        )


async def test_a_copy_that_was_altered_or_cut_is_refused_and_the_server_goes_on(
    servers: LiveServers,
):
    def alter(stored: Path) -> None:
        data = bytearray((stored / WEIGHTS).read_bytes())
        data[-1] ^= 1
        (stored / WEIGHTS).write_bytes(data)

    def cut(stored: Path) -> None:
        os.truncate(stored / WEIGHTS, 1000)

    good = servers.version
    async with servers.client("inference-0") as client:
        for spoil, cause in ((alter, " bytes with sha256 "), (cut, " has 1000 bytes")):
            bad = await asyncio.to_thread(servers.announce, spoil)
            kept = await asyncio.to_thread(
                servers.until, "inference-0", lambda s, bad=bad: f"version {bad} " in s.error
            )
            assert (
                kept.state == "ready"
                and kept.version == good
                and WEIGHTS in kept.error
                and cause in kept.error
            )
            (sample,) = await client.sample(question(0), 1, Env())
            assert [span.version for span in sample.version_spans] == [good]
    version = await asyncio.to_thread(servers.announce)
    assert (await asyncio.to_thread(servers.serving, "inference-0", version)).error == ""


def test_the_probe_notices_a_head_that_was_left_stale(servers: LiveServers):
    """On a CPU, vLLM keeps the head it has when the weights bring none, and says nothing."""
    version = servers.announce(hide=["lm_head.weight"])
    stale = servers.until("inference-0", lambda s: s.version == version)
    assert stale.state == "error" and "logprobs differ from the learner's" in stale.error
    assert stale.mismatch_max_abs > 0.01 and stale.mismatch_tokens == 63
    healed = servers.serving("inference-0", servers.announce())
    assert healed.mismatch_max_abs <= TOLERANCE


SAMPLING = [
    ("POST", "/v1/chat/completions/render"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/metrics"),
]
# stop it, load weights from any path, call a method of its workers, abort others' requests, look
# around
CONTROL = [
    *(
        ("POST", path)
        for path in (
            "/pause?mode=abort",
            "/resume",
            "/collective_rpc",
            "/update_weight_version",
            "/reset_prefix_cache",
            "/sleep",
        )
    ),
    *(
        ("POST", path)
        for path in (
            "/inference/v1/abort_requests",
            "/abort_requests",
            "/v1/load_lora_adapter",
            "/update_weights",
        )
    ),
    *(
        ("GET", path)
        for path in ("/weight_info", "/server_info", "/openapi.json", "/docs", "/nowhere")
    ),
]


async def test_a_server_samples_for_those_who_send_its_key_and_obeys_its_agent_only(
    servers: LiveServers,
):
    record = servers.records()["inference-0"]
    assert record is not None
    body = {
        "method": "reload_weights",
        "kwargs": {"weights_path": "/nowhere"},
        "new_version": "666",
        "messages": question(0),
        "max_tokens": 1,
    }

    def answers(routes: list[tuple[str, str]], headers: dict[str, str]) -> set[int]:
        return {
            httpx.request(
                method, record.url + path, json=body, headers=headers, timeout=patience(30)
            ).status_code
            for method, path in routes
        }

    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {KEY}"}):
        assert answers(SAMPLING, headers) == {401} and answers(CONTROL, headers) == {401}
        assert answers([("GET", "/health")], headers) == {200}
    assert answers(SAMPLING, WITH_KEY) == {200} and answers(CONTROL, WITH_KEY) == {401}
    async with servers.client("inference-0") as client:
        (sample,) = await client.sample(question(0), 1, Env())
    assert [span.version for span in sample.version_spans] == [record.version]


def test_its_keys_are_in_no_command_line_and_no_log_and_it_listens_on_loopback_only(
    servers: LiveServers,
):
    family = vllm_processes(servers.records()["inference-0"].url)
    keys = {KEY, *(process.environ().get("STREAMRL_AGENT_KEY", KEY) for process in family)}
    lines = [
        " ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])
    ]
    assert (
        len(family) >= 2
        and len(keys) == 2
        and not any(key in line for key in keys for line in lines)
    )
    logs = [path.read_text(errors="replace") for path in (servers.run.directory / "logs").iterdir()]
    assert logs and not any(key in text for key in keys for text in logs)
    listening = {
        connection.laddr
        for process in family
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening and {address.ip for address in listening} <= {"127.0.0.1", "::1"}, listening


def test_its_engine_is_a_fork_and_computes(servers: LiveServers):
    """Otherwise each start imports vLLM three times."""
    server, *below = vllm_processes(servers.records()["inference-0"].url)
    assert [process.name() for process in below] == ["VLLM::EngineCore"]
    assert below[0].cmdline() != server.cmdline(), "vLLM names it"


async def test_the_end_of_the_context(servers: LiveServers):
    async with servers.client("inference-0") as client:
        with pytest.raises(
            SamplingFailed, match="refuses the request: This model's maximum context length is 256"
        ):
            await client.sample([{"role": "user", "content": "1" * 256}], 2, Env())
        choices = await client.sample(
            [{"role": "user", "content": "1" * 245}], 8, Env(max_tokens=50)
        )
    assert all(len(c.prompt_tokens) + len(c.tokens) <= 256 and c.max_tokens == 50 for c in choices)
    assert any(c.finish_reason == "length" for c in choices)


def test_a_late_server_takes_the_latest_only(servers: LiveServers):
    """Version 0 had been followed by version 1 when it came."""
    states = [
        event.record
        for event in (to_event(m, ("server",)) for m in read(servers.log, "servers", 0, 0))
        if isinstance(event.record, Server)
    ]
    served = [record.version for record in states if record.state == "ready"]
    assert served[0] == 1 and 0 not in served
    # vLLM was started from version 1
    pulled = (servers.run.directory / "inference" / "inference-0" / "own").iterdir()
    assert {path.name for path in pulled} == {"1", str(servers.version)}


def test_its_death_ends_its_agent(servers: LiveServers):
    """The last test of this file: nobody serves after it."""
    url = servers.records()["inference-0"].url
    engine = next(p for p in vllm_processes(url) if p.name().startswith("VLLM::Engine"))
    engine.kill()
    gone = servers.until("inference-0", lambda s: s.state == "error")
    assert "died while serving" in gone.error
    # The agent says that it is over, and ends after that.
    ended = until(lambda: servers.errors.get("inference-0"), lambda error: error is not None)
    assert isinstance(ended, InferenceError)
    assert until(lambda: vllm_processes(url), lambda left: not left) == []


def until(look: Callable[[], T], enough: Callable[[T], bool], timeout_s: float = 20.0) -> T:
    deadline = time.monotonic() + patience(timeout_s)
    while not enough(seen := look()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return seen
