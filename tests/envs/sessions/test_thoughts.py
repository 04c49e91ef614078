from __future__ import annotations

import pytest

from streamrl.envs.sessions.thoughts import after_thoughts, thoughts_of, without_thoughts


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
        ("<thinking>2+2</thinking>4", "2+2", "4"),
        ("<reasoning>2+2</reasoning>4", "2+2", "4"),
        ("<Thought>2+2</Thought>4", "2+2", "4"),
        ("<think >2+2</think\n>4", "2+2", "4"),
        ("<seed:think>2+2</seed:think>4", "2+2", "4"),
        ("[THINK]2+2[/THINK]4", "2+2", "4"),
        ("◁think▷2+2◁/think▷4", "2+2", "4"),
        ("<|begin_of_thought|>2+2<|end_of_thought|>4", "2+2", "4"),
        ("<|START_THINKING|>2+2<|END_THINKING|>4", "2+2", "4"),
        ("<|inner_prefix|>2+2<|inner_suffix|>4", "2+2", "4"),
        ("<|channel>thought\n2+2<channel|>4", "2+2", "4"),
        ("<|channel|>final<|message|>4", "", "4"),
        ("analysis2+2assistantfinal4", "2+2", "4"),
        ("ANALYSIS2+2AssistantFinal4", "2+2", "4"),
        ("analysis of 2+2", "", "analysis of 2+2"),
    ],
)
def test_an_answer_is_split_into_its_thoughts_and_the_rest(text: str, thoughts: str, answer: str):
    assert thoughts_of(text) == thoughts
    assert without_thoughts(text) == answer


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("8", "8"),
        ("<think>7?</think>\n8", "\n8"),
        ("7? No.</think> 8", " 8"),  # the chat template has opened the thought
        ("<think>a</think> 7 <think>b</think> 8", " 8"),
        ("[THINK]a[/THINK]8", "8"),
        ("<reasoning>a</reasoning><answer>8</answer>", "<answer>8</answer>"),
        ("<think>Is it 8", None),
        ("8 <think>or 9", None),
        ("<think>8</think>", ""),
        ("<|channel|>analysis<|message|>It is 8", None),
        ("<|channel|>analysis<|message|>It is 8<|end|>", None),
        (
            "<|channel|>analysis<|message|>7?<|end|><|start|>assistant<|channel|>final<|message|>8",
            "8",
        ),
        (
            "<|channel|>analysis<|message|>7?<|end|><|start|>assistant<|channel|>commentary"
            " to=functions.f <|constrain|>json<|message|>{}",
            "{}",
        ),
    ],
)
def test_what_follows_the_last_thought(text: str, after: str | None):
    assert after_thoughts(text) == after
