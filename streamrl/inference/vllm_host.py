"""One vLLM and the policy version it serves: pull, verify, start or swap, probe. Blocking; the
agent runs it beside its loop.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from streamrl.config.run_file import RunFile
from streamrl.errors import InferenceError
from streamrl.inference import vllm_server
from streamrl.inference.engine import Engine, Load, Mismatch, Swap, mismatch
from streamrl.records import PolicyVersion
from streamrl.weights.store import pull

VLLM = "/metrics/vllm"  # where the part shows vLLM's own metrics


class Served(NamedTuple):
    """A version that is loaded, and how it went."""

    version: int
    # against the learner's own logprobs; 0 tokens when the version came without a probe
    mismatch: Mismatch
    pull_s: float
    swap: Swap | None  # None: vLLM was started on it
    start_s: float
    # from its announcement to the beginning of the pull, by the clocks of both machines
    heard_s: float = 0.0

    def metrics(self) -> dict[str, float]:
        """By the names of metrics.py."""
        distance, tokens = self.mismatch
        values = {"inference/heard_s": self.heard_s, "inference/pull_s": self.pull_s}
        values |= {
            "inference/mismatch_max_abs": distance,
            "inference/mismatch_tokens": float(tokens),
        }
        if self.swap is None:
            return {**values, "inference/start_s": self.start_s}
        pause_s, reload_s, total_s = self.swap
        spent = {
            "swap_s": total_s,
            "pause_s": pause_s,
            "reload_s": reload_s,
            "resume_s": total_s - pause_s - reload_s,
        }
        return {**values, **{f"inference/{name}": seconds for name, seconds in spent.items()}}


def objection(served: Served, tolerance: float) -> str:
    """Why a version that is loaded must not be served; empty when nothing speaks against it."""
    if served.mismatch.max_abs <= tolerance:
        return ""
    distance, tokens = served.mismatch
    return (
        f"version {served.version}: the server's logprobs differ from the learner's by up to {distance:.3g} over {tokens} tokens "
        f"(inference.probe_tolerance is {tolerance:g}); a weight was not reloaded, or the two do not compute the same model"
    )


class Host:
    """Owns one vLLM. `serve` is called for one version after another, from one thread; `alive`,
    `load` and `stop` from another.
    """

    def __init__(self, run: RunFile, identity: str, index: int, stop: threading.Event) -> None:
        self._run, self._index, self._stop = run, index, stop
        self._directory = run.directory / "inference" / identity  # copies of the weights
        self._log_path = run.directory / "logs" / f"{identity}-vllm.log"
        self._process: vllm_server.Process | None = None
        self._engine: Engine | None = None
        shutil.rmtree(self._directory, ignore_errors=True)  # of an earlier life

    @property
    def url(self) -> str:
        return self._process.url if self._process else ""

    def serve(self, version: PolicyVersion) -> Served:
        """Make vLLM serve `version`.

        Raises WeightError when the copy is not what was announced: nothing has changed then. Any
        other StreamrlError is the end of this host.
        """
        start, heard_s = time.monotonic(), time.time() - version.time_s if version.time_s else 0.0
        directory = pull(
            version, self._run.store, self._directory / str(version.version), link=True
        )
        pulled = time.monotonic()
        swap = self._load(directory, version.version)
        done = time.monotonic()
        found = self._probe(version)
        self._forget_all_but(directory)
        return Served(version.version, found, pulled - start, swap, done - pulled, heard_s)

    def alive(self) -> bool:
        """False when vLLM was started and has ended."""
        return self._process is None or self._process.alive()

    def cause(self) -> str:
        return self._process.cause() if self._process else ""

    def load(self) -> Load | None:
        """None before vLLM is up. Raises InferenceError when it does not answer."""
        return self._engine.load() if self._engine else None

    def vllm_metrics(self) -> bytes:
        """Its own, as it shows them to Prometheus. Raises InferenceError when it does not answer,
        or is not up yet.
        """
        if self._engine is None:
            raise InferenceError("vLLM is not up yet")
        return self._engine.metrics()

    def stop(self) -> None:
        if self._process:
            self._process.stop()
        if self._engine:
            self._engine.close()

    def _load(self, directory: Path, version: int) -> Swap | None:
        if self._engine is not None:
            return self._engine.swap(directory, version)
        self._process = vllm_server.start(
            self._run.inference,
            directory,
            self._log_path,
            self._stop,
            self._index,
            self._run.max_samples,
        )
        if self._stop.is_set():
            raise InferenceError("asked to stop while vLLM was starting")
        engine = Engine(self._process.url, self._process.key)
        engine.label(version)
        engine.warm_up()
        self._engine = engine
        return None

    def _probe(self, version: PolicyVersion) -> Mismatch:
        """The server's logprobs of the learner's probe, as much of it as the server's context holds
        (it keeps room for one token more).
        """
        if version.probe is None or self._engine is None:
            return Mismatch(0.0, 0)
        return mismatch(
            version.probe.logprobs,
            self._engine.probe(version.probe.tokens[: self._run.inference.max_model_len - 1]),
        )

    def _forget_all_but(self, directory: Path) -> None:
        """Earlier copies go, except the one vLLM was started on: it has its tokenizer from there."""
        copies = sorted(self._directory.iterdir(), key=lambda path: path.stat().st_mtime)
        for copy in copies[1:]:
            if copy != directory:
                shutil.rmtree(copy, ignore_errors=True)


@contextmanager
def open_host(run: RunFile, identity: str, index: int, stop: threading.Event) -> Iterator[Host]:
    """A host whose vLLM ends with this context. `stop` is set then, so a vLLM that is starting ends
    too.
    """
    host = Host(run, identity, index, stop)
    try:
        yield host
    finally:
        stop.set()
        host.stop()
