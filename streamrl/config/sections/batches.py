"""The sections of buffer and batcher: how rollouts become groups, and groups batches."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from streamrl.config.choices import ADMISSIONS, ADVANTAGES, BATCH_NORMALIZERS, CURRICULA
from streamrl.config.presets import ROW_TOKENS
from streamrl.config.sections.section import Section, one_of


class GroupRules(Section):
    """When a group closes, how old it may get, and what its rollouts are compared by."""

    group_size: int = Field(default=8, ge=1)  # Rollouts of one problem.
    # A group that would expire or has waited too long closes with at least so many rollouts.
    min_group_size: int = Field(default=2, ge=1)
    # Staleness limit: a rollout trains at most so many policy versions after its oldest token. At
    # least batcher.lookahead; with two more, a group that misses its batch has another one.
    max_age: int = Field(default=2, ge=0)
    # rloo, grpo, dr-grpo, reinforce++, reinforce++-baseline, maxrl, or MODULE:FUNCTION.
    advantage: Annotated[str, one_of(*ADVANTAGES)] = "rloo"
    # Whether groups whose advantages are all 0 are trained on, or left out so that others fill the
    # batch.
    zero_advantage: Literal["keep", "filter"] = "keep"
    # A group closes at its minimum size when no rollout has come for so long. After ten times as
    # long it closes below its minimum, with nothing. While sessions of a group are open or wait for
    # rewards, it waits for sessions.idle_s and sessions.reward_wait_s together.
    group_wait_s: float = Field(default=60.0, gt=0)

    @property
    def given(self) -> dict[str, Any]:
        """The rules that the run file gives, by name."""
        return {name: getattr(self, name) for name in GroupRules.model_fields if self.gives(name)}

    def gives(self, name: str) -> bool:
        """Whether the run file gives this rule."""
        return name in self.model_fields_set


class Buffer(GroupRules):
    """Rollouts in, scored groups out. The rules of groups hold for every env that gives none of its
    own.
    """

    # Number of processes; fixed for a run. Shard i of n takes every n-th partition of
    # each topic of rollouts.
    shards: int = Field(default=1, ge=1)
    # Limit of the tokens held for one env, and of 64 times as many bytes. Beyond it the oldest
    # groups close. Each shard has an equal part of it.
    max_window_tokens: int = Field(default=4_000_000, ge=1)
    # When a larger share of the last 1,000 rollouts of a topic is invalid, it is not read for 30 s.
    # 1: never.
    max_invalid_frac: float = Field(default=0.5, ge=0, le=1)


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


class Stages(Section):
    """A curriculum of stages."""

    kind: Literal["stages"]  # The fractions of the stage that a batch belongs to.
    # The stages, in their order.
    stages: Annotated[list[Stage], Field(min_length=1)]


class Learnability(Section):
    """A curriculum by how much an env teaches."""

    kind: Literal["learnability"]  # Fractions by r (1 - r) of the mean reward r.
    batches: int = Field(default=10, ge=1)  # Last batches that the mean reward is taken over.
    least: float = Field(default=0.05, ge=0, le=1)  # Fraction that every env keeps.


class OwnCurriculum(Section):
    """A curriculum of your own."""

    kind: Annotated[str, one_of(*CURRICULA)]  # MODULE:FUNCTION (batcher/curriculum.py).
    batches: int = Field(default=10, ge=1)  # Last batches that the mean reward is taken over.


def kind_of_curriculum(value: Any) -> str:
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    return kind if isinstance(kind, str) and kind in CURRICULA else "own"


Curriculum = Annotated[
    Annotated[Stages, Tag("stages")]
    | Annotated[Learnability, Tag("learnability")]
    | Annotated[OwnCurriculum, Tag("own")],
    Discriminator(kind_of_curriculum),
]


class Batcher(Section):
    """Groups in, batches out."""

    # Tokens of a batch without padding, prompts included.
    total_token_budget: int = Field(default=16_384, ge=1)
    # Tokens of a row. Where model.max_seq_len is given and is more, it is that, rounded up to a
    # multiple of 1,024.
    max_seq_len: int = Field(default=ROW_TOKENS, ge=2)
    # Lengths of rows below max_seq_len. A batch gets the shortest rows that hold it, and as many of
    # them as hold as many tokens. The learner compiles a step for each length.
    row_lengths: list[Annotated[int, Field(ge=2)]] = []
    # Rows of a batch of max_seq_len. 0: enough for the token budget and a tenth more.
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
    # When an env cannot meet its share: block waits for it, spill lets the others fill in.
    on_shortage: Literal["block", "spill"] = "block"
    # Normalisation of advantages over the batch: none, normalize, or MODULE:FUNCTION. Empty: what
    # buffer.advantage needs.
    advantage: Annotated[str, one_of("", *BATCH_NORMALIZERS)] = ""
    # How the envs' shares change as training continues (docs/data.md). Empty: each keeps its
    # envs.<name>.fraction.
    curriculum: Curriculum | None = None

    @property
    def rows(self) -> int:
        """Rows of every batch of the run."""
        enough = -(-self.total_token_budget * 11 // (10 * self.max_seq_len)) + 1
        return self.row_count or -(-enough // self.processes) * self.processes

    @property
    def all_row_lengths(self) -> tuple[int, ...]:
        """The lengths that rows of the run's batches can have."""
        return (*self.row_lengths, self.max_seq_len)
