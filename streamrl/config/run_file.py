"""The run file: every setting of a run on one page, with its unit and default. A part is handed its
own frozen section.

An unknown key, a wrong type or settings that cannot work together are a ConfigError that names the
key, and the nearest valid one.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from streamrl.config.ownership import is_ours
from streamrl.config.plugins import imports_in
from streamrl.config.secrets import exposed, is_secret
from streamrl.config.topology import GENERATION
from streamrl.errors import ConfigError, unknown

NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,60}[a-z0-9])?")
# What ships under a name, listed here so that a run file is checked without loading it (JAX, for
# the first two). Tests hold them to the functions.
LOSSES = ("ppo", "dapo", "cispo", "gspo", "grpo", "clipped-ratio")
DIVERGENCES = ("k1", "k2", "k3")
ADVANTAGES = ("rloo", "grpo", "dr-grpo", "reinforce++", "reinforce++-baseline", "maxrl")
# 0 for a rollout without peers
RELATIVE_ADVANTAGES = ("rloo", "grpo", "dr-grpo", "reinforce++-baseline", "maxrl")
# whose baseline or scale is the batch's
NORMALIZED_ADVANTAGES: tuple[str, ...] = ("reinforce++", "reinforce++-baseline")
BATCH_STAGES = ("none", "normalize")
ADMISSIONS = ("demand", "capacity")
CURRICULA = ("none", "stages", "learnability")
SINKS = ("console", "jsonl", "tensorboard", "wandb", "mlflow")
RECORDED = "recorded"  # context of a validation: the run is there already
# librdkafka's settings that a run file may have: how a cluster is reached, by whom, in what sizes.
# None that loads a library or starts a program.
_KAFKA = re.compile(
    r"(bootstrap|socket|broker|reconnect|retry|retries|metadata|topic\.metadata|api\.version|client|security|connections|request|fetch|queued|queue|queuing"
    r"|linger|batch|compression|message|receive|delivery|statistics|max|session|heartbeat|transaction|check|isolation|enable\.ssl)(\.[a-z_.0-9]+)?"
    r"|metadata\.broker\.list|log_level|debug|sasl\.(mechanisms?|username|password|oauthbearer\.[a-z._]+)"
    r"|sasl\.kerberos\.(service\.name|principal|keytab)|ssl\.(?!engine|providers)[a-z_.0-9]+"
)
# importance sampling is in them (learner/losses.py)
RATIO_LOSSES = ("ppo", "dapo", "cispo", "gspo", "clipped-ratio")


def one_of(*shipped: str) -> AfterValidator:
    """A shipped name, or MODULE:NAME, which whoever needs it imports."""

    def check(name: str) -> str:
        if name in shipped or ":" in name:
            return name
        raise ValueError(unknown(name, shipped))

    return AfterValidator(check)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Reward(Section):
    """A reward function of a run."""

    kind: str  # math-verify, or FILE.py:NAME, or MODULE:NAME
    params: dict[str, Any] = {}  # given to the constructor, where it is a class


class PassRate(Section):
    """Problems of a finite set are left out for a while when the policy nearly always or never
    solves them (docs/data.md).
    """

    # of the rollouts of a problem's last visits, the share that passed: at least this
    low: float = Field(default=0.0, ge=0, le=1)
    high: float = Field(default=1.0, ge=0, le=1)  # and at most this; otherwise it rests
    visits: int = Field(default=1, ge=1)  # that are looked at; a problem with fewer is posed
    rest_epochs: int = Field(default=1, ge=1)  # that it is left out of
    reward: str = ""  # that decides, by name, before weights; empty: the scalar that trains
    at_least: float = 1.0  # a rollout passes with this reward


class EnvBuffer(Section):
    """Rules of the buffer for one env. What is not given is as in `buffer`."""

    group_size: int | None = Field(default=None, ge=1)  # rollouts a problem
    # that a group closes with, if it cannot wait
    min_group_size: int | None = Field(default=None, ge=1)
    max_age: int | None = Field(default=None, ge=0)  # learner versions
    advantage: Annotated[str, one_of(*ADVANTAGES)] | None = None  # as buffer.advantage
    zero_advantage: Literal["keep", "filter"] | None = None  # as buffer.zero_advantage
    group_wait_s: float | None = Field(default=None, gt=0)  # without a new rollout


class Env(Section):
    """One environment of the run: what it poses, how it samples, how much of a batch it is to have."""

    # a shipped env, FILE.py:CLASS, MODULE:CLASS, verifiers:FILE.py, verifiers:MODULE; default: the
    # name it has in the run file
    kind: str = ""
    params: dict[str, Any] = {}  # given to the env's constructor, or its load_environment
    # of the tokens of each batch; what the fractions leave goes by availability
    fraction: float = Field(default=0.0, ge=0, le=1)
    # processes; replica i of n takes every n-th problem. 0: its rollouts come from outside
    replicas: int = Field(default=1, ge=0)
    seed: int = 0  # of its problems and their order
    pool: str = GENERATION  # of inference servers: its requests go there and nowhere else
    temperature: float = Field(default=1.0, gt=0)  # of sampling
    # in training always 1: the learner reproduces temperature only
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = -1  # -1: off
    max_tokens: int = Field(default=16, ge=1)  # sampled a turn
    max_groups_in_flight: int = Field(default=64, ge=1)  # an upper bound on top of demand
    max_groups_per_s: float = Field(default=0.0, ge=0)  # 0: as fast as demand asks
    max_turns: int = Field(default=8, ge=1)  # sampled in one rollout; then it ends, truncated
    # of a whole conversation; then it ends, truncated
    rollout_timeout_s: float = Field(default=600.0, gt=0)
    # of one call of the env's own code: a reply (then truncated), its rewards (then failed)
    env_timeout_s: float = Field(default=30.0, gt=0)
    pass_rate: PassRate | None = None  # leave problems out by how often they are solved
    # functions beside the env's own, by the name that their rewards go by
    rewards: dict[str, Reward] = {}
    # of named rewards in the scalar that trains; otherwise 1
    reward_weights: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = {}
    # how the policy calls tools of verifiers' envs: json (<tool_call>{...}</tool_call>), brackets,
    # or MODULE:FUNCTION
    tool_syntax: str = "json"
    timeout_s: float = Field(default=60.0, gt=0)  # of one request
    # on different servers, before a rollout is published with its failure
    attempts: int = Field(default=3, ge=1)
    buffer: EnvBuffer = EnvBuffer()  # rules of the buffer for this env, instead of those for all


class Buffer(Section):
    """Rollouts in, scored groups out."""

    group_size: int = Field(default=8, ge=1)  # rollouts a problem
    # a group that would age out, or has waited for long, closes with at least so many
    min_group_size: int = Field(default=2, ge=1)
    max_age: int = Field(default=1, ge=0)  # learner versions
    # an env's window (and 64 bytes for each): full, its oldest groups close
    max_window_tokens: int = Field(default=4_000_000, ge=1)
    # of the last 1,000 rollouts of an env: beyond it the env is not read for 30 s; 1: never
    max_invalid_frac: float = Field(default=0.5, ge=0, le=1)
    # rloo, grpo, dr-grpo, reinforce++, reinforce++-baseline, maxrl, or MODULE:FUNCTION
    advantage: Annotated[str, one_of(*ADVANTAGES)] = "rloo"
    # a group whose advantages are all 0: train on it, or leave it out (others fill the batch)
    zero_advantage: Literal["keep", "filter"] = "keep"
    # without a new rollout: a group closes at its minimum; ten times as long: below it, with
    # nothing
    group_wait_s: float = Field(default=60.0, gt=0)
    # how long uids and closed groups are known, in versions
    remember_versions: int = Field(default=16, ge=1)


class Target(Section):
    """An env's mean reward over its last batches."""

    env: str  # its name in the run file
    reward: float  # at least this
    batches: int = Field(default=20, ge=1)  # the mean is taken over so many


class Stage(Section):
    """A stage of a curriculum."""

    fractions: dict[str, Annotated[float, Field(ge=0, le=1)]]  # by env, as `envs.<name>.fraction`
    # the next stage begins with this batch; 0: no number ends this one
    until_batch: int = Field(default=0, ge=0)
    until: Target | None = None  # or behind the batch that reaches this


class Curriculum(Section):
    """How much of a batch each env gets, as training goes on (docs/data.md)."""

    # none: envs.<name>.fraction; stages; learnability: r (1 - r) of reward r; MODULE:FUNCTION
    kind: Annotated[str, one_of(*CURRICULA)] = "none"
    stages: list[Stage] = []  # one after another
    # that an env's mean reward is taken over (learnability, and your own)
    batches: int = Field(default=10, ge=1)
    least: float = Field(default=0.05, ge=0, le=1)  # fraction that every env keeps (learnability)


class Batcher(Section):
    """Groups in, batches out."""

    # real tokens of a batch, prompts included
    total_token_budget: int = Field(default=16_384, ge=1)
    max_seq_len: int = Field(default=2_048, ge=2)  # tokens of a row
    # rows of every batch; 0: enough for the budget and a tenth more
    row_count: int = Field(default=0, ge=0)
    # that train on a batch (devices of the learner): each has as many rows, and at least one
    # rollout
    processes: int = Field(default=1, ge=1)
    # what each process has as much of as the others: tokens, flops, or MODULE:FUNCTION
    # (batcher/balance.py)
    balance: str = "tokens"
    # batch k is built when version k - lookahead is announced
    lookahead: int = Field(default=0, ge=0)
    # of work: demand (just in time), capacity (AReaL), MODULE:FUNCTION; docs/admission.md
    admission: Annotated[str, one_of(*ADMISSIONS)] = "demand"
    # of capacity: versions that a rollout's batch may be ahead of the policy it begins with; -1:
    # buffer.max_age
    eta: int = Field(default=-1, ge=-1)
    # an env cannot meet its share: wait for it, or let the others fill in
    on_shortage: Literal["block", "spill"] = "block"
    # over the batch: none, normalize, MODULE:FUNCTION; empty: what buffer.advantage needs
    advantage: Annotated[str, one_of("", *BATCH_STAGES)] = ""
    curriculum: Curriculum = Curriculum()
    shortage_after_s: float = Field(default=2.0, gt=0)  # a shortage that lasts so long is reported

    @property
    def rows(self) -> int:
        """Rows of every batch of the run."""
        enough = -(-self.total_token_budget * 11 // (10 * self.max_seq_len)) + 1
        return self.row_count or -(-enough // self.processes) * self.processes


class TinyModel(Section):
    """A small Llama the project makes itself, for machines without a hub."""

    layers: int = Field(default=2, ge=1)  # transformer blocks
    hidden: int = Field(default=128, ge=8)  # width; a multiple of head_dim
    head_dim: int = Field(default=32, ge=8)  # width of an attention head
    alphabet: str = "0123456789+="  # one token a character, after the special tokens
    # turns: for conversations, each message behind a token for its role
    chat: Literal["plain", "turns"] = "plain"
    seed: int = 0  # of its first weights


class Model(Section):
    """The model that is trained (docs/models.md)."""

    path: str = ""  # a Hugging Face directory; empty: make the tiny one
    tiny: TinyModel = TinyModel()
    # positions the model is built for (tokens of one rollout)
    max_seq_len: int = Field(default=128, ge=2)
    # hidden_size of the model at `path`, where batcher.balance asks for it
    hidden: int = Field(default=0, ge=0)

    @property
    def hidden_size(self) -> int:
        """Of whatever model it is; 0 where nobody has said."""
        return self.hidden if self.path else self.tiny.hidden


class Correction(Section):
    """What the learner does about rollouts of an older version or another engine. Each is a choice
    of its own; docs/losses.md has the formulas.
    """

    # the ratio is measured from the policy that sampled, or the one a step begins with
    old_policy: Literal["bypass", "decoupled"] = "bypass"
    # importance weights of each token, or of each rollout
    weights: Literal["none", "token", "sequence"] = "none"
    # a weight above weight_max: cut down to it, or (also below weight_min) out of the batch
    beyond: Literal["truncate", "mask"] = "truncate"
    weight_min: float = Field(default=0.0, ge=0)  # of beyond: mask
    weight_max: float = Field(default=2.0, gt=0)  # of either
    # the distance from the policy that sampled beyond which nothing trains
    reject: Literal["none", "k1", "k2", "k3", "geometric"] = "none"
    # the distance of a token, or the mean of its rollout; geometric: always sequence
    reject_by: Literal["token", "sequence"] = "token"
    # the limit: of |k1|, k2, k3 in nats; geometric: a ratio above 1 (and below, its inverse)
    reject_above: float = Field(default=0.0, ge=0)


class Reference(Section):
    """The model that the policy's divergence is measured from, and who computes its logprobs.
    docs/reference.md.
    """

    # nobody: no divergence; the learner before each step; the workers of `scorer`
    by: Literal["none", "learner", "pool"] = "learner"
    # a Hugging Face directory with the policy's tokenizer; empty: the model that the run began with
    path: str = ""
    # versions: batch k is measured from version k - k % every; 0: the reference stays the same
    every: int = Field(default=0, ge=0)


PRESETS: dict[str, dict[str, Any]] = {
    "document-000": {
        "loss": "clipped-ratio",
        "average": "tokens",
        "kl": "k1",
        "kl_in": "loss",
        "normalize_advantages": False,
    },
    "document-003": {
        "loss": "grpo",
        "average": "samples",
        "kl": "k3",
        "kl_in": "loss",
        "normalize_advantages": False,
    },
}
"""The losses of docs/design/logprobs.md and docs/design/grpo.md as a whole. The advantages of the
latter are `buffer.advantage: grpo`.
"""


class Learner(Section):
    """Batches in, policy versions out."""

    # of the run's own: all parts follow its versions. Others may join, under other names (`streamrl
    # learner --name`)
    name: str = "lead"
    # sets loss, average, kl, kl_in, normalize_advantages as in a design; docs/losses.md
    preset: Literal["", "document-000", "document-003"] = ""
    # ppo, dapo, cispo, gspo, grpo, clipped-ratio (docs/losses.md), or MODULE:FUNCTION
    loss: Annotated[str, one_of(*LOSSES)] = "ppo"
    # what a token counts in its batch; empty: as the loss's source has it
    average: Literal["", "tokens", "samples", "constant"] = ""
    clip_epsilon: float = Field(default=0.2, gt=0)  # the ratio may go down to 1 - clip_epsilon
    # and up to 1 + clip_epsilon_high; 0: as clip_epsilon
    clip_epsilon_high: float = Field(default=0.0, ge=0)
    correction: Correction = Correction()
    # estimator of the divergence from the reference: k1, k2, k3 (docs/losses.md), or
    # MODULE:FUNCTION
    kl: Annotated[str, one_of(*DIVERGENCES)] = "k3"
    reference: Reference = Reference()
    kl_coefficient: float = Field(default=0.01, ge=0)  # 0: no reference is asked
    # added to the loss, or subtracted from the advantages
    kl_in: Literal["loss", "advantages"] = "loss"
    # rows that a device works on at a time; 0: all of its rows
    micro_batch_rows: int = Field(default=0, ge=0)
    learning_rate: float = Field(default=1e-3, gt=0)  # of AdamW, after the warm-up; then it stays
    warmup_steps: int = Field(default=10, ge=0)  # in which the learning rate rises
    beta1: float = 0.9  # of AdamW
    beta2: float = 0.95  # of AdamW
    weight_decay: float = 0.0  # of AdamW
    max_grad_norm: float = Field(default=1.0, gt=0)  # a longer gradient is cut to it
    normalize_advantages: bool = True  # divide by their standard deviation in the batch
    checkpoint_every: int = Field(default=20, ge=1)  # versions
    keep_checkpoints: int = Field(default=2, ge=1)  # the newest ones; older are deleted
    # in a row, because loss or gradient are not finite; then the run ends
    max_skipped_steps: int = Field(default=10, ge=1)
    # a version computed again that differs: a new lineage of it, or the run ends
    on_divergence: Literal["announce", "stop"] = "announce"
    seed: int = 0  # of the learner's random key
    # announced with each version, with their logprobs; servers are checked against them
    probe_tokens: int = Field(default=64, ge=8)

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, data: Any) -> Any:
        """The settings of the preset, where one is named."""
        if not (isinstance(data, dict) and (preset := PRESETS.get(str(data.get("preset", ""))))):
            return data
        for name, value in preset.items():
            if data.get(name, value) != value:
                raise ValueError(
                    f"{name} {data[name]} is not that of preset {data['preset']} ({value}); leave one of them out"
                )
        return {**data, **preset}

    @property
    def refers(self) -> bool:
        """Does its loss measure a divergence from a reference?"""
        return self.kl_coefficient > 0 and self.reference.by != "none"

    @property
    def pooled(self) -> bool:
        """Does it take the reference's logprobs from the scorer pool?"""
        return self.refers and self.reference.by == "pool"


class Scorer(Section):
    """Batches in, logprobs under the reference out: the pool of `learner.reference.by: pool`."""

    # workers; worker i of n scores the batches i, i + n, i + 2 n, ...
    replicas: int = Field(default=2, ge=1)


class Weights(Section):
    """Where policy versions are kept, and how many."""

    # an fsspec URI, below which each run has a directory; empty: weights/ in the run's directory
    store: str = ""
    # the newest ones, and as many of those to be evaluated; older files are deleted
    keep_versions: int = Field(default=4, ge=2)


class Inference(Section):
    """Policy versions in, tokens out."""

    replicas: int = Field(default=1, ge=0)  # servers of the pool `generation`
    # further pools by name, for envs to choose: how many servers each (docs/pools.md)
    pools: dict[str, Annotated[int, Field(ge=0)]] = {}
    # sequences in flight that a conversation's last server may have more than the least busy one
    stick_margin: int = Field(default=8, ge=0)
    # of the environment that has vllm; empty: .venv-inference, here or beside the environment this
    # runs in, then this one
    python: str = ""
    # the address that servers bind, and that envs reach them at; any but loopback needs an api_key;
    # may be env:NAME
    host: str = "127.0.0.1"
    # 0: any free one; server i takes port + i, counted through the pools
    port: int = Field(default=0, ge=0, le=65535)
    # env:NAME; with it, servers answer nobody who does not send it (what controls a server is its
    # agent's alone in any case)
    api_key: str = ""
    dtype: str = "float32"  # that vLLM computes in
    max_model_len: int = Field(default=128, ge=8)  # tokens
    max_num_seqs: int = Field(default=64, ge=1)  # sequences that a server works on at a time
    kv_cache_gib: int = Field(default=1, ge=1)  # on a CPU
    extra_args: list[str] = []  # passed to vllm as they are
    heartbeat_s: float = Field(default=1.0, gt=0)  # between two records of a server on `servers`
    # |difference| of logprobs beyond which a server is in error
    probe_tolerance: float = Field(default=1e-3, gt=0)

    @property
    def sizes(self) -> dict[str, int]:
        """Servers of each pool, by its name."""
        return {GENERATION: self.replicas, **self.pools}

    def place(self, pool: str, index: int) -> int:
        """The number among all servers of the run of the pool's server `index`. Raises ConfigError
        when there is no such pool.
        """
        if pool not in self.sizes:
            raise ConfigError(f"inference.pools has no {pool!r}; {_meant(pool, self.sizes)}")
        names = list(self.sizes)
        return sum(self.sizes[name] for name in names[: names.index(pool)]) + index

    @property
    def interpreter(self) -> Path:
        """The Python to run vLLM with. An environment that somebody else may have put here, as
        below /tmp, is not looked at.
        """
        if self.python:
            return Path(self.python)
        beside = [
            directory / ".venv-inference" / "bin" / "python"
            for directory in (Path.cwd(), Path(sys.prefix).parent)
        ]
        ours = (
            path
            for path in beside
            if path.exists() and is_ours(path.parents[1]) and is_ours(path.parent)
        )
        return next(ours, Path(sys.executable))


class EvalEnv(Section):
    """Problems of an env that training never poses, and how answers to them are sampled. A sampling
    parameter that is not given is the env's.
    """

    env: str = ""  # of the run; default: the name that this has
    params: dict[str, Any] = {}  # given to the env's constructor, over those it has in training
    seed: int = 0  # of its problems
    problems: int = Field(default=64, ge=1)  # different ones
    samples: int = Field(default=4, ge=1)  # answers a problem
    k: list[Annotated[int, Field(ge=1)]] = [1]  # of pass@k
    # an answer is right by the reward of that name; empty: by the scalar that would train
    reward: str = ""
    pass_at: float = 1.0  # from this reward on
    temperature: float | None = Field(default=None, ge=0)  # 0: always the likeliest token
    # the likeliest tokens that make up so much
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = None  # -1: off
    max_tokens: int | None = Field(default=None, ge=1)  # sampled a turn


class Eval(Section):
    """Policy versions in, how many held-out problems they solve out. On a server of its own, which
    stays on a version until it is done with it.
    """

    # by name; their problems are kept from training for the whole run, so give them before it
    # begins
    envs: dict[str, EvalEnv] = {}
    # versions: 0, 20, 40, ...; 0: only when `streamrl eval` asks
    every: int = Field(default=20, ge=0)

    @property
    def interval(self) -> int:
        """Versions from one evaluation in the run to the next; 0: there are none."""
        return self.every if self.envs else 0


class Sink(Section):
    """Where the orchestrator takes the run's metrics (docs/metrics.md). One without params can be
    given by its name alone.
    """

    # console, jsonl, tensorboard, wandb, mlflow, or MODULE:NAME
    kind: Annotated[str, one_of(*SINKS)]
    # given to it, as `mode: offline` to wandb; secrets belong into its own environment variables
    params: dict[str, Any] = {}


class Orchestrator(Section):
    """When the run ends, and how often a part is started again."""

    target: Target | None = None  # reached, the run ends well
    max_steps: int = Field(default=0, ge=0)  # 0: no limit; reached, the run ends well
    # 0: no limit; from the moment a server is ready; with a target, reached first is a failure
    max_wall_s: float = Field(default=0.0, ge=0)
    restart_limit: int = Field(default=20, ge=0)  # of one part within restart_window_s
    restart_window_s: float = 300.0  # more restarts than that within it end the run
    backoff_s: float = Field(default=0.2, ge=0)  # doubles at each restart in a row, up to 10 s
    # as [jsonl, tensorboard, {kind: wandb, params: {project: digits}}]
    sinks: list[Sink] = [Sink(kind="jsonl")]

    @field_validator("sinks", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return (
            [{"kind": sink} if isinstance(sink, str) else sink for sink in value]
            if isinstance(value, list)
            else value
        )


class Metrics(Section):
    """What every part says of itself over HTTP: /livez, /readyz, /metrics (docs/metrics.md). It can
    only be read, by whoever reaches it.
    """

    serve: bool = True  # pages of health and metrics; false: no server at all
    # that parts listen on; for one part: --metrics-host, or STREAMRL_METRICS_HOST
    host: str = "127.0.0.1"
    # 0: any free one, noted in .targets/ beside the runs; --metrics-port, STREAMRL_METRICS_PORT
    port: int = Field(default=0, ge=0, le=65535)
    # a part whose loop has not turned for so long is not alive: `streamrl up` restarts it
    live_within_s: float = Field(default=60.0, gt=0)
    # the same of learner and scorers, whose loop turns once a batch, and compiles
    step_within_s: float = Field(default=1_800.0, gt=0)


class Topics(Section):
    """The run's topics on the broker."""

    partitions: int = Field(default=1, ge=1)  # of rollouts.<env> and groups.<env>; fixed for a run
    replicas: int = Field(default=1, ge=1)  # copies of each partition
    retention_hours: float = Field(default=168, gt=0)  # records are kept so long, at least
    # a part starts and retention has deleted what it needs: it says so and ends, or expires that
    on_removed: Literal["stop", "expire"] = "stop"
    # more settings for every topic; those that delete (retention.*, cleanup.policy) only for topics
    # with a retention
    config: dict[str, str] = {}

    @property
    def snapshot_s(self) -> float:
        """How often parts write snapshots at least: after seven eighths of the retention a part
        that was killed can still start again.
        """
        return self.retention_hours * 3600 / 8


class Fork(Section):
    """Where a run comes from that `streamrl fork` made, and so where it begins. Written there, not
    by hand.
    """

    run: str  # the parent
    version: int = Field(ge=0)  # of the parent's policy; the fork's first batch has this number
    sha256: str  # of that version
    # tokens that the parent owed each share of a batch (batcher/selection.py)
    balance: dict[str, float] = {}
    stage: int = 0  # of the curriculum, as the parent's batches bring it (batcher/curriculum.py)
    rewards: dict[str, list[float]] = {}  # by env, in the parent's last batches


class RunFile(Section):
    run: str  # its name: of its topics, its directory; lowercase letters, digits and '-'
    # librdkafka settings of an existing cluster, secrets as env:NAME; empty: a local broker in the
    # run's directory
    kafka: dict[str, Any] = {}
    runs_dir: str = "runs"  # the run's directory is <runs_dir>/<run>
    # MODULE:NAME that the run's journals may name besides those in this file, as one that it used
    # before
    imports: list[str] = []
    envs: dict[str, Env]
    buffer: Buffer = Buffer()
    batcher: Batcher = Batcher()
    model: Model = Model()
    learner: Learner = Learner()
    scorer: Scorer = Scorer()
    weights: Weights = Weights()
    inference: Inference = Inference()
    eval: Eval = Eval()
    orchestrator: Orchestrator = Orchestrator()
    metrics: Metrics = Metrics()
    topics: Topics = Topics()
    fork: Fork | None = None

    @field_validator("run")
    @classmethod
    def _run_name(cls, value: str) -> str:
        if not NAME.fullmatch(value):
            raise ValueError(f"{value!r} is not a name of lowercase letters, digits and '-'")
        return value

    @model_validator(mode="after")
    def _works_together(self, info: ValidationInfo) -> RunFile:
        checks = [
            self._env_problems,
            self._pool_problems,
            self._eval_problems,
            self._curriculum_problems,
            self._secret_problems,
        ]
        if info.context != RECORDED:
            checks += [self._size_problems, self._loss_problems]
        for problem in (problem for check in checks for problem in check()):
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
            if env.pass_rate and env.pass_rate.low > env.pass_rate.high:
                yield f"envs.{name}.pass_rate: low {env.pass_rate.low} is above high {env.pass_rate.high}"
        total = sum(env.fraction for env in self.envs.values())
        if total > 1 + 1e-9:
            yield f"envs: the fractions add up to {total:.4g}; at most 1 is possible"
        target = self.orchestrator.target
        if target is not None and target.env not in self.envs:
            yield f"orchestrator.target.env {target.env!r} is not one of the envs: {', '.join(self.envs)}"

    def _eval_problems(self) -> Iterator[str]:
        for name, own in self.eval.envs.items():
            if not NAME.fullmatch(name):
                yield f"eval.envs.{name}: not a name of lowercase letters, digits and '-'"
            if (own.env or name) not in self.envs:
                yield f"eval.envs.{name}: {own.env or name!r} is not one of the envs: {', '.join(self.envs)}; say which with `env`"
            if not own.k or max(own.k) > own.samples:
                yield f"eval.envs.{name}: k is {own.k}, each at most samples, {own.samples}, and one at least"

    def _curriculum_problems(self) -> Iterator[str]:
        chosen, where = self.batcher.curriculum, "batcher.curriculum"
        if chosen.kind == "stages" and not chosen.stages:
            yield f"{where}: kind is stages and there are none"
        if chosen.kind in ("none", "learnability") and chosen.stages:
            yield f"{where}: there are stages and kind is {chosen.kind}; set kind: stages"
        if chosen.kind != "none" and (
            fixed := [name for name, env in self.envs.items() if env.fraction]
        ):
            yield f"envs.{fixed[0]}.fraction: {where} says the fractions; leave it out"
        if chosen.kind == "learnability" and chosen.least * len(self.envs) > 1:
            yield f"{where}.least {chosen.least} of each of {len(self.envs)} envs is more than a batch"
        for index, stage in enumerate(chosen.stages):
            yield from (
                f"{where}.stages.{index}{problem}"
                for problem in self._stage_problems(stage, index == len(chosen.stages) - 1)
            )
        ends = [stage.until_batch for stage in chosen.stages if stage.until_batch]
        if ends != sorted(set(ends)):
            yield f"{where}.stages: until_batch has to grow from stage to stage, not {ends}"

    def _stage_problems(self, stage: Stage, last: bool) -> Iterator[str]:
        total, ends = sum(stage.fractions.values()), bool(stage.until_batch or stage.until)
        for name in stage.fractions:
            if name not in self.envs:
                yield f".fractions: no env {name!r}; {_meant(name, self.envs)}"
        if not 0 < total <= 1 + 1e-9:
            yield f".fractions add up to {total:.4g}; above 0 and at most 1 is possible"
        if ends == last:
            yield (
                ": nothing follows the last stage; leave its end out"
                if last
                else ": until_batch or until has to say when the next one begins"
            )
        if stage.until and not (
            stage.fractions.get(stage.until.env)
            or (stage.until.env in self.envs and total < 1 - 1e-9)
        ):
            yield f".until: {stage.until.env!r} has no share of the batches of this stage, so its reward would not change"

    def _pool_problems(self) -> Iterator[str]:
        for pool in self.inference.pools:
            if pool == GENERATION:
                yield f"inference.pools.{pool}: the servers of pool {GENERATION} are inference.replicas"
            if not NAME.fullmatch(pool):
                yield f"inference.pools.{pool}: not a name of lowercase letters, digits and '-'"
        for name, env in self.envs.items():
            if env.pool not in self.inference.sizes:
                yield f"envs.{name}.pool: inference.pools has no {env.pool!r}; {_meant(env.pool, self.inference.sizes)}"

    @property
    def max_samples(self) -> int:
        """The most answers to one prompt that a part of the run asks a server for."""
        groups = [self.buffer_of(name).group_size for name in self.envs]
        return max([1, *groups, *(env.samples for env in self.eval.envs.values())])

    def buffer_of(self, env: str) -> Buffer:
        """The rules of the buffer for an env: its own, and for the rest those of all."""
        return self.buffer.model_copy(update=self.envs[env].buffer.model_dump(exclude_none=True))

    def _size_problems(self) -> Iterator[str]:
        batcher, budget = self.batcher, self.batcher.total_token_budget
        yield from self._group_problems("buffer", self.buffer)
        for name, env in self.envs.items():
            if env.buffer != EnvBuffer():
                yield from self._group_problems(f"envs.{name}.buffer", self.buffer_of(name))
        compared = {self.buffer_of(name).advantage in NORMALIZED_ADVANTAGES for name in self.envs}
        if len(compared) > 1 and not batcher.advantage:
            yield f"batcher.advantage: of the envs' advantages some need normalize and some none ({', '.join(NORMALIZED_ADVANTAGES)} do); say which"
        if batcher.eta >= 0 and batcher.admission == "demand":
            yield "batcher.eta is set, but batcher.admission is demand, which does not use it; set admission: capacity"
        if batcher.rows * batcher.max_seq_len < budget:
            yield f"batcher.row_count {batcher.rows} x max_seq_len {batcher.max_seq_len} is less than total_token_budget {budget}"
        if batcher.rows % batcher.processes:
            yield f"batcher.row_count {batcher.rows} cannot be divided among batcher.processes {batcher.processes}; give a multiple of it"
        if batcher.balance == "flops" and not self.model.hidden_size:
            yield f"batcher.balance flops needs model.hidden: hidden_size in {self.model.path}/config.json"
        if self.model.max_seq_len > batcher.max_seq_len:
            yield f"model.max_seq_len {self.model.max_seq_len} is larger than batcher.max_seq_len {batcher.max_seq_len}: rollouts could not be packed"

    def _group_problems(self, where: str, buffer: Buffer) -> Iterator[str]:
        """What speaks against the rules of the buffer, those for all or for an env, beside the
        batcher's.
        """
        batcher, budget = self.batcher, self.batcher.total_token_budget
        if batcher.lookahead > buffer.max_age:
            yield f"batcher.lookahead is {batcher.lookahead} but {where}.max_age is {buffer.max_age}: need 0 <= lookahead <= max_age"
        if batcher.eta > buffer.max_age:
            yield f"batcher.eta is {batcher.eta} but {where}.max_age is {buffer.max_age}: what is begun for so late a batch would be too old for it"
        if buffer.min_group_size > buffer.group_size:
            yield f"{where}.min_group_size {buffer.min_group_size} is larger than {where}.group_size {buffer.group_size}"
        if buffer.min_group_size == 1 and buffer.advantage in RELATIVE_ADVANTAGES:
            alone = f"{buffer.advantage} compares the rollouts of a group, so one alone has advantage 0 and only fills the batch"
            yield f"{where}.min_group_size is 1, and {alone}; set it to 2 or more, or advantage: reinforce++"
        if buffer.remember_versions <= buffer.max_age:
            yield f"buffer.remember_versions {buffer.remember_versions} must exceed {where}.max_age {buffer.max_age}"
        group = f"{buffer.group_size} rollouts of model.max_seq_len {self.model.max_seq_len} tokens"
        if buffer.max_window_tokens < buffer.group_size * self.model.max_seq_len:
            yield f"buffer.max_window_tokens {buffer.max_window_tokens} does not hold a group of {group}: it would never be complete"
        if budget < buffer.min_group_size * 2:
            yield f"batcher.total_token_budget {budget} holds no group of {buffer.min_group_size} rollouts"
        half_row = batcher.max_seq_len // 2 + 1  # no two sequences of so many tokens share a row
        large = (
            buffer.group_size > batcher.rows
            and buffer.group_size * half_row <= budget <= batcher.rows * batcher.max_seq_len
        )
        if large and half_row <= self.model.max_seq_len <= batcher.max_seq_len:
            fits = f"{buffer.group_size} rollouts of {half_row} tokens need a row of {batcher.max_seq_len} each, and there are {batcher.rows}"
            yield f"batcher.row_count: {fits}: such groups could not be trained on; set it to {buffer.group_size}"
        # if fewer tokens are chosen, a process might go without
        longest = (batcher.processes + buffer.group_size - 1) * self.model.max_seq_len
        if batcher.processes > 1 and budget < longest:
            one_each = f"{batcher.processes} processes and groups of {buffer.group_size} rollouts of {self.model.max_seq_len} tokens need {longest}"
            yield f"batcher.total_token_budget {budget} does not give every process a rollout for certain: {one_each}"

    def _loss_problems(self) -> Iterator[str]:
        learner, correction = self.learner, self.learner.correction
        if learner.loss == "dapo" and learner.clip_epsilon_high <= learner.clip_epsilon:
            yield f"learner.loss: dapo is ppo unless clip_epsilon_high is above clip_epsilon {learner.clip_epsilon}; its paper has 0.28 and 0.2"
        if (
            correction.weights != "none"
            and correction.old_policy == "bypass"
            and learner.loss in RATIO_LOSSES
        ):
            ratio = f"the ratio of {learner.loss} weighs by the policy that sampled already"
            yield f"learner.correction.weights: {ratio}; set old_policy: decoupled, or learner.loss: grpo, which has no ratio"
        if correction.weight_min >= correction.weight_max:
            yield f"learner.correction.weight_min {correction.weight_min} must be below weight_max {correction.weight_max}"
        max_age = max((self.buffer_of(name).max_age for name in self.envs), default=0)
        if (
            learner.loss == "grpo"
            and correction.weights == "none"
            and correction.reject == "none"
            and max_age
        ):
            how = "set buffer.max_age: 0, or learner.correction.weights: token"
            yield f"learner.loss: grpo has no ratio, and with buffer.max_age {max_age} it would train on old rollouts uncorrected; {how}"
        least = 1.0 if correction.reject == "geometric" else 0.0
        if correction.reject != "none" and correction.reject_above <= least:
            yield f"learner.correction.reject is {correction.reject}: set reject_above, the limit, above {least:g}"
        reference = learner.reference
        if reference.path and reference.every:
            yield f"learner.reference: path {reference.path} is a fixed reference, every {reference.every} one that follows; leave one of them out"
        if reference.by == "none" and (reference.path or reference.every):
            yield "learner.reference.by is none: nobody would ask the reference that path or every names; set by to learner or pool"
        if reference.by == "pool" and not learner.kl_coefficient:
            yield "learner.kl_coefficient is 0: nobody would read what the pool scores; raise it, or set learner.reference.by: none"

    def _secret_problems(self) -> Iterator[str]:
        yield from exposed(self.model_dump(mode="json"))
        for argument in self.inference.extra_args:
            option = argument.partition("=")[0]
            if option.startswith("-") and is_secret(option):
                instead = (
                    "set inference.api_key"
                    if "api" in option
                    else "set the variable that vLLM has for it"
                )
                yield f"inference.extra_args: {option} would show in the process list; {instead}"
        for name in self.kafka:
            if not _KAFKA.fullmatch(name):
                yield f"kafka.{name} is not a setting that a run file may have: it loads programs, or has nothing to do with reaching a cluster"
        if not is_loopback(self.inference.host) and not self.inference.api_key:
            yield f"inference.host {self.inference.host} can be reached from other machines: set inference.api_key"

    @property
    def imported(self) -> frozenset[str]:
        """MODULE:NAME of everything in this file that stands for Python code."""
        return frozenset(imports_in(self.model_dump(mode="json", exclude={"kafka"})))

    @property
    def directory(self) -> Path:
        """What the run leaves behind lies here."""
        return Path(self.runs_dir).absolute() / self.run

    @property
    def store(self) -> str:
        """Where the run's weights are written, as a URI (fsspec's: nothing is percent-encoded).
        Runs that share a store do not meet in it.
        """
        return (
            f"{self.weights.store.rstrip('/')}/{self.run}"
            if self.weights.store
            else f"file://{self.directory / 'weights'}"
        )

    def to_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), indent=1)


def _meant(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"


def is_loopback(host: str) -> bool:
    """Can nobody outside this machine reach it? A name, or a reference, may be any address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def load(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> RunFile:
    """Read a run file; `overrides` are `learner.learning_rate=1e-3`, parsed as YAML. Raises
    ConfigError.
    """
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


def recorded(data: dict[str, Any], where: str) -> RunFile:
    """A run file that a run was made with. Sizes and losses that are refused by now must not keep
    its records from being read.
    """
    return parse(data, where, RECORDED)


def parse(data: dict[str, Any], where: str = "run file", context: str = "") -> RunFile:
    try:
        return RunFile.model_validate(data, context=context)
    except ValidationError as error:
        raise ConfigError(
            f"{where}: " + "; ".join(_explain(problem) for problem in error.errors())
        ) from None


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
    return f"unknown key {path!r}; " + (
        f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(valid)}"
    )


def _section(path: list[Any]) -> type[BaseModel]:
    """The section at a path of keys, of envs and of places in lists."""
    found: Any = RunFile
    for key in path:
        found = (
            found.model_fields[key].annotation
            if hasattr(found, "model_fields")
            else get_args(found)[-1]
        )
        if get_origin(found) is UnionType:
            found = get_args(found)[0]  # the other one is None
    return found
