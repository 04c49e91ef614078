"""The adapters that one vLLM has on its base: loaded while it answers, without a pause.

Each version is an adapter with its own name. A request names the adapter that it wants, so it is
answered by one version from its first token to its last, and vLLM's prefix cache holds the versions
apart. An adapter is unloaded once a newer one of its run has replaced it and no request uses it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from streamrl.config.sections.learner import Lora
from streamrl.inference.servers.engine import Engine
from streamrl.inference.servers.probe import ProbeTolerance, compare_logprobs
from streamrl.inference.servers.vllm_launch import MODEL
from streamrl.stream.records import AdapterBase, AdapterCheck, PolicyVersion
from streamrl.system.errors import InferenceError
from streamrl.weights.manifest import ADAPTER_CONFIG

CHECK = "check"  # The name of the random adapter.
ADAPTERS_OF_A_RUN = 2  # that answers are sampled with at a time, while a version replaces another
MIN_ADAPTERS = 4
KEPT = 2  # Clients may not have heard of the newest version yet, and ask for the one before.
MAX_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # vLLM has no others.


def arguments(settings: Lora, guests: int) -> list[str]:
    """The arguments of a vLLM that takes adapters of its run and of this number of others.

    Of each run it computes with the newest adapter and the one before it at a time. Requests for
    further ones wait.
    """
    adapters = max(MIN_ADAPTERS, ADAPTERS_OF_A_RUN * (1 + guests))
    rank = largest_rank(settings)
    flags = {"--max-lora-rank": rank, "--max-loras": adapters, "--max-cpu-loras": 2 * adapters}
    line = ["--enable-lora"]
    for flag, value in flags.items():
        line += [flag, str(value)]
    # Otherwise vLLM also makes the head take adapters, and ends at a probe while it answers others:
    # it looks the adapters of the probe's tokens up among those of the sampled ones.
    return [*line, "--lora-target-modules", *settings.targets]


def largest_rank(settings: Lora) -> int:
    """The largest rank that a vLLM takes which was started for adapters of these settings."""
    return next(rank for rank in MAX_RANKS if rank >= settings.rank)


def refuse_other_base(version: PolicyVersion, own: AdapterBase) -> None:
    """Raise InferenceError unless a version of another run is an adapter of this server's base."""
    if version.base is None:
        raise InferenceError(
            "its versions are whole models, and a server has adapters of several runs only: give"
            " the run learner.lora, or its own servers"
        )
    if version.base.sha256 != own.sha256:
        raise InferenceError(
            f"its adapters have another base (sha256 {version.base.sha256[:12]}) than this"
            f" server ({own.sha256[:12]}): give both runs the same model and tokenizer, or the run"
            " its own servers"
        )


class _Shape(msgspec.Struct):
    """What counts of PEFT's settings of an adapter."""

    r: int
    target_modules: list[str]


def refuse_other_shape(directory: Path, served: Lora) -> None:
    """Raise InferenceError if the adapter in `directory` has a higher rank, or more layers, than
    vLLM was started for.
    """
    try:
        config = msgspec.json.decode((directory / ADAPTER_CONFIG).read_bytes(), type=_Shape)
    except (OSError, RecursionError, msgspec.DecodeError) as error:
        raise InferenceError(f"{ADAPTER_CONFIG} of its adapters cannot be read: {error}") from None
    if config.r > largest_rank(served):
        raise InferenceError(
            f"its adapters have rank {config.r}, and this server takes ranks up to"
            f" {largest_rank(served)}: give the run a lower learner.lora.rank, or servers of its"
            " own"
        )
    more = [name for name in config.target_modules if name not in served.targets]
    if more:
        raise InferenceError(
            f"its adapters change {', '.join(more)}, and this server applies adapters of"
            f" {', '.join(served.targets)}: give the run such learner.lora.targets, or its own"
            " servers"
        )


class LoadedAdapters:
    """The adapters of a running vLLM. All methods raise InferenceError if it refuses."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # Of each run: the directories of its adapters by their names, oldest first.
        self._directories: dict[str, dict[str, Path]] = {}
        self._loads = 0

    def check(self, check: AdapterCheck, directory: Path, tolerance: ProbeTolerance) -> None:
        """Check that the server applies adapters: with a random one that changes logprobs visibly,
        its logprobs are the learner's.
        """
        self._engine.load_adapter(CHECK, directory)
        try:
            measured = self._engine.probe(check.probe.tokens, CHECK)
        finally:
            self._engine.unload_adapter(CHECK)
        mismatch = compare_logprobs(check.probe.logprobs, measured)
        if not tolerance.accepts(mismatch):
            raise InferenceError(
                f"the server does not apply adapters as the learner does: with a random one its"
                f" logprobs are off by up to {mismatch.max_abs:.3g}, in the mean by"
                f" {mismatch.mean_abs:.3g}, over {mismatch.tokens} tokens"
                f" (inference.probe_tolerance is {tolerance.value:g}); {tolerance.advice(mismatch)}"
            )

    def load(self, version: int, directory: Path, run: str) -> str:
        """Load the adapter in `directory` next to the others. Returns the name that requests give
        for it. It is another one each time, because vLLM caches by name. `run`: whose version it
        is.
        """
        self._loads += 1
        # inside_vllm/streamrl_adapters.py reads the version from the name, streamrl_guard.py the
        # run that may sample with it.
        name = f"{MODEL}-{version}-{self._loads}@{run}"
        self._engine.load_adapter(name, directory)
        self._directories.setdefault(run, {})[name] = directory
        return name

    def unload_unused(self) -> None:
        """Unload all adapters but the newest of each run that no request uses, and delete their
        files: vLLM may read those of an adapter in use again.
        """
        used = self._engine.adapters_in_use()
        for directories in self._directories.values():
            for name in list(directories)[:-KEPT]:
                if name not in used:
                    self._engine.unload_adapter(name)
                    shutil.rmtree(directories.pop(name), ignore_errors=True)
