"""The sections of what serves a version: its files, the servers and the evaluation."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
)

from streamrl.config import engine_settings
from streamrl.config.ownership import is_ours
from streamrl.config.sections.section import Section
from streamrl.config.topology import GENERATION, VLLM_MEMORY_FRACTION
from streamrl.system.errors import ConfigError
from streamrl.system.text import nearest_or_all


def engine_word(value: str) -> str:
    """Accepts a name that vLLM has a meaning for, or nothing."""
    if value and not engine_settings.WORD.fullmatch(value):
        raise ValueError(f"{value!r} is not a name")
    return value


EngineWord = Annotated[str, AfterValidator(engine_word)]
EngineValue = StrictBool | StrictInt | StrictFloat | StrictStr


def engine_values(value: dict[str, EngineValue]) -> dict[str, EngineValue]:
    """Accepts settings that a run file passes on to vLLM."""
    for problem in engine_settings.problems(value):
        raise ValueError(problem)
    return value


EngineSettings = Annotated[dict[str, EngineValue], AfterValidator(engine_values)]


class Weights(Section):
    """Where policy versions are kept, and how many."""

    # fsspec URI below which each run has a directory. Empty: weights/ in the run's directory.
    store: str = ""
    # Number of newest versions that are kept, and of versions to be evaluated. Older files are
    # deleted.
    keep_versions: int = Field(default=4, ge=2)


class Pool(Section):
    """A further pool of servers. What is not given is as in `inference`."""

    replicas: int = Field(default=1, ge=0)  # Number of servers. 0: others start them.
    # Model that the pool serves instead of the policy, such as a judge's: a directory or a name, as
    # for model.path. Its name in requests is that of the pool.
    model: str = ""
    dtype: EngineWord | None = None  # Replaces inference.dtype.
    # Replaces inference.tensor_parallel.
    tensor_parallel: int | None = Field(default=None, ge=1)
    max_model_len: int | None = Field(default=None, ge=8)  # Replaces inference.max_model_len.
    max_num_seqs: int | None = Field(default=None, ge=1)  # Replaces inference.max_num_seqs.
    engine: EngineSettings = {}  # Over those of inference.engine.
    # Replaces inference.probe_tolerance.
    probe_tolerance: float | None = Field(default=None, gt=0)


class Guest(Section):
    """Another run whose adapters the servers serve."""

    # env:NAME of the key that its requests have to carry, which is inference.api_key of its run
    # file. Needed where this run has a key.
    api_key: str = ""


class Inference(Section):
    """Policy versions in, tokens out."""

    replicas: int = Field(default=1, ge=0)  # Servers of the pool `generation`.
    # Further pools that envs can choose, by name (docs/pools.md).
    pools: dict[str, Pool] = {}
    # Python of the environment with vllm. Empty: .venv-inference here or next to the environment
    # that this runs in, otherwise this Python.
    python: str = ""
    # Address that servers bind and envs reach, or env:NAME. Any address but loopback needs an
    # api_key.
    host: str = "127.0.0.1"
    # Port of server 0; server i has port + i, counted through the pools. 0: any free port.
    port: int = Field(default=0, ge=0, le=65535)
    # env:NAME of the key that this run's requests carry. Its servers answer no others, except those
    # of also_serves. What controls a server is its agent's alone in any case.
    api_key: str = ""
    # Data type that vLLM computes in. Versions are written in bfloat16 where all servers of the
    # policy compute in that, and in float32 otherwise.
    dtype: str = "float32"
    # Number of devices that divide the model of a server.
    tensor_parallel: int = Field(default=1, ge=1)
    # Further settings of vLLM by the names of its arguments, such as {gpu_memory_utilization: 0.8}
    # (docs/pools.md).
    engine: EngineSettings = {}
    # Tokens of the longest sequence. Where model.max_seq_len is given, it is that.
    max_model_len: int = Field(default=128, ge=8)
    max_num_seqs: int = Field(default=64, ge=1)  # Sequences that a server works on at a time.
    # Other runs on the same Kafka, with the same model, whose adapters these servers serve as well
    # as those of this run, by name (docs/models.md).
    also_serves: dict[str, Guest] = {}
    # Names of runs whose servers serve this run's adapters (inference.also_serves of theirs). The
    # access rules let them read its versions and write its `servers`.
    served_by: list[str] = []
    extra_args: list[str] = []  # Further arguments of `vllm serve`, passed as they are.
    # Time between two records of a server on `servers`.
    heartbeat_s: float = Field(default=1.0, gt=0)
    # A server is in error when its logprobs differ from the learner's by more than this: any of
    # them, or where learner or server compute in bf16 their mean (docs/models.md). It is 0.1 there.
    probe_tolerance: float = Field(default=1e-3, gt=0)

    @property
    def sizes(self) -> dict[str, int]:
        """Servers of each pool, by its name."""
        return {GENERATION: self.replicas} | {
            name: own.replicas for name, own in self.pools.items()
        }

    @property
    def weights_dtype(self) -> str:
        """The data type of a version's files: bfloat16, if no server of the policy computes in
        more. Each would round the weights so anyway.
        """
        others = (own.dtype for own in self.pools.values() if not own.model)
        served = {self.dtype, *(dtype or self.dtype for dtype in others)}
        return "bfloat16" if served == {"bfloat16"} else "float32"

    def of_pool(self, pool: str) -> Inference:
        """The settings of a pool's servers: its own, and for the rest those of all."""
        own = self.pools.get(pool)
        if own is None:
            return self
        replaced = own.model_dump(exclude_none=True, exclude={"replicas", "model", "engine"})
        return self.model_copy(update={**replaced, "engine": {**self.engine, **own.engine}})

    def with_memory(self, shares: Mapping[str, float]) -> Inference:
        """The settings with the share of a GPU's memory of each of these pools, where neither it
        nor `engine` gives one. What one pool gets is not inherited by the others.
        """
        name = "gpu_memory_utilization"
        if name in self.engine or not shares:
            return self
        pools = dict(self.pools)
        for pool, own in self.pools.items():
            share = shares.get(pool, VLLM_MEMORY_FRACTION)
            pools[pool] = own.model_copy(update={"engine": {name: share, **own.engine}})
        engine = dict(self.engine)
        if GENERATION in shares:
            engine[name] = shares[GENERATION]
        return self.model_copy(update={"engine": engine, "pools": pools})

    def own_model(self, pool: str) -> str:
        """The directory of the model that a pool serves; empty: it serves the policy."""
        own = self.pools.get(pool)
        return own.model if own else ""

    def place(self, pool: str, index: int) -> int:
        """The number that server `index` of a pool has among all servers of the run. Raises
        ConfigError if there is no such pool.
        """
        if pool not in self.sizes:
            raise ConfigError(
                f"inference.pools has no {pool!r}; {nearest_or_all(pool, self.sizes)}"
            )
        names = list(self.sizes)
        return sum(self.sizes[name] for name in names[: names.index(pool)]) + index

    @property
    def interpreter(self) -> Path:
        """The Python that runs vLLM. An environment that another user may have put here, as below
        /tmp, is not used.
        """
        if self.python:
            return Path(self.python)
        nearby = [
            directory / ".venv-inference" / "bin" / "python"
            for directory in (Path.cwd(), Path(sys.prefix).parent)
        ]
        ours = (
            path
            for path in nearby
            if path.exists() and is_ours(path.parents[1]) and is_ours(path.parent)
        )
        return next(ours, Path(sys.executable))


class EvalEnv(Section):
    """Problems of an env that training never poses, and how answers to them are sampled. Sampling
    parameters that are not given are those of the env.
    """

    env: str = ""  # Name of the env in the run. Empty: the name of this section.
    # Arguments of the env's constructor, over those it has in training.
    params: dict[str, Any] = {}
    seed: int = 0  # Seed of the problems.
    problems: int = Field(default=64, ge=1)  # Number of different problems.
    samples: int = Field(default=4, ge=1)  # Answers sampled for each problem.
    k: list[Annotated[int, Field(ge=1)]] = [1]  # The values k for which pass@k is reported.
    # Name of the reward by which an answer is right. Empty: the scalar that would train.
    reward: str = ""
    pass_at: float = 1.0  # An answer is right with this reward or a higher one.
    # Sampling temperature. 0: always the likeliest token.
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)  # Nucleus sampling.
    top_k: int | None = None  # Samples from the k likeliest tokens. -1: off.
    max_tokens: int | None = Field(default=None, ge=1)  # Limit of sampled tokens in one turn.


class Eval(Section):
    """Policy versions in, results on held-out problems out. The evaluator has its own server,
    which stays on a version until its evaluation is done.
    """

    # Held-out problems by name. They are kept from training for the whole run, so give them before
    # it begins.
    envs: dict[str, EvalEnv] = {}
    # Versions from one evaluation to the next, from version 0 on. 0: only when `streamrl eval`
    # asks.
    every: int = Field(default=20, ge=0)

    @property
    def interval(self) -> int:
        """Versions from one evaluation in the run to the next; 0: there are none."""
        return self.every if self.envs else 0
