"""The tree of calls: where a request goes on, and that each sampled token is trained on once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.envs.sessions.call_tree import (
    CallTree,
    InvalidCall,
    context,
    sequences,
    tokens_before,
)
from streamrl.envs.sessions.messages import Message
from streamrl.stream.records import ModelCall
from tests.support.sessions import call


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def tree_of(*calls: ModelCall) -> CallTree:
    tree = CallTree()
    for each in calls:
        assert tree.add(each)
    return tree


FIRST = call("a", [1, 2], [3], asked="hi", said="hello")
SECOND = call("b", [4], [5, 6], "a", asked="more", said="yes")


def test_a_conversation_goes_on_from_the_last_answer_that_it_has():
    tree = tree_of(FIRST, SECOND)
    said = [user("hi"), assistant("hello"), user("more"), assistant("yes"), user("and?")]
    assert tree.find_continuation(said) == ("b", [user("and?")])
    assert tree.find_continuation(said[:3]) == ("a", [user("more")])
    another = [user("hi"), assistant("another"), user("more")]
    assert tree.find_continuation(another) == ("", another)
    assert tree.conversation("b") == said[:4]
    assert tree.context("b").tolist() == [1, 2, 3, 4, 5, 6]


def test_the_first_request_of_a_session_continues_no_call():
    assert CallTree().find_continuation([user("hi")]) == ("", [user("hi")])


def test_a_prompt_of_tokens_goes_on_from_the_longest_context_that_it_begins_with():
    tree = tree_of(FIRST, SECOND)
    assert tree.find_call_by_tokens(np.array([1, 2, 3, 4, 5, 6, 7])) == "b"
    assert tree.find_call_by_tokens(np.array([1, 2, 3, 4, 5, 6])) == "a"
    assert tree.find_call_by_tokens(np.array([1, 2, 9])) == ""
    assert CallTree().find_call_by_tokens(np.array([1, 2])) == ""


def test_an_answer_with_tools_is_found_as_the_agent_has_received_it():
    tools = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
    raw = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    tree = tree_of(call("a", [1], [2], asked="hi", said=raw, tool_calls=tools, content=""))
    received = {"role": "assistant", "content": "", "tool_calls": tools}
    result = {"role": "tool", "content": "3", "tool_call_id": "c1"}
    assert tree.find_continuation([user("hi"), received, result]) == ("a", [result])
    assert tree.conversation("a")[-1] == assistant(raw)


@pytest.mark.parametrize(
    ("conversation", "cause"),
    [
        ([user("hi")], ""),
        ([user("hi"), assistant("another"), user("more"), assistant("x"), user("y")], "edit"),
        ([user("hi"), user("in short: hello, more, yes")], "compaction"),
        ([user("You look things up")], "sub-agent"),
    ],
)
def test_a_conversation_that_goes_on_from_no_call_has_a_cause(
    conversation: list[Message], cause: str
):
    assert tree_of(FIRST, SECOND).cause_of_fork(conversation) == cause
    assert CallTree().cause_of_fork(conversation) == ""


def test_a_request_has_the_answers_that_came_first():
    tree = tree_of(
        call("b", [1], [3], request="r", choice=1), call("a", [1], [2], request="r", choice=0)
    )
    assert not tree.add(call("c", [1], [4], request="r", choice=0))
    assert [answer.call for answer in tree.answers("r")] == ["a", "b"]
    assert not tree.answers("another")


def test_a_call_cannot_go_on_from_one_that_is_not_there():
    with pytest.raises(InvalidCall, match="continues 'x'"):
        CallTree().add(call("a", [1], [2], "x"))


def test_branches_begin_sequences_of_their_own():
    calls = [FIRST, SECOND, call("c", [7], [8], "a"), call("d", [9], [10], "c")]
    assert [[each.call for each in line] for line in sequences(calls)] == [["a", "b"], ["c", "d"]]


@st.composite
def sessions(draw: st.DrawFn) -> list[ModelCall]:
    """Calls that each go on from any call before them, by its tokens or not, or begin anew."""
    calls = list[ModelCall]()
    for number in range(draw(st.integers(1, 12))):
        before = draw(st.sampled_from(["", *(each.call for each in calls)]))
        fork = draw(st.sampled_from(["", "template"])) if before else ""
        kept = 0
        if fork:
            known = len(context({each.call: each for each in calls}, before))
            kept = draw(st.integers(0, known))
        calls.append(
            call(
                f"c{number}",
                draw(st.lists(st.integers(0, 9), max_size=3)),
                draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)),
                before,
                fork=fork,
                kept=kept,
            )
        )
    return calls


@given(sessions())
def test_each_call_is_in_one_sequence_and_there_are_as_few_as_possible(calls: list[ModelCall]):
    lines = sequences(calls)
    by_id = {each.call: each for each in calls}
    assert sorted(each.call for line in lines for each in line) == sorted(by_id)
    for line in lines:
        for earlier, later in pairwise(line):
            assert later.continues == earlier.call
            assert not later.fork
        # so the sequence is exactly what the policy saw at its last call
        first = line[0]
        before = tokens_before(by_id, first).tolist()
        tokens = [*before, *(t for each in line for t in (*each.prompt, *each.tokens))]
        assert tokens == context(by_id, line[-1].call).tolist()
    # the tokens of calls that nobody goes on from can share no sequence
    gone_on = {each.continues for each in calls if not each.fork}
    assert len(lines) == sum(each.call not in gone_on for each in calls)


def test_the_last_record_of_a_call_tells_whether_it_was_lost():
    tree = CallTree()
    assert tree.add(call("a", [1], [2], lost=True))
    for lost in (False, True, False):
        assert not tree.add(call("a", [1], [2], lost=lost))
        assert [each.lost for each in tree.calls.values()] == [lost]
