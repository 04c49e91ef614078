"""Makes the envs and reward functions that a run file names: shipped ones, and those of installed
packages, by their short name; your own by FILE.py:NAME or MODULE:NAME.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, cast

from streamrl.config.plugins import Plugin, plugins
from streamrl.config.run_file import RunFile
from streamrl.config.sections.envs import RewardSetting
from streamrl.envs.api import (
    AgentLoopEnv,
    BaseEnv,
    MultiTurnEnv,
    RewardFunction,
    SingleTurnEnv,
)
from streamrl.envs.loading import construct, load
from streamrl.system.errors import ConfigError
from streamrl.system.text import did_you_mean, nearest

ENVS = {
    "copy-digits": "streamrl.envs.shipped.copy_digits:CopyDigits",
    "add-digits": "streamrl.envs.shipped.add_digits:AddDigits",
    "calculator": "streamrl.envs.shipped.calculator:Calculator",
    "guess-number": "streamrl.envs.shipped.guess_number:GuessNumber",
    "dataset": "streamrl.envs.shipped.dataset:Dataset",
    "multiple-choice": "streamrl.envs.shipped.multiple_choice:MultipleChoice",
    "coding": "streamrl.envs.shipped.coding:Coding",
    "demonstrations": "streamrl.envs.shipped.demonstrations:Demonstrations",
    "reasoning-gym": "streamrl.envs.shipped.reasoning_gym:ReasoningGym",
}
REWARDS = {
    "math-verify": "streamrl.envs.shipped.math_verify:MathVerify",
    "judge": "streamrl.envs.shipped.judge:Judge",
}
KINDS = (SingleTurnEnv, MultiTurnEnv, AgentLoopEnv)
# The methods that the engine calls, and the kind that has each of them.
METHODS: dict[str, type[BaseEnv]] = {
    "problem": BaseEnv,
    "dataset_index": BaseEnv,
    "close": BaseEnv,
    "rewards": SingleTurnEnv,
    "reply": MultiTurnEnv,
    "converse": AgentLoopEnv,
    "judge": AgentLoopEnv,
}
MISSPELT = 0.75  # A method of the env that is so similar to one of METHODS is taken for it.


def known_envs() -> dict[str, Plugin]:
    """The envs that a run file may name by a short name: shipped ones and those of installed
    packages. A package cannot replace a shipped one.
    """
    return plugins("streamrl.envs") | _shipped(ENVS)


def known_rewards() -> dict[str, Plugin]:
    """The same of reward functions."""
    return plugins("streamrl.rewards") | _shipped(REWARDS)


def _shipped(paths: Mapping[str, str]) -> dict[str, Plugin]:
    return {name: Plugin(path, "streamrl") for name, path in paths.items()}


def resolve_env(run: RunFile, env: str) -> str:
    """The name of an env that is given by its name, or by its kind if only one env is of that kind.
    Raises ConfigError.
    """
    if env in run.envs:
        return env
    matches = [name for name, settings in run.envs.items() if settings.kind == env]
    if len(matches) == 1:
        return matches[0]
    count = "several envs" if matches else "no env"
    raise ConfigError(f"the run has {count} {env!r}; it has {', '.join(run.envs)}")


def make_env(kind: str, seed: int, params: Mapping[str, Any], where: str) -> BaseEnv:
    """The env of that kind: a name of `known_envs`, FILE.py:CLASS or MODULE:CLASS. `where` names
    the setting in a ConfigError.
    """
    return construct(env_class(kind, where), kind, params, where, seed=seed)


def make_reward(kind: str, params: Mapping[str, Any], where: str) -> RewardFunction:
    """The reward function of that kind: a name of `known_rewards`, FILE.py:NAME or MODULE:NAME. If
    it names a class, this is an instance with `params`. Raises ConfigError.
    """
    reward = load(_path(kind, where, "reward", known_rewards()), where, "reward")
    if inspect.isclass(reward):
        reward = construct(reward, kind, params, where)
    elif params:
        raise ConfigError(
            f"{where}.params: {kind} is a function and takes none; make it a class with "
            "__init__(self, ...) and __call__"
        )
    if not callable(reward):
        raise ConfigError(
            f"{where}: {kind} is no function; a reward is called with "
            "(problem, completion, rewards so far)"
        )
    return cast(RewardFunction, reward)


def make_rewards(rewards: Mapping[str, RewardSetting], where: str) -> dict[str, RewardFunction]:
    """The reward functions of an env by the names of their rewards. Raises ConfigError."""
    return {
        name: make_reward(own.kind, own.params, f"{where}.{name}") for name, own in rewards.items()
    }


def env_class(kind: str, where: str) -> type[BaseEnv]:
    """The class of an env, checked to be one. Raises ConfigError."""
    path = _path(kind, where, "env", known_envs())
    env = load(path, where, "env")
    source, _, name = path.rpartition(":")
    if not inspect.isclass(env):
        raise ConfigError(f"{where}: {source} has no class {name!r}")
    if not issubclass(env, KINDS):
        kinds = ", ".join(kind.__name__ for kind in KINDS)
        raise ConfigError(
            f"{where}: class {name!r} of {source} does not derive from a kind of env; derive it "
            f"from one of {kinds} (streamrl.envs.api)"
        )
    wrong = _wrong_method(env)
    if wrong:
        raise ConfigError(f"{where}: class {name!r} of {source} {wrong}")
    return env


def _wrong_method(env: type[BaseEnv]) -> str:
    """What is wrong with the methods of an env's class: one that its kind does not have, one that
    is misspelt, or one that is missing. Empty if nothing is.
    """
    own = _own_methods(env)
    kind = next(kind.__name__ for kind in reversed(KINDS) if issubclass(env, kind))
    for name in own:
        owner = METHODS.get(name)
        if owner is not None and not issubclass(env, owner):
            return f"has a method {name!r}, but is a {kind}; derive it from {owner.__name__}"
    not_defined = [method for method in METHODS if method not in own]
    for name in own:
        near = nearest(name, not_defined, MISSPELT)
        if name not in METHODS and near:
            return (
                f"has a method {name!r} that nothing calls; did you mean {near!r}? If it is for "
                "the class itself, let its name begin with an underscore"
            )
    if env.__abstractmethods__:
        return f"has no method {min(env.__abstractmethods__)!r}, which every {kind} has"
    return ""


def _own_methods(env: type[BaseEnv]) -> list[str]:
    """The public methods that the author of an env has written."""
    methods: dict[str, None] = {}
    for parent in env.__mro__:
        if parent.__module__ != BaseEnv.__module__ and issubclass(parent, BaseEnv):
            for name, value in vars(parent).items():
                if inspect.isfunction(value) and not name.startswith("_"):
                    methods[name] = None
    return list(methods)


def _path(kind: str, where: str, what: str, known: Mapping[str, Plugin]) -> str:
    """FILE.py:NAME or MODULE:NAME of a kind. Raises ConfigError for a short name that neither
    streamrl nor an installed package has.
    """
    if ":" in kind:
        return kind
    if kind in known:
        return known[kind].path
    own = "CLASS" if what == "env" else "NAME"
    hint = did_you_mean(kind, known) or f"your own: FILE.py:{own} or MODULE:{own}"
    raise ConfigError(f"{where}: {what} {kind!r} not found; there are {', '.join(known)}; {hint}")
