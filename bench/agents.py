"""What an agent's rollout costs in each topic: 20 turns, once with nothing rewritten, and once with
thoughts cut from the history, so that each turn is a fork.

    python -m bench.agents [--vocab-size 150000]

No broker: the records are those that gateway, assembler, buffer and batcher write, without texts.
"""

from __future__ import annotations

import argparse
import time
from typing import Any, NamedTuple, TypeVar

import numpy as np

from bench.measure import markdown
from streamrl.batcher.assemble import assemble
from streamrl.buffer.advantages import rloo
from streamrl.buffer.groups import join_rollouts, score_group
from streamrl.envs.sessions.call_tree import CallTree, Continuation
from streamrl.envs.sessions.model_calls import locate_answer, to_call
from streamrl.envs.sessions.rollouts import RolloutName, build_rollout, to_turns
from streamrl.inference.clients.client import SampledCompletion
from streamrl.learner.model.examples import expand
from streamrl.stream.log.codec import decode, encode
from streamrl.stream.log.protocol import Event
from streamrl.stream.records import ModelCall, Record, VersionSpan

T = TypeVar("T")
GROUP = 8  # rollouts


class Shape(NamedTuple):
    """Of an agent's session, in tokens."""

    turns: int = 20
    system: int = 2_000  # the prompt of the first turn
    sampled: int = 300  # of a turn
    tool: int = 700  # that follow a turn
    kept: int = 300  # of a turn's sampled tokens: the last ones, which the template keeps


SHAPES = {"nothing rewritten": Shape(), "thoughts cut, a fork a turn": Shape(kept=100)}


def session(name: str, shape: Shape, system: np.ndarray, random: np.random.Generator, ids: int):
    """The model calls of a session, as the gateway records them."""
    tree = CallTree()
    history = system
    continuation = Continuation("", [])
    for turn in range(shape.turns):
        kept = len(tree.context(continuation.call)) if continuation.call else 0
        sampled = SampledCompletion(
            server_id="inference-0",
            prompt_tokens=history,
            tokens=drawn(random, ids, shape.sampled),
            logprobs=-random.exponential(1.0, shape.sampled).astype(np.float32),
            text="",
            finish_reason="stop",
            version_spans=[VersionSpan(version=3, start=0, end=shape.sampled)],
            latency_s=1.0,
            temperature=1.0,
            top_p=1.0,
            top_k=-1,
            max_tokens=shape.sampled,
            prefix_tokens=kept if shape.kept == shape.sampled else 0,
        )
        position = locate_answer(tree, [], continuation, sampled)
        call = to_call(name, f"call-{turn}", f"request-{turn}", position, sampled)
        tree.add(call)
        answer = sampled.tokens[shape.sampled - shape.kept :]
        history = np.concatenate((history, answer, drawn(random, ids, shape.tool)))
        continuation = Continuation(call.call, [])
    return list(tree.calls.values())


def drawn(random: np.random.Generator, ids: int, count: int) -> np.ndarray:
    return random.integers(0, ids, count).astype(np.uint16 if ids <= 1 << 16 else np.uint32)


def measure(shape: Shape, ids: int, seed: int = 0) -> dict[str, float]:
    """Bytes a rollout by topic, tokens a rollout, and ms of CPU a rollout from the rollouts'
    record to the learner's arrays.
    """
    random = np.random.default_rng(seed)
    system = drawn(random, ids, shape.system)
    sessions = [session(f"s-{i}", shape, system, random, ids) for i in range(GROUP)]
    rollouts = [rollout_of(f"s-{i}", calls, float(i % 2)) for i, calls in enumerate(sessions)]
    sent = [encode(rollout) for rollout in rollouts]
    begun = time.process_time()
    events = [
        Event("rollouts.agents", 0, i, "g", decode("rollout/1", data))
        for i, data in enumerate(sent)
    ]
    group = encode(score_group(events, rloo))
    read: Any = decode("scored-group/1", group)
    again: list[Any] = [decode("rollout/1", data) for data in sent]
    longest = shape.system + shape.turns * (shape.sampled + shape.tool)
    made = assemble([join_rollouts(read, again)], 0, 3, GROUP * shape.turns, longest)
    assert made is not None
    batch = encode(made)
    received: Any = decode("batch/1", batch)
    expand(received)
    spent = time.process_time() - begun
    topics = {
        "turns": sum(len(encode(call)) for calls in sessions for call in calls),
        "rollouts": sum(map(len, sent)),
        "groups": len(group),
        "batches": len(batch),
    }
    return {
        "tokens": sum(rollout.total_tokens for rollout in rollouts) / GROUP,
        **{topic: size / GROUP for topic, size in topics.items()},
        "all": sum(topics.values()) / GROUP,
        "cpu_ms": 1000 * spent / GROUP,
    }


def rollout_of(name: str, calls: list[ModelCall], reward: float) -> Record:
    return build_rollout(
        RolloutName("agents", "p", name, "g", "agents-0"),
        calls,
        to_turns(calls),
        reward,
        {"right": reward},
        {},
        is_truncated=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab-size", type=int, default=150_000)
    ids = parser.parse_args().vocab_size
    rows = list[list[str]]()
    for name, shape in SHAPES.items():
        found = [measure(shape, ids) for _ in range(5)]
        sizes = [f"{value:,.0f}" for key, value in found[0].items() if key != "cpu_ms"]
        rows.append([name, *sizes, f"{min(each['cpu_ms'] for each in found):.2f}"])
    header = ["an agent's rollout", "tokens", "turns", "rollouts", "groups", "batches", "all"]
    print(markdown([*header, "CPU, ms"], rows))


if __name__ == "__main__":
    main()
