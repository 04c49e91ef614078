"""What came in from an env between two policy versions: which rollouts are refused, and the
`replays/` metrics over the others.
"""

from __future__ import annotations

import math
from functools import lru_cache

import msgspec
import numpy as np

from streamrl.buffer.groups import generated_tokens, sequences
from streamrl.log.protocol import Event
from streamrl.records import Rollout, Turn

REWARD_LIMIT = 1e18  # squares and sums of rewards up to it are finite in float32
TEMPERATURES = (1e-6, 1e6)
# no sampler in float32 draws a token below -104, so what is below -1000 stands for a missing one;
# above 0: rounding
LOGPROBS = (-1000.0, 1e-3)
ID_CHARS = 256  # of a uid, a group id, a producer: they are remembered
REWARD_NAMES = 256  # of a rollout, and that an env has metrics of
# a rollout of so many tokens that were all sampled with probability 1 is counted, and warned of
SUSPICIOUS_TOKENS = 8


def objection(
    rollout: Rollout, key: str, environment: str, newest_version: int, vocab_size: int = 0
) -> str:
    """Why this readable rollout cannot be used, in a line; empty when it can.

    `newest_version` is the furthest ahead that is held; `vocab_size` bounds token ids, 0 if nobody
    has said it.
    """
    if rollout.environment != environment:
        return (
            f"rollout says environment {rollout.environment!r} but lies in rollouts.{environment}"
        )
    if key != rollout.group_id:
        return f"key {key!r} is not the rollout's group_id {rollout.group_id!r}: its group would be split over partitions"
    if rollout.newest_policy_version > newest_version:
        return f"policy version {rollout.newest_policy_version} is further ahead than {newest_version}: nobody has announced it"
    if max(map(abs, _rewards(rollout))) > REWARD_LIMIT:
        return f"a reward is larger than {REWARD_LIMIT:g}: its group could not be scored"
    if not TEMPERATURES[0] <= rollout.temperature <= TEMPERATURES[1]:
        return f"temperature {rollout.temperature:g} is not within {TEMPERATURES[0]:g} and {TEMPERATURES[1]:g}"
    for turn in rollout.turns:
        if vocab_size and (cause := _foreign_token(turn, vocab_size)):
            return cause
        how = turn.inference_metadata
        if how is not None and turn.logprobs is not None and (how.top_p < 1 or how.top_k > 0):
            return f"sampled with top_p {how.top_p} and top_k {how.top_k}: the learner reproduces temperature only; sample with top_p 1 and top_k -1"
    return ""


def unsound(event: Event, rollout: Rollout, max_seq_len: int = 0, partitions: int = 0) -> str:
    """What speaks against a rollout since `rules_version` 1, in a line; empty: nothing. 0 of either
    bound: nobody has said it.
    """
    for name in ("rollout_uid", "group_id", "problem_id", "producer"):
        if len(getattr(rollout, name)) > ID_CHARS:
            return f"{name} has {len(getattr(rollout, name)):,} characters, more than {ID_CHARS}"
    if partitions > 1 and event.partition != (meant := partition_of(event.key, partitions)):
        return f"it lies in partition {event.partition}, and murmur2 of its key {event.key!r} is partition {meant}: its group would be split"
    if rollout.failure or rollout.misaligned:
        return ""
    if len(rollout.rewards) > REWARD_NAMES:
        return f"it has {len(rollout.rewards):,} named rewards, more than {REWARD_NAMES}"
    if not says_reward(event, rollout):
        return "it has no reward: send `reward`, 0.0 too, or say in `failure` why there is none"
    if max_seq_len and rollout.total_tokens > max_seq_len:
        longest = max(
            sum(len(turn.tokens) for turn in turns if turn.tokens is not None)
            for turns in sequences(rollout)
        )
        if longest > max_seq_len:
            return f"it has {longest:,} tokens, more than model.max_seq_len {max_seq_len:,}"
    for turn in rollout.turns:
        if turn.logprobs is not None and turn.logprobs.size:
            least, most = (
                turn.logprobs.item(turn.logprobs.argmin()),
                turn.logprobs.item(turn.logprobs.argmax()),
            )
            if not LOGPROBS[0] <= least <= most <= LOGPROBS[1]:
                odd = most if most > LOGPROBS[1] else least
                return f"logprob {odd:g} is not within {LOGPROBS[0]:g} and 0: no softmax gives it"
        if turn.inference_metadata is None:
            continue
        if len(turn.inference_metadata.version_spans) > (
            0 if turn.tokens is None else len(turn.tokens)
        ):
            return f"a turn has {len(turn.inference_metadata.version_spans):,} version_spans, more than tokens"
        for span in turn.inference_metadata.version_spans:
            if not rollout.policy_version <= span.version <= rollout.newest_policy_version:
                claimed = f"policy_version {rollout.policy_version} to newest_policy_version {rollout.newest_policy_version}"
                return f"version_spans name version {span.version}, and the rollout {claimed}"
    return ""


def foreign_token(rollout: Rollout, vocab_size: int) -> str:
    """That a token id of the rollout is not in a vocabulary of that size; empty when all are."""
    return next(filter(None, (_foreign_token(turn, vocab_size) for turn in rollout.turns)), "")


def _foreign_token(turn: Turn, vocab_size: int) -> str:
    if turn.tokens is None or not len(turn.tokens):
        return ""
    largest = _largest(turn.tokens)
    if largest < vocab_size:
        return ""
    return f"token id {largest} is not in the policy's vocabulary of {vocab_size}"


def says_reward(event: Event, rollout: Rollout) -> bool:
    """Does the record say what the rollout has earned? A `reward` of 0 is the default, so its key
    is looked for among the bytes.
    """
    if rollout.reward or rollout.rewards or event.value is None:
        return True
    return "reward" in msgspec.msgpack.decode(event.value, type=dict[str, msgspec.Raw])


@lru_cache(4096)
def partition_of(key: str, partitions: int) -> int:
    """The partition of a key, as Kafka's Java clients choose it: murmur2 of its bytes, without the
    sign, modulo the number of partitions.
    """
    data, mask, mixer = key.encode("utf-8", "surrogateescape"), 0xFFFFFFFF, 0x5BD1E995
    found = 0x9747B28C ^ len(data)
    whole = len(data) & ~3
    for start in range(0, whole, 4):
        word = int.from_bytes(data[start : start + 4], "little") * mixer & mask
        word = (word ^ word >> 24) * mixer & mask
        found = (found * mixer & mask) ^ word
    if rest := data[whole:]:
        found = (found ^ int.from_bytes(rest, "little")) * mixer & mask
    found = (found ^ found >> 13) * mixer & mask
    return ((found ^ found >> 15) & 0x7FFFFFFF) % partitions


def is_suspicious(rollout: Rollout) -> bool:
    """Is every logprob exactly 0? A policy may be as sure as that, and a client that does not ask
    for logprobs sends the same.
    """
    sampled = [turn.logprobs for turn in rollout.turns if turn.logprobs is not None]
    return sum(len(logprobs) for logprobs in sampled) >= SUSPICIOUS_TOKENS and not any(
        logprobs.any() for logprobs in sampled
    )


def _largest(tokens: np.ndarray) -> int:
    return tokens.item(tokens.argmax())  # a third of the time that max takes, at every rollout


def _rewards(rollout: Rollout) -> list[float]:
    """Every single one: of the rollout, of its turns, and the largest of a turn's tokens."""
    found = [rollout.reward, *rollout.rewards.values()]
    for turn in rollout.turns:
        found += [turn.reward or 0.0, *turn.rewards.values()]
        if turn.token_rewards is not None and turn.token_rewards.size:
            found.append(float(np.abs(turn.token_rewards).max()))
    return found


class Moments(msgspec.Struct):
    """Sums from which mean and standard deviation follow."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        self.count, self.total, self.squares = (
            self.count + 1,
            self.total + value,
            self.squares + value * value,
        )

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @property
    def std(self) -> float:
        """Of the population: divided by n."""
        return math.sqrt(max(self.squares / self.count - self.mean**2, 0.0)) if self.count else 0.0


class Intake(msgspec.Struct):
    """Counts over the rollouts of one env since the last version."""

    rollouts: int = 0
    tokens: int = 0
    generated_tokens: int = 0
    truncated: int = 0
    failed: int = 0
    flat_groups: int = 0
    misaligned: int = 0
    suspicious: int = 0
    crowded_out: int = 0  # groups that a full window closed below their minimum
    unscored: str = ""  # why the last group that could not be scored could not
    reward: Moments = msgspec.field(default_factory=Moments)
    rewards: dict[str, Moments] = {}

    def count(self, rollout: Rollout, tokens: int) -> None:
        """`tokens`: of all its turns."""
        if rollout.misaligned:
            self.misaligned += 1
            return
        if rollout.failure:
            self.failed += 1
            return
        self.rollouts += 1
        self.tokens += tokens
        self.generated_tokens += generated_tokens(rollout)
        self.truncated += rollout.truncated
        self.suspicious += is_suspicious(rollout)
        self.reward.add(rollout.reward)
        for name, value in rollout.rewards.items():
            if name in self.rewards or len(self.rewards) < REWARD_NAMES:
                self.rewards.setdefault(name, Moments()).add(value)

    def values(self, env: str) -> dict[str, float]:
        """By the names of docs/design/overview.md."""
        named = {f"rewards/{name}": moments for name, moments in self.rewards.items()}
        over = {
            f"{name}/{what}": value
            for name, m in {"reward": self.reward, **named}.items()
            for what, value in (("mean", m.mean), ("std", m.std))
            if m.count
        }
        counts = {
            "new_rollouts": float(self.rollouts),
            "new_tokens": float(self.tokens),
            "new_generated_tokens": float(self.generated_tokens),
            "frac_truncated": self.truncated / self.rollouts if self.rollouts else 0.0,
            "new_failed": float(self.failed),
            "zero_advantage_groups": float(self.flat_groups),
            "new_misaligned": float(self.misaligned),
            "suspicious_logprobs": float(self.suspicious),
        }
        return {f"replays/{env}/{name}": value for name, value in {**counts, **over}.items()}
