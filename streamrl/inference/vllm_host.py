"""One vLLM and the policy version it serves: pull, verify, start or swap, probe. All of this
blocks, so the agent runs it on a background thread.
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


class LoadResult(NamedTuple):
    """A version that has been loaded, how long that took, and the result of its probe."""

    version: int
    # against the learner's own logprobs; 0 tokens when the version came without a probe
    mismatch: Mismatch
    pull_s: float
    swap: Swap | None  # None: vLLM was started on it
    start_s: float
    # from its announcement to the beginning of the pull, by the clocks of both machines
    announce_delay_s: float = 0.0

    def metrics(self) -> dict[str, float]:
        """The metrics of the load, by the names in `metric_names.py`."""
        distance, tokens = self.mismatch
        values = {"inference/heard_s": self.announce_delay_s, "inference/pull_s": self.pull_s}
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


def probe_failure(served: LoadResult, tolerance: float) -> str:
    """Why the loaded version must not be served, or "" if its probe passed."""
    if served.mismatch.max_abs <= tolerance:
        return ""
    distance, tokens = served.mismatch
    return (
        f"version {served.version}: the server's logprobs differ from the learner's by up to"
        f" {distance:.3g} over {tokens} tokens (inference.probe_tolerance is {tolerance:g}); a"
        " weight was not reloaded, or the two do not compute the same model"
    )


class VllmHost:
    """Owns one vLLM. One thread calls `load_version`; another calls `alive`, `load` and `stop`."""

    def __init__(self, run: RunFile, identity: str, index: int, stop: threading.Event) -> None:
        self._run = run
        self._index = index
        self._stop = stop
        self._directory = run.directory / "inference" / identity  # copies of the weights
        self._log_path = run.directory / "logs" / f"{identity}-vllm.log"
        self._process: vllm_server.Process | None = None
        self._engine: Engine | None = None
        shutil.rmtree(self._directory, ignore_errors=True)  # of an earlier life

    @property
    def url(self) -> str:
        return self._process.url if self._process else ""

    def load_version(self, version: PolicyVersion) -> LoadResult:
        """Make vLLM serve `version`.

        Raises WeightError if the copy is not what was announced; nothing has changed then. After
        any other StreamrlError this host cannot be used any more.
        """
        start = time.monotonic()
        heard_s = time.time() - version.time_s if version.time_s else 0.0
        directory = pull(
            version, self._run.store, self._directory / str(version.version), link=True
        )
        pulled = time.monotonic()
        swap = self._load(directory, version.version)
        done = time.monotonic()
        found = self._probe(version)
        self._delete_copies_but(directory)
        return LoadResult(version.version, found, pulled - start, swap, done - pulled, heard_s)

    def alive(self) -> bool:
        """False if vLLM was started and has ended."""
        return self._process is None or self._process.alive()

    def cause(self) -> str:
        return self._process.cause() if self._process else ""

    def load(self) -> Load | None:
        """The load of vLLM, or None before it is up. Raises InferenceError if it does not answer."""
        return self._engine.load() if self._engine else None

    def vllm_metrics(self) -> bytes:
        """vLLM's own Prometheus page. Raises InferenceError if vLLM is not up or does not answer."""
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
        engine.set_version(version)
        engine.warm_up()
        self._engine = engine
        return None

    def _probe(self, version: PolicyVersion) -> Mismatch:
        """Compare the server's logprobs of the probe with the learner's. A probe that is longer
        than the server's context, which keeps room for one more token, is cut.
        """
        if version.probe is None or self._engine is None:
            return Mismatch(0.0, 0)
        return mismatch(
            version.probe.logprobs,
            self._engine.probe(version.probe.tokens[: self._run.inference.max_model_len - 1]),
        )

    def _delete_copies_but(self, directory: Path) -> None:
        """Delete earlier copies, except the one that vLLM was started on, because it reads its
        tokenizer from there.
        """
        copies = sorted(self._directory.iterdir(), key=lambda path: path.stat().st_mtime)
        for copy in copies[1:]:
            if copy != directory:
                shutil.rmtree(copy, ignore_errors=True)


@contextmanager
def open_host(run: RunFile, identity: str, index: int, stop: threading.Event) -> Iterator[VllmHost]:
    """A host whose vLLM ends with this context. `stop` is set at the end, so that a vLLM that is
    still starting ends too.
    """
    host = VllmHost(run, identity, index, stop)
    try:
        yield host
    finally:
        stop.set()
        host.stop()
