"""Which rollouts the buffer refuses, and why. Each function returns the reason in a line, empty
where there is none.
"""

from __future__ import annotations

import msgspec
import numpy as np

from streamrl.buffer.groups import trained_sequences
from streamrl.buffer.state import BufferConfig, BufferState
from streamrl.stream.log.partitioner import partition_of
from streamrl.stream.log.protocol import Event
from streamrl.stream.records import Rollout, Turn
from streamrl.stream.records.compact import wide_ids
from streamrl.stream.records.limits import MAX_ID, MAX_REWARD, MAX_REWARD_NAMES

TEMPERATURES = (1e-6, 1e6)
# No sampler in float32 draws a token below -104. A logprob below -1000 marks a missing one.
# A logprob slightly above 0 is rounding.
LOGPROBS = (-1000.0, 1e-3)


def refusal(
    event: Event, rollout: Rollout, env: str, rules: BufferConfig, state: BufferState
) -> str:
    """Why this readable rollout of the env's topic cannot be used, by the rules of the env. A bound
    of 0 is not known.
    """
    cause = (
        _wrong_place(event, rollout, env, rules.partitions)
        or _wrong_name(rollout)
        or _wrong_number(rollout, state.version + rules.ahead)
        or _wrong_sampling(rollout, state.vocab_size)
    )
    if cause or rollout.failure or rollout.misaligned:
        return cause  # the others are not trained on
    return _wrong_reward(event, rollout) or _wrong_tokens(rollout, rules.max_seq_len)


def _wrong_place(event: Event, rollout: Rollout, env: str, partitions: int) -> str:
    """Is the record in another topic, or under another key, than its group's?"""
    if rollout.environment != env:
        return f"its environment is {rollout.environment!r}, and it is in {event.topic}"
    if event.key != rollout.group_id:
        return (
            f"key {event.key!r} is not the rollout's group_id {rollout.group_id!r}: "
            "its group would be split over partitions"
        )
    if partitions > 1:
        expected = partition_of(event.key, partitions)
        if event.partition != expected:
            return (
                f"it is in partition {event.partition}, and murmur2 of its key {event.key!r} is "
                f"partition {expected}: its group would be split"
            )
    return ""


def _wrong_name(rollout: Rollout) -> str:
    for field in ("rollout_uid", "group_id", "problem_id", "producer"):
        length = len(getattr(rollout, field))
        if length > MAX_ID:
            return f"{field} has {length:,} characters, more than {MAX_ID}"
    return ""


def _wrong_number(rollout: Rollout, newest_version: int) -> str:
    """`newest_version`: rollouts of later versions are not held."""
    if rollout.newest_policy_version > newest_version:
        return (
            f"policy version {rollout.newest_policy_version} is further ahead than "
            f"{newest_version}, and is not announced"
        )
    if max(map(abs, _rewards(rollout))) > MAX_REWARD:
        return f"a reward is larger than {MAX_REWARD:g}: its group could not be scored"
    lowest, highest = TEMPERATURES
    if not lowest <= rollout.temperature <= highest:
        return f"temperature {rollout.temperature:g} is not within {lowest:g} and {highest:g}"
    return ""


def _wrong_sampling(rollout: Rollout, vocab_size: int) -> str:
    """Tokens that the policy does not have, or logprobs of another distribution than its own."""
    for turn in rollout.turns:
        cause = _foreign_token(turn, vocab_size) if vocab_size else ""
        if cause:
            return cause
        how = turn.inference_metadata
        if how is not None and turn.logprobs is not None and (how.top_p < 1 or how.top_k > 0):
            return (
                f"sampled with top_p {how.top_p} and top_k {how.top_k}: the learner reproduces "
                "temperature only; sample with top_p 1 and top_k -1"
            )
    return ""


def _wrong_reward(event: Event, rollout: Rollout) -> str:
    if len(rollout.rewards) > MAX_REWARD_NAMES:
        return f"it has {len(rollout.rewards):,} named rewards, more than {MAX_REWARD_NAMES}"
    if not _has_reward(event, rollout):
        return "it has no reward: send `reward`, 0.0 too, or the reason for none in `failure`"
    return ""


def _wrong_tokens(rollout: Rollout, max_seq_len: int) -> str:
    if max_seq_len and rollout.total_tokens > max_seq_len:
        longest = max(
            turns[0].fork_at + sum(turn.token_count for turn in turns)
            for turns in trained_sequences(rollout).values()
        )
        if longest > max_seq_len:
            return f"it has {longest:,} tokens, more than model.max_seq_len {max_seq_len:,}"
    for turn in rollout.turns:
        cause = _invalid_logprob(turn) or _invalid_spans(turn, rollout)
        if cause:
            return cause
    return ""


def foreign_token(rollout: Rollout, vocab_size: int) -> str:
    """The first token id of the rollout that is not in a vocabulary of this size."""
    for turn in rollout.turns:
        cause = _foreign_token(turn, vocab_size)
        if cause:
            return cause
    return ""


def _foreign_token(turn: Turn, vocab_size: int) -> str:
    if turn.tokens is None or not len(turn.tokens):
        return ""
    largest = _largest(turn.tokens)
    if largest < vocab_size:
        return ""
    return f"token id {largest} is not in the policy's vocabulary of {vocab_size}"


def _invalid_logprob(turn: Turn) -> str:
    logprobs = turn.logprobs
    if logprobs is None or not logprobs.size or logprobs.dtype == np.uint16:
        return ""  # compact ones are in the range
    # as fast as `_largest`
    smallest = logprobs.item(logprobs.argmin())
    largest = logprobs.item(logprobs.argmax())
    low, high = LOGPROBS
    if low <= smallest <= largest <= high:
        return ""
    wrong = largest if largest > high else smallest
    return f"logprob {wrong:g} is not within {low:g} and 0: no softmax gives it"


def _invalid_spans(turn: Turn, rollout: Rollout) -> str:
    if turn.inference_metadata is None:
        return ""
    spans = turn.inference_metadata.version_spans
    if len(spans) > turn.token_count:
        return f"a turn has {len(spans):,} version_spans, more than tokens"
    oldest = rollout.policy_version
    newest = rollout.newest_policy_version
    for span in spans:
        if not oldest <= span.version <= newest:
            return (
                f"version_spans name version {span.version}, and the rollout policy_version "
                f"{oldest} to newest_policy_version {newest}"
            )
    return ""


def _has_reward(event: Event, rollout: Rollout) -> bool:
    """Does the record have what the rollout has earned? A `reward` of 0 is the default, so only the
    bytes tell whether it was sent.
    """
    if rollout.reward or rollout.rewards or event.value is None:
        return True
    return "reward" in msgspec.msgpack.decode(event.value, type=dict[str, msgspec.Raw])


def _largest(tokens: np.ndarray) -> int:
    # It takes a third of the time of `max`, and is asked for every rollout.
    ids = wide_ids(tokens)
    return ids.item(ids.argmax())


def _rewards(rollout: Rollout) -> list[float]:
    """All rewards of the rollout and its turns, and the largest one of each turn's tokens."""
    rewards = [rollout.reward, *rollout.rewards.values()]
    for turn in rollout.turns:
        rewards += [turn.reward or 0.0, *turn.rewards.values()]
        if turn.token_rewards is not None and turn.token_rewards.size:
            rewards.append(float(np.abs(turn.token_rewards).max()))
    return rewards
