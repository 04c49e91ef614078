"""The sections of an env: its problems, its sampling, its rewards and its share of a batch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, Tag, field_serializer

from streamrl.config.choices import ToolSyntax
from streamrl.config.sections.batches import GroupRules
from streamrl.config.sections.section import Limits, Section, by_key, ordered
from streamrl.config.topology import GENERATION

Share = Annotated[float, Field(ge=0, le=1)]


class RewardSetting(Section):
    """A reward function of a run."""

    kind: str  # `math-verify`, `judge`, FILE.py:NAME or MODULE:NAME.
    params: dict[str, Any] = {}  # Arguments of the constructor, if `kind` names a class.


class PassRate(Section):
    """Filter by difficulty: a problem of a finite set rests for some epochs when the policy nearly
    always or nearly never solves it (docs/data.md).
    """

    # A problem rests when the share of its last visits' rollouts that passed is not between these.
    between: Annotated[tuple[Share, Share], AfterValidator(ordered)] = (0.0, 1.0)
    # Number of last visits that are counted. A problem with fewer visits is posed.
    visits: int = Field(default=1, ge=1)
    rest_epochs: int = Field(default=1, ge=1)  # Number of epochs for which a problem rests.
    # Name of the reward that decides, before weights. Empty: the scalar that trains.
    reward: str = ""
    at_least: float = 1.0  # A rollout passes with this reward or a higher one.


MAX_REWARD = 1e6  # of a reward without a range


class Sessions(Section):
    """The sessions in which agents work on an env's problems through the gateway. Each becomes a
    rollout.
    """

    # Names of the rewards that a rollout waits for; no others are taken. Empty: it waits for one,
    # whatever its name.
    rewards: list[str] = []
    # Lowest and highest value of a reward, by its name, such as {judge: [0, 1]}. One that is not
    # named is between -1,000,000 and 1,000,000.
    reward_ranges: dict[str, Limits] = {}
    # A session without a call for so long is ended. It fails unless its rewards are there.
    idle_s: float = Field(default=3_600.0, gt=0)
    # A session that has ended fails if its rewards are not there after so long.
    reward_wait_s: float = Field(default=3_600.0, gt=0)
    max_open: int = Field(default=1_024, ge=1)  # Limit of sessions that have not ended.
    # Calls that are left out of training: those with one of these texts in a system message or in
    # the last message, such as a harness's requests for a title.
    untrained: list[Annotated[str, Field(min_length=1)]] = []
    # How the policy writes calls of an agent's tools: auto (as the chat template of model.path
    # does), json (<tool_call>{...}</tool_call>), llama-json, qwen-xml, or brackets.
    tool_syntax: ToolSyntax = "auto"

    def reward_range(self, name: str) -> tuple[float, float]:
        """The lowest and the highest value of a reward."""
        return self.reward_ranges.get(name, (-MAX_REWARD, MAX_REWARD))


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


class EnvSettings(Section):
    """What every env has: its problems, its sampling and its share of a batch."""

    # A shipped env, FILE.py:CLASS or MODULE:CLASS. With `python`: verifiers:TASKSET, openenv:URL,
    # nemo-gym:URL or FILE.py. Empty: the shipped env of the name that this section has.
    kind: str = ""
    params: dict[str, Any] = {}  # Arguments of the env's constructor, or of its load_environment.
    # Share of each batch's tokens. Envs with 0 divide what the fractions leave by availability.
    fraction: float = Field(default=0.0, ge=0, le=1)
    seed: int = 0  # Seed of the problems and of their order.
    pool: str = GENERATION  # Pool of inference servers that gets all requests of this env.
    temperature: float = Field(default=1.0, gt=0)  # Sampling temperature.
    max_tokens: int = Field(default=16, ge=1)  # Limit of sampled tokens in one turn.
    # Variables of the model's chat template, such as {enable_thinking: false}. A request of an
    # agent may name others.
    chat_template_kwargs: dict[str, Any] = {}
    # Limit of sampled turns in one rollout. At the limit it ends as truncated.
    max_turns: int = Field(default=8, ge=1)
    # Time limit of a whole rollout. At the limit it ends as truncated.
    rollout_timeout_s: float = Field(default=600.0, gt=0)
    # Time limit of one call of the env's code. A late reply truncates the rollout, a late reward
    # fails it.
    env_timeout_s: float = Field(default=30.0, gt=0)
    # Weights of named rewards in the scalar that trains. A reward that is not named here has weight
    # 1.
    reward_weights: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = {}
    # Time limit of one request to an inference server.
    timeout_s: float = Field(default=60.0, gt=0)
    # Servers that a request is tried on before its rollout is published as failed.
    attempts: int = Field(default=3, ge=1)
    # Rules of the buffer for this env. What is not given is as in `buffer`.
    buffer: GroupRules = GroupRules()
    loss: EnvLoss = EnvLoss()  # How much each loss counts at this env's tokens.

    @field_serializer("buffer")
    def _given_rules(self, rules: GroupRules) -> dict[str, Any]:
        return rules.given


class FreelySampled(EnvSettings):
    """Sampling whose answers train nothing: those of evaluations and of judges. In training only
    the temperature is reproduced.
    """

    top_p: float = 1.0
    top_k: int = -1


class Env(EnvSettings):
    """An env whose processes pose its problems, or whose rollouts come from outside."""

    # Number of processes; replica i of n poses every n-th problem. 0: rollouts come from outside.
    replicas: int = Field(default=1, ge=0)
    # Name of a process that runs this env together with all others of the same `host`. Empty: each
    # replica is a process (docs/add-an-env.md).
    host: str = ""
    # Limit of open groups, on top of what demand asks for.
    max_groups_in_flight: int = Field(default=64, ge=1)
    # Limit of groups begun in a second. 0: no limit but demand.
    max_groups_per_s: float = Field(default=0.0, ge=0)
    pass_rate: PassRate | None = None  # Leaves problems out by how often they are solved.
    # Reward functions in addition to the env's own, by the name of their reward.
    rewards: dict[str, RewardSetting] = {}
    sessions: ClassVar[None] = None

    @property
    def producers(self) -> int:
        """Number of its processes that publish rollouts."""
        return self.replicas


class AgentEnv(EnvSettings):
    """An env whose problems agents pose and solve, which sample through the gateway
    (docs/train-your-agent.md).
    """

    sessions: Sessions  # The sessions of the agents.
    # Reward functions that `streamrl rescore` knows by name.
    rewards: dict[str, RewardSetting] = {}
    replicas: ClassVar[int] = 0
    host: ClassVar[str] = ""
    producers: ClassVar[int] = 0  # The assembler publishes the rollouts of sessions.
    pass_rate: ClassVar[None] = None


class ServerEnv(EnvSettings):
    """An env whose processes run in an environment without streamrl and sample through the gateway
    (docs/env-servers.md).
    """

    # Path of the Python of that environment.
    python: Annotated[str, Field(min_length=1)]
    # Environment variables that the processes are given, in addition to those of the system.
    variables: list[str] = []
    # Key with which the processes open sessions, as env:NAME (`streamrl gateway-key` prints one).
    # Empty: they make one from the signing secret.
    api_key: str = ""
    sessions: Sessions = Sessions()  # The sessions of the processes.
    # Number of processes; replica i of n poses every n-th problem. 0: others start them.
    replicas: int = Field(default=1, ge=0)
    # Limit of open groups.
    max_groups_in_flight: int = Field(default=64, ge=1)
    host: ClassVar[str] = ""
    producers: ClassVar[int] = 0
    pass_rate: ClassVar[None] = None
    rewards: ClassVar[dict[str, RewardSetting]] = {}


AnyEnv = Env | AgentEnv | ServerEnv
EnvChoice = Annotated[
    Annotated[Env, Tag("env")]
    | Annotated[AgentEnv, Tag("agents")]
    | Annotated[ServerEnv, Tag("server")],
    by_key("env", python="server", sessions="agents"),
]
