"""One vLLM and the policy version that it serves. To load a version the host pulls and verifies its
weights, starts vLLM on them or swaps them in, and probes. If versions are adapters, vLLM is started
on their base, and loads them next to it, and also those of other runs on the same base. All of this
blocks, so the agent runs it on a background thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from streamrl.config.run_file import RunFile
from streamrl.inference.servers import vllm_process
from streamrl.inference.servers.adapters import (
    LoadedAdapters,
    arguments,
    refuse_other_base,
    refuse_other_shape,
)
from streamrl.inference.servers.engine import Engine, Load, Swap
from streamrl.inference.servers.probe import (
    Mismatch,
    ProbeTolerance,
    compare_logprobs,
    probe_tolerance,
)
from streamrl.inference.servers.vllm_launch import MODEL, VllmLaunch, run_keys
from streamrl.inference.servers.weight_copies import VersionCopies, WeightCopies
from streamrl.stream.records import AdapterBase, PolicyVersion
from streamrl.system.errors import InferenceError, WeightError

VLLM = "/metrics/vllm"  # The HTTP path under which the part shows vLLM's own metrics.
STOP_TIMEOUT_S = 10.0  # An agent that stops waits this long for a pull, a start or a swap.


class LoadResult(NamedTuple):
    """A version that has been loaded, how long that took, and the result of its probe."""

    version: int
    # The distance to the learner's own logprobs. Its tokens are 0 if the version has no probe.
    mismatch: Mismatch
    pull_s: float
    swap: Swap | None  # None: vLLM was started on this version
    start_s: float  # the time to start vLLM or to swap
    model: str = MODEL  # the name that requests for this version give
    # The time from the announcement to the beginning of the pull, by the clocks of two machines.
    announce_delay_s: float = 0.0

    def metrics(self) -> dict[str, float]:
        """The metrics of this result, by the names in `metric_names.py`."""
        values = {
            "inference/heard_s": self.announce_delay_s,
            "inference/pull_s": self.pull_s,
            "inference/mismatch_max_abs": self.mismatch.max_abs,
            "inference/mismatch_mean_abs": self.mismatch.mean_abs,
            "inference/mismatch_tokens": float(self.mismatch.tokens),
        }
        if self.swap is None:
            return {**values, "inference/start_s": self.start_s}
        swap = self.swap
        return {
            **values,
            "inference/swap_s": swap.total_s,
            "inference/pause_s": swap.pause_s,
            "inference/reload_s": swap.reload_s,
            "inference/resume_s": swap.total_s - swap.pause_s - swap.reload_s,
        }

    def probe_failure(self, tolerance: ProbeTolerance) -> str:
        """Why the version must not be served, or "" if its probe passed."""
        mismatch = self.mismatch
        if tolerance.accepts(mismatch):
            return ""
        return (
            f"version {self.version}: the server's logprobs differ from the learner's by up to"
            f" {mismatch.max_abs:.3g}, in the mean by {mismatch.mean_abs:.3g}, over"
            f" {mismatch.tokens} tokens (inference.probe_tolerance is {tolerance.value:g});"
            f" {tolerance.advice(mismatch)}"
        )


class VllmHost:
    """Owns one vLLM. One thread calls `load_version` for this run, and another one for each guest:
    they copy weights at the same time, and load them one after the other. Any thread may call the
    other methods.
    """

    def __init__(self, run: RunFile, identity: str, index: int, stop: threading.Event) -> None:
        self.seed = -1  # of vLLM's random numbers; -1: no vLLM has been started
        self._run = run
        self._index = index
        self._stop = stop
        self._copies = WeightCopies(run, run.directory / "inference" / identity)
        self._log_path = run.directory / "logs" / f"{identity}-vllm.log"
        self._process: vllm_process.VllmProcess | None = None
        self._engine: Engine | None = None
        self._started_on = Path()  # the copy that vLLM reads its tokenizer from
        self._base: AdapterBase | None = None  # that vLLM was started on
        self._adapters: LoadedAdapters | None = None  # on the base
        self._checked = set[str]()  # sha256 of the random adapters that vLLM has applied
        self._loading = threading.Lock()

    @property
    def url(self) -> str:
        return self._process.url if self._process else ""

    def load_version(self, version: PolicyVersion, guest: str = "") -> LoadResult:
        """Make vLLM serve `version`. `guest`: the name of the run whose version it is, where that
        is another one (inference.also_serves). A version of this run has to be loaded before.

        Raises WeightError if the copy is not what was announced. Then the server stays on its
        version. After any other StreamrlError this host cannot be used any more, unless it was
        about a guest's version.
        """
        started_s = time.monotonic()
        announce_delay_s = time.time() - version.time_s if version.time_s else 0.0
        self._refuse_unservable(version, guest)
        copies = self._copies.pull_version(
            version,
            guest,
            with_check=version.base is not None and version.base.check.sha256 not in self._checked,
            with_base=self._engine is None,
        )
        pulled_s = time.monotonic()
        with self._loading:
            is_first = self._engine is None
            engine = self._engine or self._start_on_version(version, copies)
            model = MODEL
            swap = None
            if version.base is not None:
                model = self._load_adapter(version, version.base, copies, guest)
                swap = None if is_first else self._without_pause(pulled_s)
            elif not is_first:
                swap = engine.swap(copies.weights, version.version, self._probe_tokens(version))
            loaded_s = time.monotonic()
            mismatch = self._compare(version, engine, model, swap)
            if self._adapters is None:
                self._copies.delete_all_but((self._started_on, copies.weights))
            else:
                self._adapters.unload_unused()
        return LoadResult(
            version=version.version,
            mismatch=mismatch,
            pull_s=pulled_s - started_s,
            swap=swap,
            start_s=loaded_s - pulled_s,
            model=model,
            announce_delay_s=announce_delay_s,
        )

    def start_model(self, directory: Path, name: str) -> None:
        """Start vLLM on a model that is none of the run's versions. Requests give it as `name`."""
        engine = self._launch(directory, name=name)
        engine.set_version(0)  # A client takes no answer whose tokens have no version.
        self._engine = engine

    def alive(self) -> bool:
        """False if vLLM was started and has ended."""
        return self._process is None or self._process.alive()

    def cause(self) -> str:
        """Why vLLM has ended, by its log."""
        return self._process.cause() if self._process else ""

    def read_load(self) -> Load | None:
        """The load, or None before vLLM is up. Raises InferenceError if vLLM does not answer."""
        return self._engine.read_load() if self._engine else None

    def vllm_metrics(self) -> bytes:
        """vLLM's Prometheus page. Raises InferenceError if it is not up or does not answer."""
        if self._engine is None:
            raise InferenceError("vLLM is not up yet")
        return self._engine.metrics()

    def stop(self) -> None:
        """End vLLM, if it has been started."""
        if self._process:
            self._process.stop()
        if self._engine:
            self._engine.close()

    def _refuse_unservable(self, version: PolicyVersion, guest: str) -> None:
        """Raise an error for a version that this vLLM cannot take, before it is copied: WeightError
        where no vLLM of this run file could take it.
        """
        if guest:
            assert self._base is not None, "this run's own version comes first"
            refuse_other_base(version, self._base)
        if version.base is not None and self._run.learner.lora is None:
            raise WeightError(
                f"version {version.version} is an adapter, and this server's run file has no"
                " learner.lora"
            )
        if self._engine is not None and (version.base is None) != (self._base is None):
            kinds = ("a whole model", "the base of adapters")
            raise InferenceError(
                f"version {version.version} needs {kinds[version.base is not None]} under it, and"
                f" vLLM was started on {kinds[self._base is not None]}: start the server again"
            )

    def _start_on_version(self, version: PolicyVersion, copies: VersionCopies) -> Engine:
        """Start vLLM on a version or, if it is an adapter, on its base."""
        self._started_on = copies.weights
        adapter_arguments: list[str] = []
        if version.base is not None:
            settings = self._run.learner.lora
            assert copies.base and settings, "without them the version is refused, or not copied"
            self._started_on = copies.base
            adapter_arguments = arguments(settings, len(self._run.inference.also_serves))
        engine = self._launch(self._started_on, adapter_arguments)
        if version.base is None:
            engine.set_version(version.version)
        engine.warm_up()
        self._base = version.base
        self._adapters = LoadedAdapters(engine) if version.base else None
        self._engine = engine
        return engine

    def _load_adapter(
        self, version: PolicyVersion, base: AdapterBase, copies: VersionCopies, guest: str
    ) -> str:
        """Load an adapter next to the others. Before the first one of a run it is checked that vLLM
        applies adapters of that run's shape. Returns the name that requests give for it.
        """
        assert self._adapters is not None, "a vLLM without adapters refuses the version"
        try:
            if copies.check is not None:
                if guest and self._run.learner.lora:
                    refuse_other_shape(copies.check, self._run.learner.lora)
                self._adapters.check(base.check, copies.check, probe_tolerance(self._run))
                self._checked.add(base.check.sha256)
            run = guest or self._run.run
            return self._adapters.load(version.version, copies.weights, run)
        except InferenceError:
            # A guest's version is tried again and again, each time from a new copy.
            self._copies.delete(copies.weights)
            raise

    def _launch(
        self, directory: Path, adapter_arguments: Sequence[str] = (), name: str = MODEL
    ) -> Engine:
        """Start vLLM on the model in `directory`."""
        launch = VllmLaunch(
            settings=self._run.inference,
            model=directory,
            log_path=self._log_path,
            run_keys=run_keys(self._run),
            name=name,
            index=self._index,
            max_samples=self._run.max_samples,
            adapter_arguments=adapter_arguments,
        )
        self.seed = launch.seed
        self._process = vllm_process.start(launch, self._stop)
        if self._stop.is_set():
            raise InferenceError("asked to stop while vLLM was starting")
        return Engine(self._process.url, self._process.key)

    @staticmethod
    def _without_pause(began_s: float) -> Swap:
        """The durations of loading an adapter, which pauses nothing."""
        seconds = time.monotonic() - began_s
        return Swap(pause_s=0.0, reload_s=seconds, total_s=seconds)

    def _probe_tokens(self, version: PolicyVersion) -> np.ndarray | None:
        """The tokens of the version's probe, cut to the server's context less one, because vLLM
        always samples one. None if it has no probe.
        """
        if version.probe is None:
            return None
        return version.probe.tokens[: self._run.inference.max_model_len - 1]

    def _compare(
        self, version: PolicyVersion, engine: Engine, model: str, swap: Swap | None
    ) -> Mismatch:
        """Compare the server's logprobs of the probe with the learner's: those that the swap has
        measured, or else they are asked for now.
        """
        tokens = self._probe_tokens(version)
        if version.probe is None or tokens is None:
            return Mismatch(0.0, 0)
        measured = swap.probed if swap else None
        if measured is None:
            measured = engine.probe(tokens, model)
        return compare_logprobs(version.probe.logprobs, measured)


def check_alive(host: VllmHost, server_id: str, what: str) -> None:
    """Check that vLLM has not ended while it served `what`. Raises InferenceError."""
    if not host.alive():
        raise InferenceError(f"vLLM of {server_id} died while serving {what}: {host.cause()}")


@contextmanager
def open_host(run: RunFile, identity: str, index: int, stop: threading.Event) -> Iterator[VllmHost]:
    """A host whose vLLM ends with this context. `stop` is set at the end, so that a vLLM that
    another thread is starting ends too.
    """
    host = VllmHost(run, identity, index, stop)
    try:
        yield host
    finally:
        stop.set()
        host.stop()
