"""The sections of an env: its problems, its sampling, its rewards and its share of a batch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from streamrl.config.choices import ADVANTAGES, ToolSyntax
from streamrl.config.sections.section import Section, one_of
from streamrl.config.topology import GENERATION


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


def ordered(value: tuple[float, float]) -> tuple[float, float]:
    """Accepts a lowest and a highest value in this order."""
    if value[0] > value[1]:
        raise ValueError(f"{value[0]:g} is the lowest value and is above {value[1]:g}, the highest")
    return value


Finite = Annotated[float, Field(allow_inf_nan=False)]
RewardRange = Annotated[tuple[Finite, Finite], AfterValidator(ordered)]
MAX_REWARD = 1e6  # of a reward without a range


class Sessions(Section):
    """Agents work on this env's problems through the gateway; each session becomes a rollout."""

    # Names of the rewards that a rollout waits for; no others are taken. Empty: it waits for one,
    # whatever its name.
    rewards: list[str] = []
    # Lowest and highest value of a reward, by its name, such as {judge: [0, 1]}. One that is not
    # named is between -1,000,000 and 1,000,000.
    reward_ranges: dict[str, RewardRange] = {}
    # A session without a call for so long is ended. It fails unless its rewards are there.
    idle_s: float = Field(default=3_600.0, gt=0)
    # A session that has ended fails if its rewards are not there after so long.
    reward_wait_s: float = Field(default=3_600.0, gt=0)
    max_open: int = Field(default=1_024, ge=1)  # Limit of sessions that have not ended.
    # Calls that are left out of training: those with one of these texts in a system message or in
    # the last message, such as a harness's requests for a title.
    untrained: list[Annotated[str, Field(min_length=1)]] = []
    # Key with which the servers of an env with `python` open sessions, as env:NAME (`streamrl
    # gateway-key` prints one). Empty: they make one from the signing secret.
    api_key: str = ""


class EnvLoss(Section):
    """How much each loss counts at the sampled tokens of an env's rollouts (docs/losses.md). A turn
    may have its own weights.
    """

    # Weight of the policy gradient, which is learner.loss.
    policy_gradient: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    # Weight of the cross entropy, as in supervised fine-tuning.
    cross_entropy: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    # Weight of the divergence from the teacher (learner.teacher), as in distillation.
    teacher_kl: float = Field(default=0.0, ge=0, allow_inf_nan=False)


class Env(Section):
    """An environment of the run: its problems, its sampling and its share of a batch."""

    # A shipped env, FILE.py:CLASS or MODULE:CLASS. With `python`: verifiers:TASKSET,
    # openenv:URL, nemo-gym:URL or FILE.py. Empty: the shipped env of
    # the name that this section has.
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
    # Variables of the model's chat template, such as {enable_thinking: false}. A request of an
    # agent may name others.
    chat_template_kwargs: dict[str, Any] = {}
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
    # Reward functions in addition to the env's own, by the name of their reward.
    rewards: dict[str, RewardSetting] = {}
    # Weights of named rewards in the scalar that trains. A reward that is not named here has weight
    # 1.
    reward_weights: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = {}
    # How the policy writes calls of an agent's tools: auto (as the chat template of model.path
    # does), json (<tool_call>{...}</tool_call>), llama-json, qwen-xml, or brackets.
    tool_syntax: ToolSyntax = "auto"
    # Time limit of one request to an inference server.
    timeout_s: float = Field(default=60.0, gt=0)
    # Servers that a request is tried on before its rollout is published as failed.
    attempts: int = Field(default=3, ge=1)
    # Rules of the buffer for this env. What is not given is as in `buffer`.
    buffer: EnvBuffer = EnvBuffer()
    # Whether each model call is recorded as it ends, so that a replica that dies is followed by one
    # that continues its conversations. Empty: it is, where rollouts may have several turns. A
    # rollout of one turn is its own record.
    record_turns: bool | None = None
    loss: EnvLoss = EnvLoss()  # How much each loss counts at this env's tokens.
    # Agents that sample through the gateway. It takes `replicas: 0`, or `python`. Empty: there are
    # none.
    sessions: Sessions | None = None
    # Path of the Python of an environment without streamrl, in which the env's processes run and
    # sample through the gateway (docs/env-servers.md). Empty: they run in this one.
    python: str = ""
    # Environment variables that these processes are given, in addition to those of the system.
    variables: list[str] = []

    def reward_range(self, name: str) -> tuple[float, float]:
        """The lowest and the highest value of a reward of its sessions."""
        ranges = self.sessions.reward_ranges if self.sessions else {}
        return ranges.get(name, (-MAX_REWARD, MAX_REWARD))

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
