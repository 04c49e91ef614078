"""The sections of the model, the learner and the scorer pool: how a batch becomes a version."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field, field_validator

from streamrl.config import presets
from streamrl.config.choices import DIVERGENCES, LOSSES
from streamrl.config.sections.section import Section, one_of
from streamrl.system.text import unknown_name

LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


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

    # Directory of a Hugging Face model, or its name on the hub: OWNER/NAME or OWNER/NAME@REVISION.
    # Empty: the tiny model is made.
    path: str = ""
    tiny: TinyModel = TinyModel()  # The tiny model.
    # Positions that the model is built for: the most tokens of one rollout.
    max_seq_len: int = Field(default=128, ge=2)
    # What a conversation continues from where the chat template writes earlier answers otherwise
    # than they were sampled, such as without their reasoning: template (from its text, which begins
    # another training sequence), or keep (from the tokens that were sampled).
    history: Literal["template", "keep"] = "template"
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
    # Model with the policy's tokenizer, named as for model.path. Empty: the one that the run began
    # with.
    path: str = ""
    # Batch k is measured from policy version k - k % every. 0: the reference stays the same.
    every: int = Field(default=0, ge=0)


class Lora(Section):
    """Adapters: small matrices added to the linear layers of the model, which itself stays as it is
    (docs/models.md).
    """

    rank: int = Field(default=16, ge=1, le=512)  # Rank of an adapter's two matrices.
    # Their product is multiplied by alpha / rank.
    alpha: float = Field(default=32.0, gt=0)
    # Linear layers that have an adapter.
    targets: Annotated[list[LoraTarget], Field(min_length=1)] = [*get_args(LoraTarget)]


class Mesh(Section):
    """How the devices of the learner divide its work (docs/batches.md). The product of the sizes is
    the number of devices. Where JAX knows the nodes, it is that of each node.
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
    # Number of devices that divide the experts of every layer of a mixture of experts, and rows. It
    # divides the number of experts.
    expert: int = Field(default=1, ge=1)
    # Whether each node has a copy of the parameters, or all nodes divide parameters and optimizer.
    nodes: Literal["copy", "divide"] = "copy"

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

    # Model with the policy's tokenizer, named as for model.path. Empty: there is no teacher.
    path: str = ""
    # Estimator of the divergence from the teacher: k1, k2, k3 (docs/losses.md), or MODULE:FUNCTION.
    kl: Annotated[str, one_of(*DIVERGENCES)] = "k2"


def known_preset(name: str) -> str:
    """Accepts the name of a preset, or nothing."""
    if name and name not in presets.PRESETS:
        raise ValueError(unknown_name(name, presets.PRESETS))
    return name


class Learner(Section):
    """Batches in, policy versions out."""

    # Name of the run's own learner, whose versions all parts follow. Others join with `streamrl
    # learner --name`.
    name: str = "lead"
    # The settings of a paper or a design as a whole: grpo, dr-grpo, dapo, gspo, rloo, reinforce++,
    # document-000, document-003 (docs/losses.md). The run file's own settings override them.
    preset: Annotated[str, AfterValidator(known_preset)] = ""
    # ppo, dapo, cispo, gspo, grpo, clipped-ratio (docs/losses.md), or MODULE:FUNCTION.
    loss: Annotated[str, one_of(*LOSSES)] = "ppo"
    # How the loss is averaged: over tokens, over samples, or by the constant batcher.max_seq_len.
    # Empty: as the paper of the loss does.
    average: Literal["", "tokens", "samples", "constant"] = ""
    clip_epsilon: float = Field(default=0.2, gt=0)  # The ratio is clipped below 1 - clip_epsilon.
    # The ratio is clipped above 1 + clip_epsilon_high. 0: clip_epsilon.
    clip_epsilon_high: float = Field(default=0.0, ge=0)
    # Where the advantage is negative, ppo and dapo bound the ratio by this (dual clip), so that one
    # token cannot outweigh a batch. 0: no bound.
    clip_ratio_max: float = Field(default=0.0, ge=0)
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
    # Number of JAX processes that are the learner. `streamrl up` starts all of them on its machine,
    # and starts all of them again when one ends.
    processes: int = Field(default=1, ge=1)
    # Number format that the model computes in: float32, or bf16 (bfloat16). Parameters, gradients
    # and optimizer are float32 in any case.
    precision: Literal["float32", "bf16"] = "float32"
    # What the backward pass computes again instead of keeping it in memory: none, or full (each
    # layer, from its input).
    remat: Literal["none", "full"] = "none"
    # What computes attention: cudnn, pallas, reference (plain JAX), or auto: on a GPU the first of
    # them that passes a check at the start, elsewhere reference (docs/batches.md).
    attention: Literal["auto", "cudnn", "pallas", "reference"] = "auto"
    # Tokens of a row whose logits are in memory at a time. 0: all of them.
    logprob_chunk: int = Field(default=0, ge=0)
    # adamw, lion, adopt, cautious (AdamW that leaves out what goes against the gradient), or muon:
    # Muon for matrices, AdamW for the rest, at one learning rate.
    optimizer: Literal["adamw", "lion", "adopt", "cautious", "muon"] = "adamw"
    # Learning rate after the warm-up. Where `model.path` is given it is 1e-6, and 3e-5 for the
    # adapters of `lora`.
    learning_rate: float = Field(default=1e-3, gt=0)
    # Steps in which the learning rate rises, from learning_rate / warmup_steps on.
    warmup_steps: int = Field(default=10, ge=0)
    # The same as a share of schedule_steps. 0: warmup_steps applies.
    warmup_fraction: float = Field(default=0.0, ge=0, lt=1)
    # The learning rate after the warm-up: it stays, or falls to min_learning_rate in a line or as
    # half a cosine.
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    # Steps, the warm-up's included, in which it falls. 0: orchestrator.max_steps, if there is one.
    # A run that is resumed with more steps needs it given.
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
    # fsspec URI below which each run has a copy of its checkpoints, from which a learner continues
    # where its own disk has none as new. Empty: there are no copies.
    checkpoint_copies: str = ""
    # Limit of consecutive steps that are skipped because loss or gradient is not finite. Then the
    # run ends.
    max_skipped_steps: int = Field(default=10, ge=1)
    # When a version computed again differs: announce a new lineage of it, or stop the run.
    on_divergence: Literal["announce", "stop"] = "announce"
    seed: int = 0  # Seed of the learner's random key.
    # Tokens of the last batch that are announced with each version, with their logprobs. Servers
    # are checked against them.
    probe_tokens: int = Field(default=64, ge=8)

    @property
    def needs_schedule_steps(self) -> bool:
        """Whether the learning rate depends on `schedule_steps`."""
        return self.schedule != "constant" or self.warmup_fraction > 0

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
