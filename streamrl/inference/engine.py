"""Control of a running vLLM over HTTP: swap weights in flight, probe, and query version and load.

A swap drops no request and mixes no versions. vLLM pauses (`PAUSE` returns when no step is
running), loads the weights, takes the new version's name, discards all KV cache of the old weights,
including that of running requests (`reset_running_requests` puts them back into the queue with
their tokens), and resumes. Their prefix is then recomputed under the new weights. So a token's
logprob is that of the policy that its span names, given the whole prefix. No stale cache block is
left for a client that has not heard of the new version.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

from streamrl.errors import InferenceError, one_line
from streamrl.inference.vllm_server import MODEL

SWAP_TIMEOUT_S = 600.0
# of inside_vllm/streamrl_guard.py, which cannot be imported: it is vLLM's
PAUSE = "/streamrl/pause"
CLOCK = "/streamrl/clock"


class Swap(NamedTuple):
    """The durations of a swap, in seconds: until vLLM was paused, for loading the weights, and from
    pause to resume.
    """

    pause_s: float
    reload_s: float
    total_s: float


class Load(NamedTuple):
    in_flight: int  # sequences, running and waiting
    generated_tokens: int  # since it started
    # seconds since it started by what they went to (`Clock` of streamrl_guard.py)
    spent: dict[str, float]


class Mismatch(NamedTuple):
    """The distance between two sets of logprobs."""

    max_abs: float
    tokens: int


class Engine:
    """One vLLM by its URL, with the key of its agent. Every method raises InferenceError if vLLM
    does not answer as it should.
    """

    def __init__(self, url: str, key: str = "") -> None:
        self.url = url
        self._http = httpx.Client(
            base_url=url,
            timeout=SWAP_TIMEOUT_S,
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )

    def swap(self, directory: Path, version: int) -> Swap:
        """Serve the weights in `directory` as `version`, without dropping a request. After an error
        the server is unusable, because it may hold half of them.
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
        self._post("/resume")
        return Swap(paused - start, reloaded - paused, time.monotonic() - start)

    def set_version(self, version: int) -> None:
        """Set the version of the loaded weights. Version spans carry it from the next token on."""
        self._post("/update_weight_version", {"new_version": str(version)})

    def version(self) -> int:
        """The version of the loaded weights, or -1 before the first `set_version`."""
        name = self._get("/weight_info").json().get("weight_version")
        return int(name) if str(name).isdecimal() else -1

    def probe(self, tokens: np.ndarray) -> np.ndarray:
        """Logprobs of the given tokens at temperature 1, computed without the prefix cache.
        `tokens`: (n,) ids, n >= 2.

        Returns (n - 1,) float32: the logprob of each of tokens[1:], given the tokens before it.
        """
        ids = [int(token) for token in tokens]
        sampling = {
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
            "skip_reading_prefix_cache": True,
        }
        answer = self._post(
            "/inference/v1/generate",
            {"model": MODEL, "token_ids": ids, "sampling_params": sampling},
        )
        entries = answer["prompt_logprobs"][1:]
        return np.array(
            [entry[str(token)]["logprob"] for token, entry in zip(ids[1:], entries, strict=True)],
            np.float32,
        )

    def load(self) -> Load:
        """The load, from the Prometheus metrics and the guard's clock."""
        sums = dict.fromkeys(
            (
                "vllm:num_requests_running",
                "vllm:num_requests_waiting",
                "vllm:generation_tokens_total",
            ),
            0.0,
        )
        for line in self.metrics().decode().splitlines():
            name, brace, _ = line.partition("{")
            if brace and name in sums:
                sums[name] += float(line.rpartition(" ")[2])
        running, waiting, generated = map(int, sums.values())
        return Load(running + waiting, generated, self._get(CLOCK, timeout_s=5.0).json())

    def metrics(self) -> bytes:
        """vLLM's Prometheus page."""
        return self._get("/metrics", timeout_s=5.0).content

    def healthy(self) -> bool:
        try:
            return self._http.get("/health", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def warm_up(self) -> None:
        """Render, sample and probe once. The first request of each kind takes seconds, and no env
        should wait for it.
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
        return self._answer("POST", path, body, None).json()

    def _get(self, path: str, timeout_s: float | None = None) -> httpx.Response:
        return self._answer("GET", path, None, timeout_s)

    def _answer(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float | None
    ) -> httpx.Response:
        try:
            response = self._http.request(
                method, path, json=body, timeout=timeout_s or SWAP_TIMEOUT_S
            )
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


def mismatch(expected: np.ndarray, measured: np.ndarray) -> Mismatch:
    """max |expected - measured| over the tokens that both have; a server's context may be shorter
    than the probe. Both (n,) float32.

    Raises ValueError if there is nothing to compare. A value that is not finite counts as
    infinitely far.
    """
    tokens = min(len(expected), len(measured))
    if tokens == 0:
        raise ValueError("no logprobs to compare")
    distance = np.abs(expected[:tokens].astype(np.float64) - measured[:tokens])
    return Mismatch(float(np.nan_to_num(distance, nan=np.inf).max()), tokens)
