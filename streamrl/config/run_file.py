"""The run file: every setting of a run on one page, with its unit and default. Each part gets its
own frozen section.

Unknown keys, wrong types and settings that cannot work together (`checks.py`) raise a ConfigError
that names the key, and the nearest valid one.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Sequence
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

from streamrl.config import checks, presets
from streamrl.config.choices import (
    ADMISSIONS,
    ADVANTAGES,
    BATCH_STAGES,
    CURRICULA,
    DIVERGENCES,
    LOSSES,
    NAME,
    SINKS,
    meant,
)
from streamrl.config.ownership import is_ours
from streamrl.config.plugins import imports_in
from streamrl.config.topology import GENERATION
from streamrl.errors import ConfigError, one_line, unknown

LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RECORDED = "recorded"  # Context of a validation: the run exists already.
RESOLVED = "resolved"  # Context of a validation: the file has every setting, as a run keeps it.
RUN_FILE = "run.yaml"  # Name of the resolved run file in the run's directory.
GONE = {"inference.stick_margin": 8, "orchestrator.restart_window_s": 300.0}
"""Settings of earlier versions, and the value that always applies now. Runs of those versions have
them in their run file and in their log.
"""


def one_of(*shipped: str) -> AfterValidator:
    """Accepts a shipped name, or MODULE:NAME, which is imported where it is used."""

    def check(name: str) -> str:
        if name in shipped or ":" in name:
            return name
        raise ValueError(unknown(name, shipped))

    return AfterValidator(check)


def known_preset(name: str) -> str:
    """Accepts the name of a preset, or nothing."""
    if name and name not in presets.PRESETS:
        raise ValueError(unknown(name, presets.PRESETS))
    return name


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RewardSetting(Section):
    """A reward function of a run."""

    kind: str  # `math-verify`, `judge`, FILE.py:NAME or MODULE:NAME.
    params: dict[str, Any] = {}  # Arguments of the constructor, if `kind` names a class.


class PassRate(Section):
    """Filter by difficulty: a problem of a finite set rests for some epochs when the policy nearly
    always or nearly never solves it (docs/data.md).
    """

    # A problem rests when a smaller share of its last visits' rollouts passed.
    low: float = Field(default=0.0, ge=0, le=1)
    # A problem rests when a larger share of its last visits' rollouts passed.
    high: float = Field(default=1.0, ge=0, le=1)
    # Number of last visits that are counted. A problem with fewer visits is posed.
    visits: int = Field(default=1, ge=1)
    rest_epochs: int = Field(default=1, ge=1)  # Number of epochs for which a problem rests.
    # Name of the reward that decides, before weights. Empty: the scalar that trains.
    reward: str = ""
    at_least: float = 1.0  # A rollout passes with this reward or a higher one.


class EnvBuffer(Section):
    """Rules of the buffer for one env. What is not given is as in `buffer`."""

    group_size: int | None = Field(default=None, ge=1)  # Replaces buffer.group_size.
    min_group_size: int | None = Field(default=None, ge=1)  # Replaces buffer.min_group_size.
    max_age: int | None = Field(default=None, ge=0)  # Replaces buffer.max_age.
    advantage: Annotated[str, one_of(*ADVANTAGES)] | None = None  # Replaces buffer.advantage.
    zero_advantage: Literal["keep", "filter"] | None = None  # Replaces buffer.zero_advantage.
    group_wait_s: float | None = Field(default=None, gt=0)  # Replaces buffer.group_wait_s.


class Sessions(Section):
    """Agents work on this env's problems through the gateway; each session becomes a rollout."""

    # Names of the rewards that a rollout waits for. Empty: it waits for one, whatever its name.
    rewards: list[str] = []
    # A session without a call for so long is ended. It fails unless its rewards are there.
    idle_s: float = Field(default=3_600.0, gt=0)
    # A session that has ended fails if its rewards are not there after so long.
    reward_wait_s: float = Field(default=3_600.0, gt=0)
    max_open: int = Field(default=1_024, ge=1)  # Limit of sessions that have not ended.


class EnvLoss(Section):
    """How much each loss counts at the sampled tokens of an env's rollouts (docs/losses.md). A turn
    may say its own weights.
    """

    # Weight of the policy gradient, which is learner.loss.
    policy_gradient: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    # Weight of the cross entropy, as in supervised fine-tuning.
    cross_entropy: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    # Weight of the divergence from the teacher (learner.teacher), as in distillation.
    teacher_kl: float = Field(default=0.0, ge=0, allow_inf_nan=False)


class Env(Section):
    """An environment of the run: its problems, its sampling and its share of a batch."""

    # A shipped env, FILE.py:CLASS, MODULE:CLASS, verifiers:FILE.py or verifiers:MODULE. With
    # `python`: verifiers:TASKSET or FILE.py. Empty: the shipped env of the name that this section
    # has.
    kind: str = ""
    params: dict[str, Any] = {}  # Arguments of the env's constructor, or of its load_environment.
    # Share of each batch's tokens. Envs with 0 divide what the fractions leave by availability.
    fraction: float = Field(default=0.0, ge=0, le=1)
    # Number of processes; replica i of n poses every n-th problem. 0: rollouts come from outside.
    replicas: int = Field(default=1, ge=0)
    seed: int = 0  # Seed of the problems and of their order.
    pool: str = GENERATION  # Pool of inference servers that gets all requests of this env.
    temperature: float = Field(default=1.0, gt=0)  # Sampling temperature.
    # Nucleus sampling. It has to be 1 in training, where only the temperature is reproduced.
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = -1  # Samples from the k likeliest tokens. It has to be -1 (off) in training.
    max_tokens: int = Field(default=16, ge=1)  # Limit of sampled tokens in one turn.
    # Limit of open groups, on top of what demand asks for.
    max_groups_in_flight: int = Field(default=64, ge=1)
    # Limit of groups begun in a second. 0: no limit but demand.
    max_groups_per_s: float = Field(default=0.0, ge=0)
    # Limit of sampled turns in one rollout. At the limit it ends as truncated.
    max_turns: int = Field(default=8, ge=1)
    # Time limit of a whole rollout. At the limit it ends as truncated.
    rollout_timeout_s: float = Field(default=600.0, gt=0)
    # Time limit of one call of the env's code. A late reply truncates the rollout, a late reward
    # fails it.
    env_timeout_s: float = Field(default=30.0, gt=0)
    pass_rate: PassRate | None = None  # Leaves problems out by how often they are solved.
    # Reward functions beside the env's own, by the name of their reward.
    rewards: dict[str, RewardSetting] = {}
    # Weights of named rewards in the scalar that trains. A reward that is not named here has weight
    # 1.
    reward_weights: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = {}
    # How the policy calls tools of verifiers' envs and of agents: json
    # (<tool_call>{...}</tool_call>), brackets, or, for verifiers' envs, MODULE:FUNCTION.
    tool_syntax: str = "json"
    # Time limit of one request to an inference server.
    timeout_s: float = Field(default=60.0, gt=0)
    # Servers that a request is tried on before its rollout is published as failed.
    attempts: int = Field(default=3, ge=1)
    # Rules of the buffer for this env. What is not given is as in `buffer`.
    buffer: EnvBuffer = EnvBuffer()
    # Whether each model call is recorded as it ends, so that a replica that dies is followed by one
    # that goes on with its conversations.
    record_turns: bool = False
    loss: EnvLoss = EnvLoss()  # How much each loss counts at this env's tokens.
    # Agents that sample through the gateway. It takes `replicas: 0`, or `python`. Empty: there are
    # none.
    sessions: Sessions | None = None
    # Path of the Python of an environment without streamrl, in which the env's processes run and
    # sample through the gateway (docs/env-servers.md). Empty: they run in this one.
    python: str = ""
    # Environment variables that these processes are given, beside those of the system.
    variables: list[str] = []

    @model_validator(mode="before")
    @classmethod
    def _server_has_sessions(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("python") and value.get("sessions") is None:
            return {**value, "sessions": {}}
        return value

    @property
    def producers(self) -> int:
        """Number of its processes that publish rollouts. Of sessions, the assembler does."""
        return 0 if self.sessions else self.replicas


class Buffer(Section):
    """Rollouts in, scored groups out."""

    group_size: int = Field(default=8, ge=1)  # Rollouts of one problem.
    # A group that would expire or has waited too long closes with at least so many rollouts.
    min_group_size: int = Field(default=2, ge=1)
    # Staleness limit: a rollout trains at most so many policy versions after its oldest token.
    max_age: int = Field(default=1, ge=0)
    # Number of processes; fixed for a run. Shard i of n takes every n-th partition of
    # rollouts.<env>.
    shards: int = Field(default=1, ge=1)
    # Limit of the tokens held for one env, and of 64 times as many bytes. Beyond it the oldest
    # groups close. Each shard has an equal part of it.
    max_window_tokens: int = Field(default=4_000_000, ge=1)
    # When a larger share of an env's last 1,000 rollouts is invalid, the env is not read for 30 s.
    # 1: never.
    max_invalid_frac: float = Field(default=0.5, ge=0, le=1)
    # rloo, grpo, dr-grpo, reinforce++, reinforce++-baseline, maxrl, or MODULE:FUNCTION.
    advantage: Annotated[str, one_of(*ADVANTAGES)] = "rloo"
    # Whether groups whose advantages are all 0 are trained on, or left out so that others fill the
    # batch.
    zero_advantage: Literal["keep", "filter"] = "keep"
    # A group closes at its minimum size when no rollout has come for so long. After ten times as
    # long it closes below its minimum, with nothing.
    group_wait_s: float = Field(default=60.0, gt=0)
    # Number of policy versions for which ids of rollouts and of closed groups are remembered.
    remember_versions: int = Field(default=16, ge=1)


class Target(Section):
    """A mean reward of an env over its last batches."""

    env: str  # Name of the env in the run file.
    reward: float  # Mean reward that has to be reached.
    batches: int = Field(default=20, ge=1)  # Number of last batches that the mean is taken over.


class Stage(Section):
    """A stage of a curriculum."""

    # Share of each batch's tokens by env, as in `envs.<name>.fraction`.
    fractions: dict[str, Annotated[float, Field(ge=0, le=1)]]
    # Number of the batch with which the next stage begins. 0: no number ends this stage.
    until_batch: int = Field(default=0, ge=0)
    until: Target | None = None  # The next stage begins after the batch that reaches this target.


class Curriculum(Section):
    """How much of a batch each env gets, as training goes on (docs/data.md)."""

    # none (envs.<name>.fraction), stages, learnability (r (1 - r) of the mean reward r), or
    # MODULE:FUNCTION.
    kind: Annotated[str, one_of(*CURRICULA)] = "none"
    stages: list[Stage] = []  # The stages, in their order.
    # Number of last batches that an env's mean reward is taken over, for learnability and your own
    # function.
    batches: int = Field(default=10, ge=1)
    # Fraction that every env keeps under learnability.
    least: float = Field(default=0.05, ge=0, le=1)


class Batcher(Section):
    """Groups in, batches out."""

    # Tokens of a batch without padding, prompts included.
    total_token_budget: int = Field(default=16_384, ge=1)
    max_seq_len: int = Field(default=2_048, ge=2)  # Tokens of a row.
    # Rows of every batch. 0: enough for the token budget and a tenth more.
    row_count: int = Field(default=0, ge=0)
    # Number of learner devices. Each gets as many rows as the others, and at least one rollout.
    processes: int = Field(default=1, ge=1)
    # What every process gets an equal amount of: tokens, flops, or MODULE:FUNCTION
    # (batcher/balance.py).
    balance: str = "tokens"
    # Batch k is built when version k - lookahead is announced.
    lookahead: int = Field(default=0, ge=0)
    # When work is asked for: demand (just in time), capacity (AReaL), or MODULE:FUNCTION
    # (docs/admission.md).
    admission: Annotated[str, one_of(*ADMISSIONS)] = "demand"
    # Admission by capacity: versions that a rollout's batch may be ahead of the policy that begins
    # it. -1: buffer.max_age.
    eta: int = Field(default=-1, ge=-1)
    # When an env cannot meet its share: block waits for it, spill lets the others fill in.
    on_shortage: Literal["block", "spill"] = "block"
    # Normalisation of advantages over the batch: none, normalize, or MODULE:FUNCTION. Empty: what
    # buffer.advantage needs.
    advantage: Annotated[str, one_of("", *BATCH_STAGES)] = ""
    curriculum: Curriculum = Curriculum()  # How the shares of the envs change as training goes on.
    # A shortage that lasts longer than this is reported.
    shortage_after_s: float = Field(default=2.0, gt=0)

    @property
    def rows(self) -> int:
        """Rows of every batch of the run."""
        enough = -(-self.total_token_budget * 11 // (10 * self.max_seq_len)) + 1
        return self.row_count or -(-enough // self.processes) * self.processes


class TinyModel(Section):
    """A small Llama with random weights that streamrl makes, for machines without a hub."""

    layers: int = Field(default=2, ge=1)  # Transformer blocks.
    hidden: int = Field(default=128, ge=8)  # Width, a multiple of head_dim.
    head_dim: int = Field(default=32, ge=8)  # Width of an attention head.
    # Characters of the vocabulary, one token each, after the special tokens.
    alphabet: str = "0123456789+="
    # Chat template: plain, or turns, where a token for its role precedes each message.
    chat: Literal["plain", "turns"] = "plain"
    seed: int = 0  # Seed of the initial weights.


class Model(Section):
    """The model that is trained (docs/models.md)."""

    path: str = ""  # Directory of a Hugging Face model. Empty: the tiny model is made.
    tiny: TinyModel = TinyModel()  # The tiny model.
    # Positions that the model is built for: the most tokens of one rollout.
    max_seq_len: int = Field(default=128, ge=2)
    # hidden_size of the model at `path`. It is needed where batcher.balance is flops.
    hidden: int = Field(default=0, ge=0)

    @property
    def hidden_size(self) -> int:
        """hidden_size of the run's model; 0 if it is not known."""
        return self.hidden if self.path else self.tiny.hidden


class Correction(Section):
    """Corrections for rollouts that an older version or another engine sampled. The settings are
    independent of each other; docs/losses.md has the formulas.
    """

    # What the ratio is measured from: bypass is the policy that sampled, decoupled the one a step
    # begins with.
    old_policy: Literal["bypass", "decoupled"] = "bypass"
    # Importance weights, by token or by rollout.
    weights: Literal["none", "token", "sequence"] = "none"
    # Whether a weight above weight_max is cut down to it, or its token (also below weight_min)
    # leaves the batch.
    beyond: Literal["truncate", "mask"] = "truncate"
    # Smallest weight that trains under `beyond: mask`.
    weight_min: float = Field(default=0.0, ge=0)
    weight_max: float = Field(default=2.0, gt=0)  # Largest weight.
    # Distance from the policy that sampled beyond which nothing trains.
    reject: Literal["none", "k1", "k2", "k3", "geometric"] = "none"
    # Whether the distance of a token or the mean of its rollout counts. geometric always takes the
    # rollout.
    reject_by: Literal["token", "sequence"] = "token"
    # Limit of that distance: of |k1|, k2, k3 in nats; of geometric as a ratio above 1, whose
    # inverse is the lower limit.
    reject_above: float = Field(default=0.0, ge=0)


class Reference(Section):
    """The model that the policy's divergence is measured from, and who computes its logprobs
    (docs/reference.md).
    """

    # Who computes the reference's logprobs: none (there is no divergence), the learner before each
    # step, or the pool of `scorer`.
    by: Literal["none", "learner", "pool"] = "learner"
    # Hugging Face directory with the policy's tokenizer. Empty: the model that the run began with.
    path: str = ""
    # Batch k is measured from policy version k - k % every. 0: the reference stays the same.
    every: int = Field(default=0, ge=0)


class Lora(Section):
    """Adapters: small matrices beside the linear layers of the model, which itself stays as it is
    (docs/models.md).
    """

    rank: int = Field(default=16, ge=1, le=512)  # Rank of an adapter's two matrices.
    # Their product is multiplied by alpha / rank.
    alpha: float = Field(default=32.0, gt=0)
    # Linear layers that have an adapter.
    targets: Annotated[list[LoraTarget], Field(min_length=1)] = [*get_args(LoraTarget)]


class Mesh(Section):
    """How the devices of the learner divide its work (docs/batches.md). The product of the sizes is
    the number of devices. Where JAX knows the nodes, it is that of each node, and each node has a
    copy of the parameters.
    """

    # Number of devices that divide rows, parameters and optimizer. -1: all that are left.
    data: int = Field(default=-1, ge=-1)
    # Number of copies of the parameters. Rows are divided among the copies, too.
    replica: int = Field(default=1, ge=1)
    # Number of devices that divide the heads and the MLP of every layer. It divides the number of
    # key-value heads.
    model: int = Field(default=1, ge=1)
    # Number of devices that divide the tokens of every row. It divides batcher.max_seq_len.
    context: int = Field(default=1, ge=1)

    @field_validator("data")
    @classmethod
    def _some(cls, value: int) -> int:
        if value == 0:
            raise ValueError("0 devices divide nothing; -1 takes all that are left")
        return value


class Teacher(Section):
    """A model that the policy is distilled from. The pool of `scorer` computes its logprobs of each
    batch (docs/reference.md).
    """

    # Hugging Face directory with the policy's tokenizer. Empty: there is no teacher.
    path: str = ""
    # Estimator of the divergence from the teacher: k1, k2, k3 (docs/losses.md), or MODULE:FUNCTION.
    kl: Annotated[str, one_of(*DIVERGENCES)] = "k2"


class Learner(Section):
    """Batches in, policy versions out."""

    # Name of the run's own learner, whose versions all parts follow. Others join with `streamrl
    # learner --name`.
    name: str = "lead"
    # The settings of a paper or a design as a whole: grpo, dr-grpo, dapo, gspo, rloo, reinforce++,
    # document-000, document-003 (docs/losses.md). What the run file says itself stays.
    preset: Annotated[str, AfterValidator(known_preset)] = ""
    # ppo, dapo, cispo, gspo, grpo, clipped-ratio (docs/losses.md), or MODULE:FUNCTION.
    loss: Annotated[str, one_of(*LOSSES)] = "ppo"
    # How the loss is averaged: over tokens, over samples, or by a constant. Empty: as the paper of
    # the loss does.
    average: Literal["", "tokens", "samples", "constant"] = ""
    clip_epsilon: float = Field(default=0.2, gt=0)  # The ratio is clipped below 1 - clip_epsilon.
    # The ratio is clipped above 1 + clip_epsilon_high. 0: clip_epsilon.
    clip_epsilon_high: float = Field(default=0.0, ge=0)
    # Corrections for rollouts of an older version or another engine.
    correction: Correction = Correction()
    # Estimator of the divergence from the reference: k1, k2, k3 (docs/losses.md), or
    # MODULE:FUNCTION.
    kl: Annotated[str, one_of(*DIVERGENCES)] = "k3"
    reference: Reference = Reference()  # The reference model.
    # The teacher of the tokens with a weight `teacher_kl` (envs.<name>.loss).
    teacher: Teacher = Teacher()
    # Weight of the divergence. 0: no reference is loaded or asked, and this is the default where
    # `model.path` is given.
    kl_coefficient: float = Field(default=0.01, ge=0)
    # Whether the divergence is added to the loss or subtracted from the advantages.
    kl_in: Literal["loss", "advantages"] = "loss"
    # Trains adapters instead of the whole model. A version is then an adapter. Empty: the whole
    # model is trained.
    lora: Lora | None = None
    # Rows that a device computes at a time. 0: all of its rows.
    micro_batch_rows: int = Field(default=0, ge=0)
    mesh: Mesh = Mesh()  # How several devices divide the work.
    # Number format that the model computes in: float32, or bf16 (bfloat16). Parameters, gradients
    # and optimizer are float32 in any case.
    precision: Literal["float32", "bf16"] = "float32"
    # What the backward pass computes again instead of keeping it in memory: none, or full (each
    # layer, from its input).
    remat: Literal["none", "full"] = "none"
    # Tokens of a row whose logits are in memory at a time. 0: all of them.
    logprob_chunk: int = Field(default=0, ge=0)
    # adamw, lion, adopt, cautious (AdamW that leaves out what goes against the gradient), or muon:
    # Muon for matrices, AdamW for the rest, at one learning rate.
    optimizer: Literal["adamw", "lion", "adopt", "cautious", "muon"] = "adamw"
    # Learning rate after the warm-up. It is 1e-6 where `model.path` is given.
    learning_rate: float = Field(default=1e-3, gt=0)
    # Steps in which the learning rate rises, from learning_rate / warmup_steps on.
    warmup_steps: int = Field(default=10, ge=0)
    # The same as a share of schedule_steps. 0: warmup_steps says it.
    warmup_fraction: float = Field(default=0.0, ge=0, lt=1)
    # The learning rate after the warm-up: it stays, or falls to min_learning_rate in a line or as
    # half a cosine.
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    # Steps, the warm-up's included, in which it falls. 0: orchestrator.max_steps, if there is one.
    schedule_steps: int = Field(default=0, ge=0)
    # Learning rate at the end of schedule_steps, and from then on.
    min_learning_rate: float = Field(default=0.0, ge=0)
    beta1: float = 0.9  # Decay of the optimizer's first moment. Muon's own momentum is 0.95.
    beta2: float = 0.95  # Decay of the optimizer's second moment.
    # Weight decay. adamw decays all parameters, the others neither norms nor embeddings.
    weight_decay: float = 0.0
    max_grad_norm: float = Field(default=1.0, gt=0)  # Gradients are clipped to this global norm.
    # Whether advantages are divided by their standard deviation in the batch.
    normalize_advantages: bool = True
    checkpoint_every: int = Field(default=20, ge=1)  # Versions from one checkpoint to the next.
    keep_checkpoints: int = Field(default=2, ge=1)  # Number of newest checkpoints that are kept.
    # Limit of consecutive steps that are skipped because loss or gradient is not finite. Then the
    # run ends.
    max_skipped_steps: int = Field(default=10, ge=1)
    # When a version computed again differs: announce a new lineage of it, or stop the run.
    on_divergence: Literal["announce", "stop"] = "announce"
    seed: int = 0  # Seed of the learner's random key.
    # Tokens announced with each version with their logprobs. Servers are checked against them.
    probe_tokens: int = Field(default=64, ge=8)

    @property
    def warmup(self) -> int:
        """Steps of the warm-up."""
        return round(self.warmup_fraction * self.schedule_steps) or self.warmup_steps

    @property
    def uses_reference(self) -> bool:
        """Whether the loss measures a divergence from a reference."""
        return self.kl_coefficient > 0 and self.reference.by != "none"

    @property
    def pool_scores_reference(self) -> bool:
        """Whether the reference's logprobs come from the scorer pool."""
        return self.uses_reference and self.reference.by == "pool"

    @property
    def uses_scorer_pool(self) -> bool:
        """Whether logprobs of the reference or of a teacher come from the scorer pool."""
        return self.pool_scores_reference or bool(self.teacher.path)


class Scorer(Section):
    """Batches in, logprobs under the reference out: the pool of `learner.reference.by: pool`."""

    # Number of workers. Worker i of n scores the batches i, i + n, i + 2 n, ...
    replicas: int = Field(default=2, ge=1)


class Gateway(Section):
    """The servers through which agents sample: `streamrl gateway`."""

    replicas: int = Field(default=1, ge=1)  # Number of processes.
    host: str = "127.0.0.1"  # Address that replicas listen on.
    # Port of replica 0; the others have the next ones. 0: any free port, which their logs say.
    port: int = Field(default=8700, ge=0, le=65535)
    # Opens sessions, and signs their keys: env:NAME, the variable that has it. It is needed where
    # `host` is not loopback.
    api_key: str = ""
    max_body_mb: float = Field(default=8.0, gt=0)  # Limit of a request, in megabytes.
    max_calls: int = Field(default=1_024, ge=1)  # Limit of the calls of a session.


class Weights(Section):
    """Where policy versions are kept, and how many."""

    # fsspec URI below which each run has a directory. Empty: weights/ in the run's directory.
    store: str = ""
    # Number of newest versions that are kept, and of versions to be evaluated. Older files are
    # deleted.
    keep_versions: int = Field(default=4, ge=2)


class Inference(Section):
    """Policy versions in, tokens out."""

    replicas: int = Field(default=1, ge=0)  # Servers of the pool `generation`.
    # Further pools that envs can choose, with the number of their servers (docs/pools.md).
    pools: dict[str, Annotated[int, Field(ge=0)]] = {}
    # Python of the environment with vllm. Empty: .venv-inference here or beside the environment
    # that this runs in, otherwise this Python.
    python: str = ""
    # Address that servers bind and envs reach, or env:NAME. Any address but loopback needs an
    # api_key.
    host: str = "127.0.0.1"
    # Port of server 0; server i has port + i, counted through the pools. 0: any free port.
    port: int = Field(default=0, ge=0, le=65535)
    # env:NAME of the key that every request has to carry. What controls a server is its agent's
    # alone in any case.
    api_key: str = ""
    dtype: str = "float32"  # Data type that vLLM computes in.
    max_model_len: int = Field(default=128, ge=8)  # Tokens of the longest sequence.
    max_num_seqs: int = Field(default=64, ge=1)  # Sequences that a server works on at a time.
    # Adapters that a server computes with at a time (learner.lora). Requests for further versions
    # wait.
    max_adapters: int = Field(default=4, ge=1)
    kv_cache_gib: int = Field(default=1, ge=1)  # Size of the KV cache on a CPU, in GiB.
    extra_args: list[str] = []  # Further arguments of `vllm serve`, passed as they are.
    # Time between two records of a server on `servers`.
    heartbeat_s: float = Field(default=1.0, gt=0)
    # A server is in error when its logprobs differ from the learner's by more than this.
    probe_tolerance: float = Field(default=1e-3, gt=0)

    @property
    def sizes(self) -> dict[str, int]:
        """Servers of each pool, by its name."""
        return {GENERATION: self.replicas, **self.pools}

    def place(self, pool: str, index: int) -> int:
        """The number that server `index` of a pool has among all servers of the run. Raises
        ConfigError if there is no such pool.
        """
        if pool not in self.sizes:
            raise ConfigError(f"inference.pools has no {pool!r}; {meant(pool, self.sizes)}")
        names = list(self.sizes)
        return sum(self.sizes[name] for name in names[: names.index(pool)]) + index

    @property
    def interpreter(self) -> Path:
        """The Python that runs vLLM. An environment that another user may have put here, as below
        /tmp, is not used.
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
    """Policy versions in, results on held-out problems out. The evaluator has a server of its own,
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


class SinkSetting(Section):
    """A sink that the orchestrator writes the run's metrics to (docs/metrics.md). A sink without
    params can be given by its name alone.
    """

    # console, jsonl, tensorboard, wandb, mlflow, or MODULE:NAME.
    kind: Annotated[str, one_of(*SINKS)]
    # Arguments of the sink, such as `mode: offline` of wandb. Secrets belong into its own
    # environment variables.
    params: dict[str, Any] = {}


class Orchestrator(Section):
    """When the run ends, and how often a part is started again."""

    target: Target | None = None  # The run ends well when this is reached.
    max_steps: int = Field(default=0, ge=0)  # The run ends well after so many steps. 0: no limit.
    # Time limit from the moment a server is ready. 0: no limit. With a target it is a failure to
    # reach the limit first.
    max_wall_s: float = Field(default=0.0, ge=0)
    # Restarts of one part within 300 s. One more ends the run.
    restart_limit: int = Field(default=20, ge=0)
    # Pause before a restart. It doubles at each restart in a row, up to 10 s.
    backoff_s: float = Field(default=0.2, ge=0)
    # Where metrics go, such as [jsonl, tensorboard, {kind: wandb, params: {project: digits}}].
    sinks: list[SinkSetting] = [SinkSetting(kind="jsonl")]

    @field_validator("sinks", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return (
            [{"kind": sink} if isinstance(sink, str) else sink for sink in value]
            if isinstance(value, list)
            else value
        )


class Metrics(Section):
    """The pages /livez, /readyz and /metrics that every part serves (docs/metrics.md). Whoever
    reaches them can read them and change nothing.
    """

    serve: bool = True  # Whether parts serve pages of health and metrics.
    # Address that parts listen on. For one part: --metrics-host, or STREAMRL_METRICS_HOST.
    host: str = "127.0.0.1"
    # Port that parts listen on. 0: any free port, noted in .targets/ beside the runs. For one part:
    # --metrics-port, or STREAMRL_METRICS_PORT.
    port: int = Field(default=0, ge=0, le=65535)
    # `streamrl up` restarts a part whose loop has stood still for longer than this.
    live_within_s: float = Field(default=60.0, gt=0)
    # The same limit for learner and scorers, whose loop turns once a batch and compiles.
    step_within_s: float = Field(default=1_800.0, gt=0)


class Placement(Section):
    """The GPUs of a part, or of all parts of a role, which get an equal number each."""

    # Numbers of the GPUs, from 0, among those that `streamrl up` sees.
    devices: list[Annotated[int, Field(ge=0)]] = []
    # Share of each GPU's memory that a learner or scorer reserves. 0: three quarters, as JAX does.
    # Servers: `--gpu-memory-utilization` in inference.extra_args.
    memory_fraction: float = Field(default=0.0, ge=0, le=1)


class Topics(Section):
    """The run's topics on the broker."""

    # Partitions of rollouts.<env> and groups.<env>. They stay the same for the whole run.
    partitions: int = Field(default=1, ge=1)
    replicas: int = Field(default=1, ge=1)  # Copies of each partition.
    retention_hours: float = Field(default=168, gt=0)  # Records are kept at least this long.
    # When a part starts and retention has deleted what it needs: stop with an error, or expire it.
    on_removed: Literal["stop", "expire"] = "stop"
    # Further settings of every topic. Those that delete (retention.*, cleanup.policy) apply to
    # topics with a retention only.
    config: dict[str, str] = {}

    @property
    def snapshot_s(self) -> float:
        """The longest time between two snapshots of a part: an eighth of the retention, so that a
        part that was killed can start again within seven eighths.
        """
        return self.retention_hours * 3600 / 8


class Fork(Section):
    """The version of another run that this run begins with. `streamrl fork` writes this section;
    nobody writes it by hand.
    """

    run: str  # Name of the parent run.
    # Policy version of the parent. The fork's first batch has this number.
    version: int = Field(ge=0)
    sha256: str  # SHA-256 of that version's weights.
    # Tokens that the parent owed to each share of a batch (batcher/selection.py).
    balance: dict[str, float] = {}
    stage: int = 0  # Stage of the curriculum that the parent had reached (batcher/curriculum.py).
    rewards: dict[str, list[float]] = {}  # Rewards of the parent's last batches by env.
    # Scorers whose rewards its first rollouts have: NAME@VERSION each (`streamrl fork --rewards`).
    scorers: list[str] = []


class RunFile(Section):
    # Name of the run, of its topics and of its directory: lowercase letters, digits and '-'.
    run: str
    # librdkafka settings of an existing cluster, with secrets as env:NAME. Empty: a local broker in
    # the run's directory.
    kafka: dict[str, Any] = {}
    runs_dir: str = "runs"  # The run's directory is <runs_dir>/<run>.
    # MODULE:NAME that the run's journals may name beside those in this file, such as one that it
    # used before.
    imports: list[str] = []
    envs: dict[str, Env]
    buffer: Buffer = Buffer()
    batcher: Batcher = Batcher()
    model: Model = Model()
    learner: Learner = Learner()
    scorer: Scorer = Scorer()
    weights: Weights = Weights()
    inference: Inference = Inference()
    gateway: Gateway = Gateway()
    eval: Eval = Eval()
    orchestrator: Orchestrator = Orchestrator()
    metrics: Metrics = Metrics()
    topics: Topics = Topics()
    # GPUs of the parts that `streamrl up` starts, by the name of a role (learner, scorer,
    # inference, evaluator) or of a part (inference-0). A part that is not named sees none. Empty:
    # all see all.
    placement: dict[str, Placement] = {}
    fork: Fork | None = None

    @field_validator("run")
    @classmethod
    def _run_name(cls, value: str) -> str:
        if not NAME.fullmatch(value):
            raise ValueError(f"{value!r} is not a name of lowercase letters, digits and '-'")
        return value

    @model_validator(mode="before")
    @classmethod
    def _resolved(cls, data: Any, info: ValidationInfo) -> Any:
        """With the preset's settings and those for a pretrained model, unless they are there."""
        if info.context in (RECORDED, RESOLVED) or not isinstance(data, dict):
            return data
        return presets.resolve(data)

    @model_validator(mode="after")
    def _works_together(self, info: ValidationInfo) -> RunFile:
        for problem in checks.problems(self, recorded=info.context == RECORDED):
            raise ValueError(problem)
        return self

    @property
    def max_samples(self) -> int:
        """The largest number of answers to one prompt that a part asks a server for."""
        groups = [self.buffer_of(name).group_size for name in self.envs]
        return max([1, *groups, *(env.samples for env in self.eval.envs.values())])

    def buffer_of(self, env: str) -> Buffer:
        """The rules of the buffer for an env: its own, and for the rest those of all."""
        return self.buffer.model_copy(update=self.envs[env].buffer.model_dump(exclude_none=True))

    @property
    def session_envs(self) -> tuple[str, ...]:
        """The envs whose rollouts agents make through the gateway."""
        return tuple(name for name, env in self.envs.items() if env.sessions)

    @property
    def turn_envs(self) -> tuple[str, ...]:
        """The envs whose model calls are recorded, by the gateway or by their own replicas."""
        return tuple(name for name, env in self.envs.items() if env.sessions or env.record_turns)

    @property
    def imported(self) -> frozenset[str]:
        """Every MODULE:NAME in this file."""
        return frozenset(imports_in(self.model_dump(mode="json", exclude={"kafka"})))

    @property
    def directory(self) -> Path:
        """The run's own directory."""
        return Path(self.runs_dir).absolute() / self.run

    @property
    def store(self) -> str:
        """URI of the run's weights (fsspec's: nothing is percent-encoded). Runs that share a store
        have different directories in it.
        """
        return (
            f"{self.weights.store.rstrip('/')}/{self.run}"
            if self.weights.store
            else f"file://{self.directory / 'weights'}"
        )

    def to_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), indent=1)


def load(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> RunFile:
    """Read a run file; `overrides` are `learner.learning_rate=1e-3`, parsed as YAML. Raises
    ConfigError.
    """
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); give the path of a run file, for instance"
            " deploy/runs/quickstart.yaml"
        ) from None
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {one_line(error, 1_000)}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a run file is a map of settings, not {type(data).__name__}")
    is_resolved = Path(path).name == RUN_FILE and Path(path).absolute().parent.name == data.get(
        "run"
    )
    for override in with_preset(overrides) if is_resolved else overrides:
        _set(data, override)
    return parse(data, str(path), RESOLVED if is_resolved else "")


def changed(run: RunFile, overrides: Sequence[str]) -> RunFile:
    """The run with these settings instead of its own, as `load` takes them. Raises ConfigError."""
    data = run.model_dump(mode="json")
    for override in with_preset(overrides):
        _set(data, override)
    return parse(data, f"--set {' '.join(overrides)}") if overrides else run


def with_preset(overrides: Sequence[str]) -> list[str]:
    """The overrides of a run file that says everything. A preset among them comes with all of its
    settings, before the others.
    """
    chosen = [o.partition("=")[2] for o in overrides if o.startswith("learner.preset=")]
    return [*(setting for name in chosen for setting in presets.settings_of(name)), *overrides]


def recorded(data: dict[str, Any], where: str) -> RunFile:
    """The run file that a run was made with. Sizes and losses are not checked: those that are
    refused today must not keep the run's records from being read.
    """
    return parse(data, where, RECORDED)


def parse(data: dict[str, Any], where: str = "run file", context: str = "") -> RunFile:
    try:
        return RunFile.model_validate(_without_gone(data, where, context), context=context)
    except ValidationError as error:
        raise ConfigError(
            f"{where}: " + "; ".join(_explain(problem) for problem in error.errors())
        ) from None


def _without_gone(data: dict[str, Any], where: str, context: str) -> dict[str, Any]:
    """The settings without those that are gone. Raises ConfigError if one of them has another value
    than the one that applies, but not for a run that exists already.
    """
    for key, value in GONE.items():
        name, _, setting = key.partition(".")
        section = data.get(name)
        if isinstance(section, dict) and setting in section:
            if section[setting] != value and context != RECORDED:
                raise ConfigError(
                    f"{where}: the setting {key} is gone, {value:g} always applies; leave it out"
                )
            data = {**data, name: {k: v for k, v in section.items() if k != setting}}
    return data


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
    """One line for a problem: the key, what is wrong, and the nearest key that exists."""
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
    """The section at a path of keys, names of envs and indices of lists."""
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
