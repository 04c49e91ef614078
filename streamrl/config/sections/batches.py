"""The sections of buffer and batcher: how rollouts become groups, and groups batches."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from streamrl.config.choices import ADMISSIONS, ADVANTAGES, BATCH_NORMALIZERS, CURRICULA
from streamrl.config.sections.section import Section, one_of


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
    # long it closes below its minimum, with nothing. While sessions of a group are open or wait for
    # rewards, it waits for sessions.idle_s and sessions.reward_wait_s together.
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
    """How much of a batch each env gets, as training continues (docs/data.md)."""

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
    # Admission by capacity: versions that a rollout's batch may be ahead of the policy that begins
    # it. -1: buffer.max_age.
    eta: int = Field(default=-1, ge=-1)
    # When an env cannot meet its share: block waits for it, spill lets the others fill in.
    on_shortage: Literal["block", "spill"] = "block"
    # Normalisation of advantages over the batch: none, normalize, or MODULE:FUNCTION. Empty: what
    # buffer.advantage needs.
    advantage: Annotated[str, one_of("", *BATCH_NORMALIZERS)] = ""
    curriculum: Curriculum = Curriculum()  # How the envs' shares change as training continues.
    # A shortage that lasts longer than this is reported. What any env may supply is then asked of
    # those alone that have sent something for the batch.
    shortage_after_s: float = Field(default=2.0, gt=0)

    @property
    def rows(self) -> int:
        """Rows of every batch of the run."""
        enough = -(-self.total_token_budget * 11 // (10 * self.max_seq_len)) + 1
        return self.row_count or -(-enough // self.processes) * self.processes
