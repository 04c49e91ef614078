"""A session and its rewards as a rollout. Pure: the same records give the same rollout.

The calls become the fewest sequences (`sessions/call_tree.py`), one after another in the rollout's
turns: each sequence but the first begins with a turn that is a `fork` and repeats the tokens before
it, none of them as a sampled one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from streamrl.config import topology
from streamrl.envs.api import RewardBreakdown
from streamrl.envs.engine.rewards import apply_weights, with_rewards
from streamrl.errors import describe_error
from streamrl.log.codec import decode, encode
from streamrl.records import ModelCall, Reward, Rollout, SessionEnd, SessionStart, Turn, token_dtype
from streamrl.sessions.call_tree import CallTree, InvalidCall, context, sequences
from streamrl.sessions.messages import joined_text


class NoRollout(Exception):
    """There is nothing to train on; the message says why."""


def to_rollout(
    start: SessionStart,
    group_id: str,
    calls: Sequence[ModelCall],
    rewards: Sequence[Reward],
    end: SessionEnd | None,
    weights: Mapping[str, float],
) -> Rollout:
    """The rollout of a session. It is a failed one where the session or a reward has failed, or
    where no reader would accept it.

    `calls` and `rewards` are in the order of the log. Of several rewards of one name for the same
    call, or for the whole rollout, the last counts. Without an `end` the session was ended because
    nothing happened any more.
    """
    counted = valid_calls(calls)
    versions = [span.version for c in counted for span in c.inference_metadata.version_spans]
    try:
        if end is not None and end.failure:
            raise NoRollout(end.failure)
        return _trained(start, group_id, counted, versions, rewards, end, weights)
    except (NoRollout, InvalidCall) as error:
        cause = str(error)
    except Exception as error:  # an agent may send anything
        cause = describe_error(error)
    return failed_rollout(start, group_id, cause, max(min(versions, default=0), 0))


def failed_rollout(start: SessionStart, group_id: str, cause: str, version: int) -> Rollout:
    """A rollout without turns, which says why there are none."""
    return Rollout(
        environment=start.environment,
        problem_id=start.problem_id,
        rollout_uid=start.session,
        turns=[],
        group_id=group_id,
        producer=topology.outside_identity(start.environment),
        policy_version=version,
        newest_policy_version=version,
        failure=cause.encode("utf-8", "replace").decode(),
    )


def valid_calls(calls: Sequence[ModelCall]) -> list[ModelCall]:
    """The calls that count, in their order: the first answer to each request, and none that goes on
    from a call that is not there.
    """
    tree = CallTree()
    for call in calls:
        try:
            tree.add(call)
        except InvalidCall:
            continue
    return list(tree.calls.values())


def to_turns(calls: Sequence[ModelCall]) -> list[Turn]:
    """The turns of all sequences, one sequence after another. Each call is two turns: what was
    asked, with the tokens that nobody sampled, and what the policy said.
    """
    by_id = {call.call: call for call in calls}
    turns = list[Turn]()
    for sequence in sequences(calls):
        for place, call in enumerate(sequence):
            begins = place == 0
            prompt = call.prompt
            if begins and call.continues and not call.fork:
                before = context(by_id, call.continues)
                prompt = np.concatenate([before, call.prompt.astype(np.uint32)])
            turns += _turns_of(call, prompt, fork=begins and bool(turns))
    return turns


def _turns_of(call: ModelCall, prompt: np.ndarray, fork: bool) -> list[Turn]:
    how = call.inference_metadata
    largest = int(max(prompt.max(initial=0), call.tokens.max()))
    asked = Turn(
        message=joined_text(call.messages),
        role=str(call.messages[-1]["role"]) if call.messages else "user",
        tokens=prompt.astype(token_dtype(largest + 1)),
        fork=fork,
        timestamp=call.time_s - how.latency_s,
    )
    said = Turn(
        message=call.text,
        role="assistant",
        tokens=call.tokens,
        logprobs=call.logprobs,
        entropies=call.entropies,
        inference_metadata=how,
        timestamp=call.time_s,
    )
    return [asked, said]


def breakdown(calls: Sequence[ModelCall], rewards: Sequence[Reward]) -> RewardBreakdown:
    """The rewards by name, of the whole rollout and of each call in the order of the turns.

    Raises NoRollout for a reward that has failed, or is of a call that is not there.
    """
    order = [call.call for sequence in sequences(calls) for call in sequence]
    of_rollout = dict[str, float]()
    of_calls: list[dict[str, float]] = [{} for _ in order]
    for reward in last_of_each(rewards):
        if reward.failure:
            raise NoRollout(f"reward {reward.name!r}: {reward.failure}")
        if not reward.call:
            of_rollout[reward.name] = reward.value
        elif reward.call in order:
            of_calls[order.index(reward.call)][reward.name] = reward.value
        else:
            raise NoRollout(
                f"reward {reward.name!r} is of call {reward.call!r}, which is not there"
            )
    return RewardBreakdown(of_rollout, of_calls if any(of_calls) else ())


def last_of_each(rewards: Sequence[Reward]) -> list[Reward]:
    """The last reward of each name and call."""
    return list({(reward.name, reward.call): reward for reward in rewards}.values())


def _trained(
    start: SessionStart,
    group_id: str,
    calls: Sequence[ModelCall],
    versions: Sequence[int],
    rewards: Sequence[Reward],
    end: SessionEnd | None,
    weights: Mapping[str, float],
) -> Rollout:
    if not calls:
        raise NoRollout("the session ended before the policy was asked")
    turns = to_turns(calls)
    weighted = apply_weights(
        breakdown(calls, rewards),
        weights,
        [
            len(turn.tokens)
            for turn in turns
            if turn.logprobs is not None and turn.tokens is not None
        ],
    )
    temperatures = {call.inference_metadata.temperature for call in calls}
    metadata = dict[str, Any](start.metadata)
    forks = Counter(call.fork for call in calls if call.fork)
    if forks:
        metadata["forks"] = dict(sorted(forks.items()))
    truncation = _truncation(calls, end)
    if truncation:
        metadata["truncation"] = truncation
    rollout = Rollout(
        environment=start.environment,
        problem_id=start.problem_id,
        rollout_uid=start.session,
        turns=with_rewards(turns, weighted),
        metadata=metadata,
        group_id=group_id,
        producer=topology.outside_identity(start.environment),
        reward=weighted.reward,
        rewards=weighted.totals,
        temperature=calls[0].inference_metadata.temperature,
        policy_version=min(versions),
        newest_policy_version=max(versions),
        truncated=bool(truncation),
        misaligned=(
            f"its calls were sampled at the temperatures {sorted(temperatures)}"
            if len(temperatures) > 1
            else ""
        ),
    )
    # what a reader would refuse is found here, where the group can still close
    decode("rollout/1", encode(rollout))
    return rollout


def _truncation(calls: Sequence[ModelCall], end: SessionEnd | None) -> str:
    """The limit that has ended the session; empty if it came to an end by itself."""
    if end is None:
        return "time"
    if end.truncation:
        return end.truncation
    return "length" if calls[-1].inference_metadata.finish_reason == "length" else ""
