"""Which rollouts the buffer refuses, and why. Each function returns the reason in a line, empty
where there is none.
"""

from __future__ import annotations

import msgspec
import numpy as np

from streamrl.buffer.groups import split_sequences
from streamrl.buffer.state import BufferConfig, BufferState
from streamrl.buffer.stats import REWARD_NAMES
from streamrl.log.partitioner import partition_of
from streamrl.log.protocol import Event
from streamrl.records import Rollout, Turn

REWARD_LIMIT = 1e18  # squares and sums of rewards up to it are finite in float32
TEMPERATURES = (1e-6, 1e6)
# No sampler in float32 draws a token below -104, so a logprob below -1000 stands for a missing one.
# A logprob slightly above 0 is rounding.
LOGPROBS = (-1000.0, 1e-3)
ID_CHARS = 256  # of a uid, a group id, a producer: they are remembered


def refusal(
    event: Event, rollout: Rollout, env: str, rules: BufferConfig, state: BufferState
) -> str:
    """Why this readable rollout of the env's topic cannot be used, by the rules of the env."""
    cause = validate_rollout(
        rollout,
        key=event.key,
        environment=env,
        newest_version=state.version + rules.ahead,
        vocab_size=state.vocab_size,
    )
    if cause or not rules.rules_version:
        return cause
    return validate_strictly(
        event, rollout, rollout.total_tokens, rules.max_seq_len, rules.partitions
    )


def validate_rollout(
    rollout: Rollout, key: str, environment: str, newest_version: int, vocab_size: int = 0
) -> str:
    """Why this readable rollout cannot be used.

    `key`: of the record. `environment`: whose topic the record lies in. `newest_version`: rollouts
    of later versions are not held. `vocab_size`: bounds token ids; 0 if it is not known.
    """
    if rollout.environment != environment:
        return (
            f"rollout says environment {rollout.environment!r} but lies in rollouts.{environment}"
        )
    if key != rollout.group_id:
        return (
            f"key {key!r} is not the rollout's group_id {rollout.group_id!r}: "
            "its group would be split over partitions"
        )
    if rollout.newest_policy_version > newest_version:
        return (
            f"policy version {rollout.newest_policy_version} is further ahead than "
            f"{newest_version}: nobody has announced it"
        )
    if max(map(abs, _rewards(rollout))) > REWARD_LIMIT:
        return f"a reward is larger than {REWARD_LIMIT:g}: its group could not be scored"
    lowest, highest = TEMPERATURES
    if not lowest <= rollout.temperature <= highest:
        return f"temperature {rollout.temperature:g} is not within {lowest:g} and {highest:g}"
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


def validate_strictly(
    event: Event, rollout: Rollout, tokens: int, max_seq_len: int = 0, partitions: int = 0
) -> str:
    """Why this rollout is refused since `rules_version` 1. A bound of 0 is not known.

    `tokens`: of all its turns.
    """
    ids = (rollout.rollout_uid, rollout.group_id, rollout.problem_id, rollout.producer)
    lengths = [len(text) for text in ids]
    if max(lengths) > ID_CHARS:
        names = ("rollout_uid", "group_id", "problem_id", "producer")
        name, length = next(pair for pair in zip(names, lengths, strict=True) if pair[1] > ID_CHARS)
        return f"{name} has {length:,} characters, more than {ID_CHARS}"
    if partitions > 1:
        expected = partition_of(event.key, partitions)
        if event.partition != expected:
            return (
                f"it lies in partition {event.partition}, and murmur2 of its key {event.key!r} is "
                f"partition {expected}: its group would be split"
            )
    if rollout.failure or rollout.misaligned:
        return ""
    if len(rollout.rewards) > REWARD_NAMES:
        return f"it has {len(rollout.rewards):,} named rewards, more than {REWARD_NAMES}"
    if not says_reward(event, rollout):
        return "it has no reward: send `reward`, 0.0 too, or say in `failure` why there is none"
    if max_seq_len and tokens > max_seq_len:
        longest = max(sum(turn.token_count for turn in turns) for turns in split_sequences(rollout))
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
    if logprobs is None or not logprobs.size:
        return ""
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


def says_reward(event: Event, rollout: Rollout) -> bool:
    """Does the record say what the rollout has earned? A `reward` of 0 is the default, so only the
    bytes tell whether it was sent.
    """
    if rollout.reward or rollout.rewards or event.value is None:
        return True
    return "reward" in msgspec.msgpack.decode(event.value, type=dict[str, msgspec.Raw])


def _largest(tokens: np.ndarray) -> int:
    # It takes a third of the time of `max`, and is asked for every rollout.
    return tokens.item(tokens.argmax())


def _rewards(rollout: Rollout) -> list[float]:
    """All rewards of the rollout and its turns, and the largest one of each turn's tokens."""
    rewards = [rollout.reward, *rollout.rewards.values()]
    for turn in rollout.turns:
        rewards += [turn.reward or 0.0, *turn.rewards.values()]
        if turn.token_rewards is not None and turn.token_rewards.size:
            rewards.append(float(np.abs(turn.token_rewards).max()))
    return rewards
