"""The rewards that scorers have given to the recorded rollouts of a run, and the rollouts with them
instead of the recorded ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from streamrl.envs.sessions.rewards import RewardBreakdown, apply_weights, with_rewards
from streamrl.extensions.recordings.rescore import rewards_of_scorer
from streamrl.stream.log.protocol import Log
from streamrl.stream.log.records_of import rollouts_of
from streamrl.stream.records import Reward, Rollout
from streamrl.system.errors import ConfigError, StreamrlError

STOP_FIRST = "stop the run, let `streamrl rescore` finish, and fork it again"
RewardsByUid = Mapping[str, Sequence[Reward]]


class ScorerVersion(NamedTuple):
    """A scorer and its version, written NAME@VERSION."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"


def parse_scorers(text: str) -> list[ScorerVersion]:
    """The scorers of `NAME@VERSION[,...]`. Raises ConfigError."""
    scorers: list[ScorerVersion] = []
    for scorer in text.split(","):
        name, _, version = scorer.strip().partition("@")
        if not (name and version):
            raise ConfigError(f"{text}: give NAME@VERSION, as `streamrl rescore` prints it")
        scorers.append(ScorerVersion(name, version))
    return scorers


def read_rewards(
    old: Log, envs: Iterable[str], scorers: Sequence[ScorerVersion]
) -> dict[str, RewardsByUid]:
    """The rewards of these scorers, by env and then by the uid of the rollout. An env without any
    is not among them, and keeps the rewards that it has.

    Raises ConfigError where a scorer has judged nothing, or a rollout lacks its reward.
    """
    by_env: dict[str, RewardsByUid] = {}
    used: dict[ScorerVersion, None] = {}
    for env in envs:
        of_env: dict[str, list[Reward]] = {}
        for scorer in scorers:
            rewards = rewards_of_scorer(old, env, *scorer)
            if not rewards:
                continue
            used[scorer] = None
            _check_complete(old, env, scorer, rewards)
            for uid, given in rewards.items():
                of_env.setdefault(uid, []).extend(given)
        if of_env:
            by_env[env] = of_env
    for scorer in scorers:
        if scorer not in used:
            raise ConfigError(
                f"--rewards {scorer}: no rollout has a reward of that scorer and version; give them"
                " with `streamrl rescore`"
            )
    return by_env


def _check_complete(old: Log, env: str, scorer: ScorerVersion, rewards: RewardsByUid) -> None:
    """Raises ConfigError if there are rollouts of the env that the scorer has not judged."""
    missing = 0
    for _, rollout, _ in rollouts_of(old, [env]):
        is_judged = rollout.failure or rollout.misaligned or rollout.rollout_uid in rewards
        missing += not is_judged
    if missing:
        raise ConfigError(
            f"--rewards {scorer}: {missing:,} rollouts of env {env} have no reward of it; let"
            " `streamrl rescore` finish (stop the run first if it still samples)"
        )


def with_new_rewards(
    rollout: Rollout, rewards: Sequence[Reward], weights: Mapping[str, float]
) -> Rollout:
    """The rollout with these rewards instead of its rewards, weighted as in a live run. It is a
    failed one if a reward has failed. A rollout that has failed itself stays as it is.

    Raises ConfigError if two scorers give a reward of the same name, and StreamrlError if there is
    no reward at all.
    """
    if rollout.failure or rollout.misaligned:
        return rollout
    if not rewards:
        raise StreamrlError(
            f"rollout {rollout.rollout_uid!r} was published meanwhile; {STOP_FIRST}"
        )
    values = dict[str, float]()
    for reward in rewards:
        if reward.failure:
            return as_failed(rollout, f"reward {reward.name!r}: {reward.failure}")
        if reward.name in values:
            raise ConfigError(f"--rewards: two scorers give {reward.name!r}; take one of them")
        values[reward.name] = reward.value
    sampled = [turn for turn in rollout.turns if turn.logprobs is not None]
    lengths = [len(turn.tokens) for turn in sampled if turn.tokens is not None]
    weighted = apply_weights(RewardBreakdown(rollout=values), weights, lengths)
    return msgspec.structs.replace(
        rollout,
        turns=with_rewards(rollout.turns, weighted),
        reward=weighted.reward,
        rewards=weighted.totals,
    )


def as_failed(rollout: Rollout, failure: str) -> Rollout:
    """The rollout as one that has failed, as the engine makes it: without turns and rewards."""
    return msgspec.structs.replace(
        rollout,
        turns=[],
        metadata={},
        reward=0.0,
        rewards={},
        temperature=1.0,
        newest_policy_version=rollout.policy_version,
        truncated=False,
        failure=failure,
    )
