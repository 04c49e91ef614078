"""The run file: every setting of a run on one page, with its unit and default. A part is handed its own frozen section.

An unknown key, a wrong type or settings that cannot work together are a ConfigError that names the key, and the nearest valid one.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from streamrl.credentials import exposed
from streamrl.errors import ConfigError

NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,60}[a-z0-9])?")
RATIO_LOSSES = ("ppo", "dapo", "cispo", "gspo", "clipped-ratio")  # importance sampling is in them (learner/losses.py)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Reward(Section):
    """A reward function of a run."""

    kind: str  # math-verify, or FILE.py:NAME, or MODULE:NAME
    params: dict[str, Any] = {}  # given to the constructor, where it is a class


class Env(Section):
    """One environment of the run: what it poses, how it samples, how much of a batch it is to have."""

    kind: str = ""  # a shipped env, FILE.py:CLASS, MODULE:CLASS, verifiers:FILE.py, verifiers:MODULE; default: the name it has in the run file
    params: dict[str, Any] = {}  # given to the env's constructor, or its load_environment
    fraction: float = Field(default=0.0, ge=0, le=1)  # of the tokens of each batch; what the fractions leave goes by availability
    replicas: int = Field(default=1, ge=0)  # processes; replica i of n takes every n-th problem. 0: its rollouts come from outside
    seed: int = 0
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = -1  # -1: off
    max_tokens: int = Field(default=16, ge=1)  # sampled a turn
    max_groups_in_flight: int = Field(default=64, ge=1)  # an upper bound on top of demand
    max_groups_per_s: float = Field(default=0.0, ge=0)  # 0: as fast as demand asks
    max_turns: int = Field(default=8, ge=1)  # sampled in one rollout; then it ends, truncated
    rollout_timeout_s: float = Field(default=600.0, gt=0)  # of a whole conversation; then it ends, truncated
    env_timeout_s: float = Field(default=30.0, gt=0)  # of one call of the env's own code: a reply (then truncated), its rewards (then failed)
    rewards: dict[str, Reward] = {}  # functions beside the env's own, by the name that their rewards go by
    reward_weights: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = {}  # of named rewards in the scalar that trains; otherwise 1
    tool_syntax: str = "json"  # how the policy calls tools of verifiers' envs: json (<tool_call>{...}</tool_call>), brackets, or MODULE:FUNCTION
    timeout_s: float = Field(default=60.0, gt=0)  # of one request
    attempts: int = Field(default=3, ge=1)  # on different servers, before a rollout is published with its failure


class Buffer(Section):
    """Rollouts in, scored groups out."""

    group_size: int = Field(default=8, ge=1)  # rollouts a problem
    min_group_size: int = Field(default=2, ge=1)  # a group that would age out closes with at least so many
    max_age: int = Field(default=1, ge=0)  # learner versions
    max_window_tokens: int = Field(default=4_000_000, ge=1)  # an env's window: full, it stops reading
    max_invalid_frac: float = Field(default=0.5, ge=0, le=1)  # of the last 1,000 rollouts of an env: beyond it the env is not read for 30 s; 1: never
    advantage: str = "rloo"  # rloo, grpo, dr-grpo, reinforce++, reinforce++-baseline, maxrl, or MODULE:FUNCTION
    zero_advantage: Literal["keep", "filter"] = "keep"  # a group whose advantages are all 0: train on it, or leave it out (others fill the batch)
    remember_versions: int = Field(default=16, ge=1)  # how long uids and closed groups are known, in versions


class Batcher(Section):
    """Groups in, batches out."""

    total_token_budget: int = Field(default=16_384, ge=1)  # real tokens of a batch, prompts included
    max_seq_len: int = Field(default=2_048, ge=2)  # tokens of a row
    row_count: int = Field(default=0, ge=0)  # rows of every batch; 0: enough for the budget and a tenth more
    lookahead: int = Field(default=0, ge=0)  # batch k is built when version k - lookahead is announced
    on_shortage: Literal["block", "spill"] = "block"  # an env cannot meet its share: wait for it, or let the others fill in
    advantage: str = ""  # over the batch: none, normalize, or MODULE:FUNCTION; empty: what buffer.advantage needs
    shortage_after_s: float = Field(default=2.0, gt=0)  # a shortage that lasts so long is reported

    @property
    def rows(self) -> int:
        """Rows of every batch of the run."""
        return self.row_count or -(-self.total_token_budget * 11 // (10 * self.max_seq_len)) + 1


class TinyModel(Section):
    """A small Llama the project makes itself, for machines without a hub."""

    layers: int = Field(default=2, ge=1)
    hidden: int = Field(default=128, ge=8)
    head_dim: int = Field(default=32, ge=8)
    alphabet: str = "0123456789+="  # one token a character, after the special tokens
    chat: Literal["plain", "turns"] = "plain"  # turns: for conversations, each message behind a token for its role
    seed: int = 0


class Model(Section):
    path: str = ""  # a Hugging Face directory; empty: make the tiny one
    tiny: TinyModel = TinyModel()
    max_seq_len: int = Field(default=128, ge=2)  # positions the model is built for (tokens of one rollout)


class Correction(Section):
    """What the learner does about rollouts of an older version or another engine. Each is a choice of its own; docs/losses.md has the formulas."""

    old_policy: Literal["bypass", "decoupled"] = "bypass"  # the ratio is measured from the policy that sampled, or the one a step begins with
    weights: Literal["none", "token", "sequence"] = "none"  # importance weights of each token, or of each rollout
    beyond: Literal["truncate", "mask"] = "truncate"  # a weight above weight_max: cut down to it, or (also below weight_min) out of the batch
    weight_min: float = Field(default=0.0, ge=0)
    weight_max: float = Field(default=2.0, gt=0)
    reject: Literal["none", "k1", "k2", "k3", "geometric"] = "none"  # the distance from the policy that sampled beyond which nothing trains
    reject_by: Literal["token", "sequence"] = "token"  # the distance of a token, or the mean of its rollout; geometric: always sequence
    reject_above: float = Field(default=0.0, ge=0)  # the limit: of |k1|, k2, k3 in nats; geometric: a ratio above 1 (and below, its inverse)


class Learner(Section):
    """Batches in, policy versions out."""

    name: str = "lead"  # of the run's own: all parts follow its versions. Others may join, under other names (`streamrl learner --name`)
    loss: str = "ppo"  # ppo, dapo, cispo, gspo, grpo (document 003), clipped-ratio (document 000), or MODULE:FUNCTION
    average: Literal["", "tokens", "samples", "constant"] = ""  # what a token counts in its batch; empty: as the loss's source has it
    clip_epsilon: float = Field(default=0.2, gt=0)  # the ratio may go down to 1 - clip_epsilon
    clip_epsilon_high: float = Field(default=0.0, ge=0)  # and up to 1 + clip_epsilon_high; 0: as clip_epsilon
    correction: Correction = Correction()
    kl: str = "k3"  # estimator of the divergence from the reference: k1 (document 000), k2, k3, or MODULE:FUNCTION
    kl_coefficient: float = Field(default=0.01, ge=0)
    kl_in: Literal["loss", "advantages"] = "loss"  # added to the loss, or subtracted from the advantages
    micro_batch_rows: int = Field(default=0, ge=0)  # rows that a device works on at a time; 0: all of its rows
    learning_rate: float = Field(default=1e-3, gt=0)
    warmup_steps: int = Field(default=10, ge=0)
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    max_grad_norm: float = Field(default=1.0, gt=0)
    normalize_advantages: bool = True  # divide by their standard deviation in the batch
    checkpoint_every: int = Field(default=20, ge=1)  # versions
    keep_checkpoints: int = Field(default=2, ge=1)
    seed: int = 0
    probe_tokens: int = Field(default=64, ge=8)


class Weights(Section):
    store: str = ""  # an fsspec URI, below which each run has a directory; empty: weights/ in the run's directory
    keep_versions: int = Field(default=4, ge=2)  # the newest ones; older files are deleted


class Inference(Section):
    """Policy versions in, tokens out."""

    replicas: int = Field(default=1, ge=0)
    python: str = ""  # of the environment that has vllm; empty: .venv-inference, here or beside the environment this runs in, then this one
    host: str = "127.0.0.1"  # the address that servers bind, and that envs reach them at; any but loopback needs an api_key; may be env:NAME
    port: int = Field(default=0, ge=0, le=65535)  # 0: any free one; replica i takes port + i
    api_key: str = ""  # env:NAME; with it, servers answer nobody who does not send it (what controls a server is its agent's alone in any case)
    dtype: str = "float32"
    max_model_len: int = Field(default=128, ge=8)  # tokens
    max_num_seqs: int = Field(default=64, ge=1)
    kv_cache_gib: int = Field(default=1, ge=1)  # on a CPU
    extra_args: list[str] = []  # passed to vllm as they are
    heartbeat_s: float = Field(default=1.0, gt=0)
    probe_tolerance: float = Field(default=1e-3, gt=0)  # |difference| of logprobs beyond which a server is in error

    @property
    def interpreter(self) -> Path:
        """The Python to run vLLM with."""
        beside = [directory / ".venv-inference" / "bin" / "python" for directory in (Path.cwd(), Path(sys.prefix).parent)]
        return Path(self.python) if self.python else next((path for path in beside if path.exists()), Path(sys.executable))


class Target(Section):
    """The run ends well when the env's mean reward over its last batches is reached."""

    env: str
    reward: float
    batches: int = Field(default=20, ge=1)


class Orchestrator(Section):
    target: Target | None = None
    max_steps: int = Field(default=0, ge=0)  # 0: no limit; reached, the run ends well
    max_wall_s: float = Field(default=0.0, ge=0)  # 0: no limit; from the moment a server is ready; with a target, reached first is a failure
    restart_limit: int = Field(default=20, ge=0)  # of one part within restart_window_s
    restart_window_s: float = 300.0
    backoff_s: float = Field(default=0.2, ge=0)  # doubles at each restart in a row, up to 10 s


class Topics(Section):
    partitions: int = Field(default=1, ge=1)  # of rollouts.<env> and groups.<env>; fixed for a run
    replicas: int = Field(default=1, ge=1)  # copies of each partition
    retention_hours: float = Field(default=168, gt=0)
    config: dict[str, str] = {}  # more settings for every topic


class Fork(Section):
    """Where a run comes from that `streamrl fork` made, and so where it begins. Written there, not by hand."""

    run: str  # the parent
    version: int = Field(ge=0)  # of the parent's policy; the fork's first batch has this number
    sha256: str  # of that version
    balance: dict[str, float] = {}  # tokens that the parent owed each share of a batch (batcher/selection.py)


class RunFile(Section):
    run: str
    kafka: dict[str, Any] = {}  # librdkafka settings of an existing cluster, secrets as env:NAME; empty: a local broker in the run's directory
    runs_dir: str = "runs"
    envs: dict[str, Env]
    buffer: Buffer = Buffer()
    batcher: Batcher = Batcher()
    model: Model = Model()
    learner: Learner = Learner()
    weights: Weights = Weights()
    inference: Inference = Inference()
    orchestrator: Orchestrator = Orchestrator()
    topics: Topics = Topics()
    fork: Fork | None = None

    @field_validator("run")
    @classmethod
    def _run_name(cls, value: str) -> str:
        if not NAME.fullmatch(value):
            raise ValueError(f"{value!r} is not a name of lowercase letters, digits and '-'")
        return value

    @model_validator(mode="after")
    def _works_together(self) -> RunFile:
        for problem in (*self._env_problems(), *self._size_problems(), *self._loss_problems(), *self._secret_problems()):
            raise ValueError(problem)
        return self

    def _env_problems(self) -> Iterator[str]:
        if not self.envs:
            yield "envs: a run needs at least one env"
        for name, env in self.envs.items():
            if not NAME.fullmatch(name):
                yield f"envs.{name}: not a name of lowercase letters, digits and '-'"
            if env.top_p < 1 or env.top_k > 0:
                yield f"envs.{name}: the learner reproduces temperature only; leave top_p at 1 and top_k at -1"
            if env.tool_syntax != "json" and not env.kind.startswith("verifiers:"):
                yield f"envs.{name}.tool_syntax is for envs of kind verifiers:...; others read what the policy says themselves"
        total = sum(env.fraction for env in self.envs.values())
        if total > 1 + 1e-9:
            yield f"envs: the fractions add up to {total:.4g}; at most 1 is possible"
        target = self.orchestrator.target
        if target is not None and target.env not in self.envs:
            yield f"orchestrator.target.env {target.env!r} is not one of the envs: {', '.join(self.envs)}"

    def _size_problems(self) -> Iterator[str]:
        buffer, batcher, budget = self.buffer, self.batcher, self.batcher.total_token_budget
        if batcher.lookahead > buffer.max_age:
            yield f"batcher.lookahead is {batcher.lookahead} but buffer.max_age is {buffer.max_age}: need 0 <= lookahead <= max_age"
        if buffer.min_group_size > buffer.group_size:
            yield f"buffer.min_group_size {buffer.min_group_size} is larger than buffer.group_size {buffer.group_size}"
        if buffer.remember_versions <= buffer.max_age:
            yield f"buffer.remember_versions {buffer.remember_versions} must exceed buffer.max_age {buffer.max_age}"
        share = max((env.fraction for env in self.envs.values()), default=0.0) * budget
        if buffer.max_window_tokens < share:
            yield f"buffer.max_window_tokens {buffer.max_window_tokens} is less than an env's share of a batch ({share:.0f} tokens): it would starve"
        if batcher.rows * batcher.max_seq_len < budget:
            yield f"batcher.row_count {batcher.rows} x max_seq_len {batcher.max_seq_len} is less than total_token_budget {budget}"
        if self.model.max_seq_len > batcher.max_seq_len:
            yield f"model.max_seq_len {self.model.max_seq_len} is larger than batcher.max_seq_len {batcher.max_seq_len}: rollouts could not be packed"

    def _loss_problems(self) -> Iterator[str]:
        learner, correction = self.learner, self.learner.correction
        if learner.loss == "dapo" and learner.clip_epsilon_high <= learner.clip_epsilon:
            yield f"learner.loss: dapo is ppo unless clip_epsilon_high is above clip_epsilon {learner.clip_epsilon}; its paper has 0.28 and 0.2"
        if correction.weights != "none" and correction.old_policy == "bypass" and learner.loss in RATIO_LOSSES:
            ratio = f"the ratio of {learner.loss} weighs by the policy that sampled already"
            yield f"learner.correction.weights: {ratio}; set old_policy: decoupled, or learner.loss: grpo, which has no ratio"
        if correction.weight_min >= correction.weight_max:
            yield f"learner.correction.weight_min {correction.weight_min} must be below weight_max {correction.weight_max}"
        least = 1.0 if correction.reject == "geometric" else 0.0
        if correction.reject != "none" and correction.reject_above <= least:
            yield f"learner.correction.reject is {correction.reject}: set reject_above, the limit, above {least:g}"

    def _secret_problems(self) -> Iterator[str]:
        yield from exposed(self.kafka, "kafka")
        yield from exposed({"api_key": self.inference.api_key}, "inference")
        if re.search(r"://[^/]*@", self.weights.store):
            yield "weights.store: credentials in a URI would show in logs and records; give them as the store's own environment variables"
        if any(argument.startswith("--api-key") for argument in self.inference.extra_args):
            yield "inference.extra_args: --api-key would show in the process list; set inference.api_key"
        if not is_loopback(self.inference.host) and not self.inference.api_key:
            yield f"inference.host {self.inference.host} can be reached from other machines: set inference.api_key"

    @property
    def directory(self) -> Path:
        """What the run leaves behind lies here."""
        return Path(self.runs_dir).absolute() / self.run

    @property
    def store(self) -> str:
        """Where the run's weights are written, as a URI (fsspec's: nothing is percent-encoded). Runs that share a store do not meet in it."""
        return f"{self.weights.store.rstrip('/')}/{self.run}" if self.weights.store else f"file://{self.directory / 'weights'}"

    def to_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), indent=1)


def is_loopback(host: str) -> bool:
    """Can nobody outside this machine reach it? A name, or a reference, may be any address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def load(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> RunFile:
    """Read a run file; `overrides` are `learner.learning_rate=1e-3`, parsed as YAML. Raises ConfigError."""
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); give the path of a run file, for instance deploy/runs/quickstart.yaml"
        ) from None
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a run file is a map of settings, not {type(data).__name__}")
    for override in overrides:
        _set(data, override)
    return parse(data, str(path))


def changed(run: RunFile, overrides: Sequence[str]) -> RunFile:
    """The run with these settings instead of its own, as `load` takes them. Raises ConfigError."""
    data = run.model_dump(mode="json")
    for override in overrides:
        _set(data, override)
    return parse(data, f"--set {' '.join(overrides)}") if overrides else run


def parse(data: dict[str, Any], where: str = "run file") -> RunFile:
    try:
        return RunFile.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{where}: " + "; ".join(_explain(problem) for problem in error.errors())) from None


def _set(data: dict[str, Any], override: str) -> None:
    path, equals, value = override.partition("=")
    if not equals:
        raise ConfigError(f"--set {override}: write it as section.key=value")
    *parents, last = path.split(".")
    for parent in parents:
        child = data.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override}: {parent} is not a section")
        data = child
    data[last] = yaml.safe_load(value)


def _explain(problem: Any) -> str:
    """One line a problem: the key, what is wrong, and for an unknown key the nearest that exists."""
    path = ".".join(str(p) for p in problem["loc"])
    if problem["type"] != "extra_forbidden":
        return f"{path + ': ' if path else ''}{problem['msg'].removeprefix('Value error, ')}"
    *parents, key = problem["loc"]
    valid = list(_section(parents).model_fields)
    near = difflib.get_close_matches(str(key), valid, 1, 0.5)
    return f"unknown key {path!r}; " + (f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(valid)}")


def _section(path: list[Any]) -> type[BaseModel]:
    section: Any = RunFile
    for index, key in enumerate(path):
        if index == 1 and path[0] == "envs":
            section = Env
        elif index == 3 and path[0] == "envs":
            section = Reward
        elif index or key != "envs":
            annotation = section.model_fields[key].annotation
            section = {"target": Target, "fork": Fork}.get(key, annotation)
    return section
