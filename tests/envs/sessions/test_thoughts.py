from __future__ import annotations

import pytest

from streamrl.envs.sessions.thoughts import thoughts_of, without_thoughts


@pytest.mark.parametrize(
    ("text", "thoughts", "answer"),
    [
        ("4", "", "4"),
        (" a < b \n", "", " a < b \n"),
        ("<think>\n2+2\n</think>\n\n4", "2+2", "4"),
        ("2+2\n</think>\n\n4", "2+2", "4"),  # the chat template has opened the thought
        ("<think>\n\n</think>\n\n4", "", "4"),
        ("<think>2+2", "2+2", ""),  # cut off
        ("<think>a</think>b<think>c</think>d", "a\n\nc", "bd"),
        ("<think>a</think>b<think>c", "a\n\nc", "b"),
    ],
)
def test_an_answer_is_split_into_its_thoughts_and_the_rest(text: str, thoughts: str, answer: str):
    assert thoughts_of(text) == thoughts
    assert without_thoughts(text) == answer
