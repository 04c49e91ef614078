"""Control of a running vLLM over HTTP: swap weights in flight, load adapters, probe, and query
version and load.

A swap drops no request and mixes no versions. vLLM pauses (`PAUSE` returns when no step is
running), loads the weights, and is told the number of the new version. It discards all KV cache of
the old weights, also that of running requests: `reset_running_requests` puts them back into the
queue with the tokens that they have. While they wait, the probe is answered, so that it is known
before the first token of the version whether its weights are right. Then vLLM resumes, and computes
the prefixes of these requests again under the new weights. So the logprob of a token is that of the
policy that its version span names, given the whole prefix. No cache block of the old weights is
left.

This costs a prefill of all that runs, at each version. vLLM can keep these keys and values instead
(`clear_cache=False`), and then the next tokens of a request come from a mixture of two versions:
their logprobs are those that were sampled from, but neither learner nor replay can compute them
again, and `mismatch_mean_abs` could no longer tell a wrong weight from an old key. vLLM also gives
up its prefix cache only as a whole, so new requests would read keys of the old weights as long as
one old request runs.
"""

from __future__ import annotations

import re
import secrets
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

from streamrl.inference.clients.vllm_api import logprob_request
from streamrl.inference.servers.inside_vllm.streamrl_probing import probe_name
from streamrl.inference.servers.vllm_launch import MODEL
from streamrl.system.errors import InferenceError
from streamrl.system.text import one_line

SWAP_TIMEOUT_S = 600.0
METRICS_TIMEOUT_S = 5.0
# The same paths are in inside_vllm/streamrl_guard.py. It runs in vLLM's environment, so this
# module does not import it.
PAUSE = "/streamrl/pause"
ADMIT_PROBES = "/streamrl/admit-probes"
USAGE = "/streamrl/usage"
LOAD_ADAPTER = "/v1/load_lora_adapter"
UNLOAD_ADAPTER = "/v1/unload_lora_adapter"
ADAPTERS_LINE = re.compile(r"vllm:lora_requests_info\{(?P<labels>.*)\} (?P<time_s>\S+)")
NAMES_LABEL = re.compile(r'(?:running|waiting)_lora_adapters="([^"]*)"')


class Swap(NamedTuple):
    """The durations of a swap, and what was probed before vLLM was resumed."""

    pause_s: float  # until vLLM was paused
    reload_s: float  # for loading the weights
    total_s: float  # from the request to pause until vLLM was resumed
    probed: np.ndarray | None = None  # as `Engine.probe` returns it; None if there was none


class Load(NamedTuple):
    """The load of a server. Totals are since its start."""

    in_flight: int  # sequences that are running or waiting
    generated_tokens: int  # total
    spent: dict[str, float]  # total seconds by activity (`Clock` of streamrl_guard.py)
    # Totals by the name of the run whose key requests carried; empty if the server needs no key.
    requests: dict[str, int]  # to sample
    answers: dict[str, int]  # that these asked for


class Engine:
    """A client for the vLLM at `url`. `key`: the key of its agent. All methods but `healthy` raise
    InferenceError if vLLM does not answer or answers with an error.
    """

    def __init__(self, url: str, key: str = "") -> None:
        self.url = url
        self._probe_name = probe_name(key)
        self._http = httpx.Client(
            base_url=url,
            timeout=SWAP_TIMEOUT_S,
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )

    def swap(self, directory: Path, version: int, probe: np.ndarray | None = None) -> Swap:
        """Serve the weights in `directory` as `version`, without dropping a request. After an error
        the server is unusable, because it may have loaded a part of the weights.

        `probe`: tokens whose logprobs are computed before vLLM resumes, (n,) integer ids.
        """
        start = time.monotonic()
        self._post(PAUSE)
        paused = time.monotonic()
        self._post(
            "/collective_rpc",
            {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}},
        )
        reloaded = time.monotonic()
        self.set_version(version)
        if not self._post("/reset_prefix_cache?reset_running_requests=true").get("success"):
            raise InferenceError(
                f"{self.url}: vLLM did not give up the KV cache of the old weights; restart the"
                " server"
            )
        probed = None
        if probe is not None and self._post(ADMIT_PROBES).get("admitted"):
            probed = self.probe(probe)
        self._post("/resume")
        return Swap(
            pause_s=paused - start,
            reload_s=reloaded - paused,
            total_s=time.monotonic() - start,
            probed=probed,
        )

    def set_version(self, version: int) -> None:
        """Set the version of the loaded weights. Version spans name it from the next token on."""
        self._post("/update_weight_version", {"new_version": str(version)})

    def version(self) -> int:
        """The version of the loaded weights, or -1 before the first `set_version`."""
        name = self._get("/weight_info").json().get("weight_version")
        return int(name) if str(name).isdecimal() else -1

    def load_adapter(self, name: str, directory: Path) -> None:
        """Load the adapter in `directory` next to the base and the other adapters. Requests with
        this model name get it.
        """
        body = {"lora_name": name, "lora_path": str(directory)}
        self._answer("POST", LOAD_ADAPTER, body, SWAP_TIMEOUT_S)

    def unload_adapter(self, name: str) -> None:
        """Take no more requests for an adapter."""
        self._answer("POST", UNLOAD_ADAPTER, {"lora_name": name}, SWAP_TIMEOUT_S)

    def adapters_in_use(self) -> set[str]:
        """The names of the adapters that requests run with or wait for."""
        newest_s = -1.0
        names = ""
        for line in self.metrics().decode().splitlines():
            # One line for each set of names that there ever was; its value is when it was last so.
            match = ADAPTERS_LINE.match(line)
            if match and float(match["time_s"]) > newest_s:
                newest_s = float(match["time_s"])
                names = ",".join(NAMES_LABEL.findall(match["labels"]))
        return {name for name in names.split(",") if name}

    def probe(self, tokens: np.ndarray, model: str = MODEL) -> np.ndarray:
        """The logprobs of the given tokens at temperature 1, computed without the prefix cache and
        before the requests that wait. `model`: the base, or the name of an adapter.

        `tokens`: (n,) integer ids, n >= 2. Returns (n - 1,) float32: the logprob of each of
        tokens[1:], given the tokens before it.
        """
        ids = [int(token) for token in tokens]
        request = {
            **logprob_request(model, ids),
            "request_id": f"{self._probe_name}-{secrets.token_hex(4)}",
        }
        answer = self._post("/inference/v1/generate", request)
        entries = zip(ids[1:], answer["prompt_logprobs"][1:], strict=True)
        return np.array([entry[str(token)]["logprob"] for token, entry in entries], np.float32)

    def read_load(self) -> Load:
        """The load, from the Prometheus metrics and the guard."""
        running = "vllm:num_requests_running"
        waiting = "vllm:num_requests_waiting"
        generated = "vllm:generation_tokens_total"
        sums = dict.fromkeys((running, waiting, generated), 0.0)
        for line in self.metrics().decode().splitlines():
            name, brace, _ = line.partition("{")
            if brace and name in sums:
                sums[name] += float(line.rpartition(" ")[2])
        return Load(
            in_flight=int(sums[running]) + int(sums[waiting]),
            generated_tokens=int(sums[generated]),
            **self._get(USAGE, METRICS_TIMEOUT_S).json(),
        )

    def metrics(self) -> bytes:
        """The Prometheus page of vLLM."""
        return self._get("/metrics", METRICS_TIMEOUT_S).content

    def warm_up(self) -> None:
        """Render, sample and probe once, because the first request of each kind takes seconds and
        no env should wait for it.
        """
        message = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "1"}],
            "max_tokens": 2,
            "logprobs": True,
            "top_logprobs": 0,
        }
        tokens = self._post("/v1/chat/completions/render", message)["token_ids"]
        sampling = {
            "max_tokens": 2,
            "temperature": 0.7,
            "top_p": 1.0,
            "top_k": -1,
            "logprobs": 0,
            "n": 2,
        }
        self._post(
            "/inference/v1/generate",
            {
                "model": MODEL,
                "token_ids": tokens,
                "sampling_params": sampling,
                "output_mode": "text",
            },
        )
        self.probe(np.array([*tokens, *tokens], np.uint32)[:2])

    def close(self) -> None:
        self._http.close()

    def _post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._answer("POST", path, body, SWAP_TIMEOUT_S).json()

    def _get(self, path: str, timeout_s: float = SWAP_TIMEOUT_S) -> httpx.Response:
        return self._answer("GET", path, None, timeout_s)

    def _answer(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float
    ) -> httpx.Response:
        try:
            response = self._http.request(method, path, json=body, timeout=timeout_s)
        except httpx.HTTPError as error:
            raise InferenceError(
                f"vLLM at {self.url} does not answer {path} ({type(error).__name__}: {error})"
            ) from None
        if response.status_code != 200:
            raise InferenceError(
                f"vLLM at {self.url} refuses {path}: {response.status_code}"
                f" {one_line(response.text, 400)}"
            )
        return response
