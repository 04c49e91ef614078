"""A session and its rewards as a rollout. Pure: the same records give the same rollout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from streamrl.config import topology
from streamrl.envs.sessions import rollouts
from streamrl.envs.sessions.call_tree import CallTree, InvalidCall
from streamrl.envs.sessions.names import short_name
from streamrl.envs.sessions.rewards import RewardBreakdown, apply_weights, with_rewards
from streamrl.envs.sessions.rollouts import (
    RolloutName,
    in_order_of_turns,
    kept_calls,
    sampled_versions,
    to_turns,
)
from streamrl.stream.records import ModelCall, Reward, Rollout, SessionEnd, SessionStart
from streamrl.system.errors import describe_error


class NoRollout(Exception):
    """There is nothing to train on; the message is the reason."""


def assemble_rollout(
    start: SessionStart,
    group_id: str,
    calls: Sequence[ModelCall],
    rewards: Sequence[Reward],
    end: SessionEnd,
    weights: Mapping[str, float],
) -> Rollout:
    """The rollout of a session. It is a failed one if the session or a reward has failed, or if no
    reader would accept it.

    `calls` and `rewards` are in the order of the log. Of several rewards of one name for the same
    call, or for the whole rollout, the last counts.
    """
    valid = valid_calls(calls)
    try:
        if end.failure:
            raise NoRollout(end.failure)
        return _assemble_trainable(start, group_id, valid, rewards, end, weights)
    except (NoRollout, InvalidCall) as error:
        cause = str(error)
    except Exception as error:  # an agent may send anything
        cause = describe_error(error)
    oldest = max(min(sampled_versions(valid), default=0), 0)
    return assemble_failed_rollout(start, group_id, cause, oldest)


def assemble_failed_rollout(
    start: SessionStart, group_id: str, cause: str, version: int = 0
) -> Rollout:
    """A rollout without turns, and the reason."""
    return rollouts.build_failed_rollout(_name(start, group_id), cause, version)


def valid_calls(calls: Sequence[ModelCall]) -> list[ModelCall]:
    """The calls that count, in their order: the first answer to each request, and none that
    continues a call which does not exist.
    """
    tree = CallTree()
    for call in calls:
        try:
            tree.add(call)
        except InvalidCall:
            continue
    return list(tree.calls.values())


def breakdown(calls: Sequence[ModelCall], rewards: Sequence[Reward]) -> RewardBreakdown:
    """The rewards by name, of the whole rollout and of each trained call in the order of the turns.
    That of a call which is not trained on is earned by the rollout. `calls`: those that count.

    Raises NoRollout for a reward that has failed, or is of a call that does not exist.
    """
    places = {call.call: i for i, call in enumerate(in_order_of_turns(kept_calls(calls)))}
    known = {call.call for call in calls}
    of_rollout = dict[str, float]()
    of_calls: list[dict[str, float]] = [{} for _ in places]
    for reward in {(each.name, each.call): each for each in rewards}.values():
        if reward.failure:
            raise NoRollout(f"reward {reward.name!r}: {reward.failure}")
        if reward.call and reward.call not in known:
            raise NoRollout(
                f"reward {reward.name!r} is of call {reward.call!r}, which is not there"
            )
        place = places.get(reward.call)
        if place is None:
            of_rollout[reward.name] = of_rollout.get(reward.name, 0.0) + reward.value
        else:
            of_calls[place][reward.name] = reward.value
    return RewardBreakdown(of_rollout, of_calls if any(of_calls) else ())


def _assemble_trainable(
    start: SessionStart,
    group_id: str,
    calls: Sequence[ModelCall],
    rewards: Sequence[Reward],
    end: SessionEnd,
    weights: Mapping[str, float],
) -> Rollout:
    if not calls:
        raise NoRollout("the session ended before the policy was asked")
    kept = kept_calls(calls)
    in_order = in_order_of_turns(kept)
    if not in_order:
        raise NoRollout("none of its answers is trained on: they were lost, or are left out")
    lengths = [len(call.tokens) for call in in_order]
    weighted = apply_weights(breakdown(calls, rewards), weights, lengths)
    metadata = dict[str, Any](start.metadata)
    forks = Counter(call.fork for call in kept if call.fork)
    if forks:
        metadata["forks"] = dict(sorted(forks.items()))
    if len(in_order) < len(calls):
        metadata["not_trained"] = len(calls) - len(in_order)
    truncation = _truncation(kept, end)
    if truncation:
        metadata["truncation"] = truncation
    return rollouts.build_rollout(
        name=_name(start, group_id),
        calls=[call for call in kept if call.trained],
        turns=with_rewards(to_turns(kept), weighted),
        reward=weighted.reward,
        rewards=weighted.totals,
        metadata=metadata,
        is_truncated=bool(truncation),
    )


def _name(start: SessionStart, group_id: str) -> RolloutName:
    return RolloutName(
        environment=start.environment,
        problem_id=short_name(start.problem_id),
        uid=start.session,
        group_id=group_id,
        producer=topology.outside_identity(start.environment),
    )


def _truncation(calls: Sequence[ModelCall], end: SessionEnd) -> str:
    """The limit that has ended the session; empty if it came to an end by itself."""
    if end.truncation:
        return end.truncation
    return "length" if calls[-1].inference_metadata.finish_reason == "length" else ""
