"""Answers as records, and records as answers."""

from __future__ import annotations

from typing import Any

import numpy as np

from streamrl.envs.sessions.call_tree import CallTree, Continuation
from streamrl.envs.sessions.model_calls import locate_answer, to_call, to_sampled
from streamrl.envs.sessions.rollouts import to_turns
from streamrl.inference.clients.client import SampledCompletion
from streamrl.stream.records import VersionSpan
from tests.support.sessions import call


def sampled(prompt: list[int], kept: int = 0) -> SampledCompletion:
    return SampledCompletion(
        server_id="s",
        prompt_tokens=np.array(prompt, np.uint16),
        tokens=np.array([7, 8], np.uint16),
        logprobs=np.array([-0.5, -0.25], np.float32),
        text="said",
        finish_reason="length",
        version_spans=[VersionSpan(version=3, start=0, end=2)],
        latency_s=0.5,
        temperature=0.75,
        top_p=1.0,
        top_k=-1,
        max_tokens=2,
        prefix_tokens=kept,
    )


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def tree() -> CallTree:
    made = CallTree()
    made.add(call("a", [1, 2], [3], asked="hi", said="hello"))
    return made


ASKED = [user("hi"), {"role": "assistant", "content": "hello"}, user("more")]
CONTINUATION = Continuation("a", [user("more")])


def test_a_prompt_that_keeps_the_tokens_goes_on_and_has_only_the_new_ones():
    position = locate_answer(tree(), ASKED, CONTINUATION, sampled([1, 2, 3, 4, 5], kept=3))
    assert (position.continues, position.fork, position.messages) == ("a", "", [user("more")])
    assert position.prompt.tolist() == [4, 5]


def test_so_does_one_that_begins_with_the_same_tokens_by_itself():
    position = locate_answer(tree(), ASKED, Continuation("", ASKED), sampled([1, 2, 3, 4]))
    assert (position.continues, position.messages) == ("a", [user("more")])
    assert position.prompt.tolist() == [4]


def test_any_other_is_a_fork_that_says_why():
    position = locate_answer(tree(), ASKED, CONTINUATION, sampled([1, 9, 4]))
    assert (position.continues, position.fork) == ("a", "template")
    assert (position.prompt.tolist(), position.kept) == ([9, 4], 1)
    other = [user("another")]
    assert locate_answer(tree(), other, Continuation("", other), sampled([5])).fork == "sub-agent"


def test_a_recorded_answer_is_the_one_that_the_server_gave():
    calls = tree()
    answer = sampled([1, 2, 3, 4], kept=3)
    recorded = to_call("s", "b", "r#0", locate_answer(calls, ASKED, CONTINUATION, answer), answer)
    again = to_sampled(calls, recorded)
    for name, one, other in zip(SampledCompletion._fields, answer, again, strict=True):
        if isinstance(one, np.ndarray):
            assert isinstance(other, np.ndarray)
            assert one.tolist() == other.tolist(), name
        else:
            assert one == other, name


def test_the_routed_experts_of_a_call_are_those_of_its_own_tokens():
    """Of five tokens of the prompt, three are the conversation before; two are sampled."""
    experts = np.arange(1, 8, dtype=np.uint8).reshape(7, 1, 1)
    answer = sampled([1, 2, 3, 4, 5], kept=3)._replace(routed_experts=experts)
    position = locate_answer(tree(), ASKED, CONTINUATION, answer)
    made = to_call("s", "b", "r", position, answer)
    assert made.routed_experts is not None
    assert made.routed_experts.reshape(-1).tolist() == [4, 5, 6, 7]
    again = to_sampled(tree(), made).routed_experts
    assert again is not None and again.reshape(-1).tolist() == [0, 0, 0, 4, 5, 6, 7]
    asked, said = to_turns([call("a", [1, 2], [3]), made])[2:]
    assert asked.routed_experts is not None and said.routed_experts is not None
    assert asked.routed_experts.reshape(-1).tolist() == [4, 5]
    assert said.routed_experts.reshape(-1).tolist() == [6, 7]
