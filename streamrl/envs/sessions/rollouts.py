"""Model calls as the turns of a rollout. Pure: the same calls give the same rollout.

The calls become the fewest sequences (`call_tree.py`), one after another in the rollout's turns:
each sequence but the first begins with a turn that is a `fork` and repeats the tokens before it,
none of them as a sampled one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from streamrl.envs.sessions.call_tree import context, sequences
from streamrl.envs.sessions.messages import joined_text
from streamrl.stream.log.codec import decode, encode
from streamrl.stream.records import ModelCall, Rollout, Turn, token_dtype

SMALLEST = token_dtype(1)
MAX_TOKENS = 10_000_000  # of a rollout, over all its sequences: 80 MB with their logprobs
MAX_BYTES = 120_000_000  # of a rollout's record; a log takes 128 MB with key and headers
MAX_CAUSE = 1_000_000  # characters of a failure


class RolloutName(NamedTuple):
    """What a rollout is called, and who makes it."""

    environment: str
    problem_id: str
    uid: str
    group_id: str
    producer: str


def build_rollout(
    name: RolloutName,
    calls: Sequence[ModelCall],
    turns: Sequence[Turn],
    reward: float,
    rewards: dict[str, float],
    metadata: dict[str, Any],
    is_truncated: bool,
) -> Rollout:
    """The rollout of these calls, at least one. `turns`: those of `to_turns`, each with what it
    earned. Raises ValueError, or whatever msgspec raises, if a reader would refuse the rollout.
    """
    versions = sampled_versions(calls)
    temperatures = {call.inference_metadata.temperature for call in calls}
    rollout = Rollout(
        environment=name.environment,
        problem_id=name.problem_id,
        rollout_uid=name.uid,
        turns=list(turns),
        metadata=metadata,
        group_id=name.group_id,
        producer=name.producer,
        reward=reward,
        rewards=rewards,
        temperature=calls[0].inference_metadata.temperature,
        policy_version=min(versions),
        newest_policy_version=max(versions),
        truncated=is_truncated,
        misaligned=(
            f"its calls were sampled at the temperatures {sorted(temperatures)}"
            if len(temperatures) > 1
            else ""
        ),
    )
    # What a reader or a log would refuse is found here, where the group can still close.
    data = encode(rollout)
    if len(data) > MAX_BYTES:
        raise ValueError(f"the rollout has {len(data):,} bytes; {MAX_BYTES:,} are the most")
    decode("rollout/1", data)
    return rollout


def build_failed_rollout(name: RolloutName, cause: str, version: int) -> Rollout:
    """A rollout without turns, and the reason. Any `version` is taken, since it may
    be what cannot be.
    """
    version = min(max(version, 0), 2**31 - 1)
    return Rollout(
        environment=name.environment,
        problem_id=name.problem_id,
        rollout_uid=name.uid,
        turns=[],
        group_id=name.group_id,
        producer=name.producer,
        policy_version=version,
        newest_policy_version=version,
        failure=cause[:MAX_CAUSE].encode("utf-8", "replace").decode(),
    )


def sampled_versions(calls: Sequence[ModelCall]) -> list[int]:
    """The policy versions that sampled these calls, in order."""
    return [span.version for call in calls for span in call.inference_metadata.version_spans]


def kept_calls(calls: Sequence[ModelCall]) -> list[ModelCall]:
    """The calls that a rollout is made of: those that are trained on, and those that they continue.
    `trained` of each is whether it is trained on. An answer that its agent has not received is not;
    it was received after all if a call continues it.
    """
    continued = {call.continues for call in calls}
    needed = set[str]()
    kept = list[ModelCall]()
    for call in reversed(calls):
        is_trained = call.trained and (not call.lost or call.call in continued)
        if is_trained or call.call in needed:
            kept.append(structs.replace(call, trained=is_trained))
            if not call.fork:
                needed.add(call.continues)
    return kept[::-1]


def in_order_of_turns(calls: Sequence[ModelCall]) -> list[ModelCall]:
    """The calls that are trained on, in the order of their turns in the rollout."""
    return [call for sequence in sequences(calls) for call in sequence if call.trained]


def count_tokens(calls: Sequence[ModelCall]) -> int:
    """How many tokens `to_turns` makes of the calls. They may be many more than those of the calls,
    because each sequence begins with a copy of the tokens before it.
    """
    ends = dict[str, int]()  # by call: tokens up to the end of its answer
    for call in calls:
        before = 0 if call.fork else ends.get(call.continues, 0)
        ends[call.call] = before + len(call.prompt) + len(call.tokens)
    return sum(ends[sequence[-1].call] for sequence in sequences(calls))


def to_turns(calls: Sequence[ModelCall]) -> list[Turn]:
    """The turns of all sequences, one sequence after another. Each call is two turns: the request,
    whose tokens were not sampled, and the answer, whose tokens count as sampled if the call is
    trained on. Raises ValueError for more than MAX_TOKENS.
    """
    tokens = count_tokens(calls)
    if tokens > MAX_TOKENS:
        raise ValueError(
            f"its sequences have {tokens:,} tokens with what each repeats; {MAX_TOKENS:,} are the"
            " most"
        )
    by_id = {call.call: call for call in calls}
    turns = list[Turn]()
    for sequence in sequences(calls):
        for index, call in enumerate(sequence):
            is_first = index == 0
            prompt = call.prompt
            if is_first and call.continues and not call.fork:
                before = context(by_id, call.continues)
                prompt = np.concatenate([before, call.prompt.astype(np.uint32)])
            turns += _turns_of(call, prompt, fork=is_first and bool(turns))
    return turns


def _turns_of(call: ModelCall, prompt: np.ndarray, fork: bool) -> list[Turn]:
    metadata = call.inference_metadata
    if prompt.dtype != SMALLEST or call.tokens.dtype != SMALLEST:
        largest = int(max(prompt.max(initial=0), call.tokens.max()))
        prompt = prompt.astype(token_dtype(largest + 1))
    prompt_experts, answer_experts = _experts_of(call, len(prompt))
    request = Turn(
        message=joined_text(call.messages),
        role=str(call.messages[-1]["role"]) if call.messages else "user",
        tokens=prompt,
        fork=fork,
        timestamp=call.time_s - metadata.latency_s,
        routed_experts=prompt_experts,
    )
    answer = Turn(
        message=call.text,
        role="assistant",
        tokens=call.tokens,
        logprobs=call.logprobs if call.trained else None,
        inference_metadata=metadata,
        timestamp=call.time_s,
        routed_experts=answer_experts,
    )
    return [request, answer]


def _experts_of(call: ModelCall, prompt_tokens: int) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The routed experts of the request, which has `prompt_tokens` tokens, and of the answer. Those
    of tokens before the call's own prompt are not known: 0.
    """
    experts = call.routed_experts
    if experts is None:
        return None, None
    before = np.zeros((prompt_tokens - len(call.prompt), *experts.shape[1:]), experts.dtype)
    own = len(call.prompt)
    return np.concatenate([before, experts[:own]]), experts[own:]
