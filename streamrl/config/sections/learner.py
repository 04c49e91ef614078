"""The sections of the model and the learner: how a batch becomes a version."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, get_args

from pydantic import AfterValidator, Field, Tag, field_validator

from streamrl.config import presets
from streamrl.config.choices import DIVERGENCES, LOSSES
from streamrl.config.sections.section import Finite, Section, by_key, one_of, ordered
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


LimitsOfWeights = Annotated[
    tuple[Annotated[Finite, Field(ge=0)], Annotated[Finite, Field(gt=0)]], AfterValidator(ordered)
]


class ImportanceWeights(Section):
    """Weights exp(current - policy) of the loss, which make up for the policy that sampled."""

    by: Literal["token", "sequence"]  # Whether a token has a weight, or its rollout as a whole.
    # Smallest and largest weight that trains as it is.
    limits: LimitsOfWeights = (0.0, 2.0)
    # What becomes of a weight outside the limits: it is cut to them, or its token leaves the batch.
    beyond: Literal["truncate", "mask"] = "truncate"


class DistanceLimit(Section):
    """Rejection by an estimator of the divergence from the policy that sampled."""

    distance: Literal["k1", "k2", "k3"]  # The estimator; of k1 its absolute value counts.
    # Whether the distance of a token counts, or the mean of its rollout.
    by: Literal["token", "sequence"] = "token"
    above: float = Field(gt=0)  # Distance in nats beyond which nothing trains.


class RatioLimit(Section):
    """Rejection by the geometric mean of a rollout's ratios, or its inverse if that is larger."""

    distance: Literal["geometric"]  # The geometric mean of the ratios.
    above: float = Field(gt=1)  # Mean ratio beyond which nothing of the rollout trains.


Rejection = Annotated[DistanceLimit | RatioLimit, Field(discriminator="distance")]


class Correction(Section):
    """Corrections for rollouts that an older version or another engine sampled. The settings are
    independent of each other; docs/losses.md has the formulas.
    """

    # What the ratio is measured from: bypass is the policy that sampled, decoupled the one a step
    # begins with.
    old_policy: Literal["bypass", "decoupled"] = "bypass"
    weights: ImportanceWeights | None = None  # Importance weights. Empty: there are none.
    # Rejection of what is far from the policy that sampled. Empty: nothing is rejected.
    reject: Rejection | None = None


Scores = Literal["learner", "pool"]


class FixedReference(Section):
    """A reference that stays the same."""

    # Who computes the reference's logprobs: the learner before each step, or the pool of `scorer`.
    by: Scores = "learner"
    # Model with the policy's tokenizer, named as for model.path. Empty: the one that the run began
    # with.
    path: str = ""
    every: ClassVar[int] = 0


class FollowingReference(Section):
    """A reference that follows the policy."""

    # Who computes the reference's logprobs: the learner before each step, or the pool of `scorer`.
    by: Scores = "learner"
    # Batch k is measured from policy version k - k % every.
    every: int = Field(ge=1)
    path: ClassVar[str] = ""


Reference = Annotated[
    Annotated[FixedReference, Tag("fixed")] | Annotated[FollowingReference, Tag("following")],
    by_key(every="following", otherwise="fixed"),
]


class Kl(Section):
    """The divergence from a reference (docs/reference.md)."""

    coefficient: float = Field(default=0.01, gt=0)  # Weight of the divergence.
    # k1, k2, k3 (docs/losses.md), or MODULE:FUNCTION.
    estimator: Annotated[str, one_of(*DIVERGENCES)] = "k3"
    # Whether the divergence is added to the loss or subtracted from the advantages.
    applied_to: Literal["loss", "advantages"] = "loss"
    # The model that the divergence is measured from. `every` takes the place of `path`.
    reference: Reference = FixedReference()


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


class Schedule(Section):
    """How the learning rate falls after the warm-up."""

    kind: Literal["linear", "cosine"]  # In a line, or as half a cosine.
    # Steps, the warm-up's included, in which it falls. 0: orchestrator.max_steps, if there is one.
    # A run that is resumed with more steps needs it given.
    steps: int = Field(default=0, ge=0)
    # Learning rate at the end of these steps, and from then on, as a share of learning_rate.
    min_ratio: float = Field(default=0.0, ge=0, le=1)


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
    # clipped-ratio, grpo-on-policy (docs/losses.md). The run file's own settings override them.
    preset: Annotated[str, AfterValidator(known_preset)] = ""
    # ppo, cispo, gspo, grpo, clipped-ratio (docs/losses.md), or MODULE:FUNCTION.
    loss: Annotated[str, one_of(*LOSSES)] = "ppo"
    # How the loss is averaged: over tokens, over samples, or by the constant batcher.max_seq_len.
    # Empty: as the paper of the loss does.
    average: Literal["", "tokens", "samples", "constant"] = ""
    clip_epsilon: float = Field(default=0.2, gt=0)  # The ratio is clipped below 1 - clip_epsilon.
    # The ratio is clipped above 1 + clip_epsilon_high. 0: clip_epsilon.
    clip_epsilon_high: float = Field(default=0.0, ge=0)
    # Where the advantage is negative, ppo bounds the ratio by this (dual clip), so that one
    # token cannot outweigh a batch. 0: no bound.
    clip_ratio_max: float = Field(default=0.0, ge=0)
    # Corrections for rollouts of an older version or another engine.
    correction: Correction = Correction()
    # The divergence from a reference. Empty: none is measured, and no reference is loaded or asked.
    # This is the default where `model.path` is given.
    kl: Kl | None = Kl()
    # Model that the policy is distilled from, at tokens with a weight `teacher_kl`
    # (envs.<name>.loss), named as for model.path. It has the policy's tokenizer, and the pool of
    # `scorer` computes its logprobs of each batch (docs/reference.md). Empty: there is none.
    teacher: str = ""
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
    # Whether GPUs compute the same bits every time, with kernels that may be slower. Otherwise a
    # version that is trained again after a crash differs, and is announced as a new lineage.
    deterministic: bool = True
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
    # How the learning rate falls after the warm-up. Empty: it stays.
    schedule: Schedule | None = None
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
    # When a version computed again differs: announce a new lineage of it, or stop the run.
    on_divergence: Literal["announce", "stop"] = "announce"
    # Tokens of the last batch that are announced with each version, with their logprobs. Servers
    # are checked against them.
    probe_tokens: int = Field(default=64, ge=8)

    @property
    def reference(self) -> FixedReference | FollowingReference | None:
        """The model that the divergence is measured from, if one is measured."""
        return self.kl.reference if self.kl else None

    @property
    def pool_scores_reference(self) -> bool:
        """Whether a pool computes the reference's logprobs."""
        return self.reference is not None and self.reference.by == "pool"

    @property
    def needs_scores(self) -> bool:
        """Whether each batch waits for its scores: logprobs of the reference or of a teacher that a
        pool computes.
        """
        return self.pool_scores_reference or bool(self.teacher)
