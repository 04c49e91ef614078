"""Model calls as the turns of a rollout. Pure: the same calls give the same rollout.

The calls become the fewest sequences (`call_tree.py`), one after another in the rollout's turns:
each sequence but the first begins with a turn that is a `fork`, and has in it where it branches
from an earlier one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from streamrl.envs.sessions.call_tree import sequences, tokens_before
from streamrl.envs.sessions.messages import joined_text
from streamrl.stream.log.codec import decode, encode
from streamrl.stream.records import ModelCall, Rollout, Turn
from streamrl.stream.records.compact import join_ids

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
    it was received after all if a call continues it. A fork of a call that is left out has its
    whole prompt.
    """
    by_id = {call.call: call for call in calls}
    continued = {call.continues for call in calls}
    needed = set[str]()
    kept = list[ModelCall]()
    for call in reversed(calls):
        is_trained = call.trained and (not call.lost or call.call in continued)
        if is_trained or call.call in needed:
            kept.append(structs.replace(call, trained=is_trained))
            if not call.fork:
                needed.add(call.continues)
    names = {call.call for call in kept}
    return [
        _with_whole_prompt(by_id, call) if call.kept and call.continues not in names else call
        for call in reversed(kept)
    ]


def _with_whole_prompt(calls: Mapping[str, ModelCall], call: ModelCall) -> ModelCall:
    """The fork with the tokens that it keeps in its own prompt. Their routed experts are not known:
    0.
    """
    before = tokens_before(calls, call)
    experts = call.routed_experts
    if experts is not None:
        unknown = np.zeros((len(before), *experts.shape[1:]), experts.dtype)
        experts = np.concatenate([unknown, experts])
    prompt = join_ids([before, call.prompt])
    return structs.replace(call, prompt=prompt, kept=0, routed_experts=experts)


def in_order_of_turns(calls: Sequence[ModelCall]) -> list[ModelCall]:
    """The calls that are trained on, in the order of their turns in the rollout."""
    return [call for sequence in sequences(calls) for call in sequence if call.trained]


def count_tokens(calls: Sequence[ModelCall]) -> int:
    """How many tokens `to_turns` makes of the calls. They may be many more than those of the calls,
    because each sequence has the tokens before it.
    """
    ends = dict[str, int]()  # by call: tokens up to the end of its answer
    for call in calls:
        before = call.kept if call.fork else ends.get(call.continues, 0)
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
    ends = dict[str, Branch]()  # by call: the end of its answer
    turns = list[Turn]()
    for number, sequence in enumerate(sequences(calls)):
        branch = _branch_of(sequence[0], ends)
        length = branch.tokens
        for index, call in enumerate(sequence):
            request, answer = _turns_of(call)
            if number and not index:
                request = structs.replace(
                    request, fork=True, fork_of=branch.sequence, fork_at=branch.tokens
                )
            turns += [request, answer]
            length += len(call.prompt) + len(call.tokens)
            ends[call.call] = Branch(number, length)
    return turns


class Branch(NamedTuple):
    """A place in a sequence of the rollout: after its first tokens."""

    sequence: int
    tokens: int


def _branch_of(call: ModelCall, ends: Mapping[str, Branch]) -> Branch:
    """Where the sequence that this call begins branches from an earlier one. `ends`: where the
    answer of each call ends.
    """
    if not call.continues or (call.fork and not call.kept):
        return Branch(0, 0)
    sequence, tokens = ends[call.continues]
    return Branch(sequence, call.kept if call.fork else tokens)


def _turns_of(call: ModelCall) -> tuple[Turn, Turn]:
    """The request and the answer."""
    metadata = call.inference_metadata
    prompt = call.prompt
    experts = call.routed_experts
    request = Turn(
        message=joined_text(call.messages),
        role=str(call.messages[-1]["role"]) if call.messages else "user",
        tokens=prompt,
        timestamp=call.time_s - metadata.latency_s,
        routed_experts=None if experts is None else experts[: len(prompt)],
    )
    answer = Turn(
        message=call.text,
        role="assistant",
        tokens=call.tokens,
        logprobs=call.logprobs if call.trained else None,
        inference_metadata=metadata,
        timestamp=call.time_s,
        routed_experts=None if experts is None else experts[len(prompt) :],
    )
    return request, answer
