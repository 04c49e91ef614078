"""docs/design/inference-context.md, on a real BPE tokenizer.

What a server sends decides, the rest is looked up, and what does not fit is never trained on.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai.types.chat.chat_completion import Choice

from streamrl.inference.clients.openai_context import InferenceContext, misalignment
from streamrl.stream.log.codec import decode, encode
from streamrl.stream.records import InferenceMetadata, VersionSpan
from streamrl.stream.records.compact import wide_logprobs
from streamrl.system.errors import ModelError
from tests.support.bpe import bpe

TOKENIZER = bpe()
PROMPT = "hello world"


def choice(
    printed: Sequence[str],
    logprobs: Sequence[float] | None = None,
    ids: Sequence[int] | None = None,
    reason: str = "stop",
) -> Choice:
    numbers = [-0.5] * len(printed) if logprobs is None else logprobs
    content = [
        {"token": t, "logprob": p, "bytes": None, "top_logprobs": []}
        for t, p in zip(printed, numbers, strict=True)
    ]
    said = {"message": {"role": "assistant", "content": "four"}, "logprobs": {"content": content}}
    made: dict[str, Any] = {"index": 0, "finish_reason": reason, **said}
    return Choice.model_validate(made if ids is None else {**made, "token_ids": list(ids)})


def printed(text: str) -> list[str]:
    return TOKENIZER.convert_ids_to_tokens(TOKENIZER.encode(text))  # type: ignore[return-value]


def test_the_prompt_is_the_template_with_the_generation_prompt():
    tokens = InferenceContext(TOKENIZER, 1.0, 0).tokenize_prompt(PROMPT)
    assert (
        tokens.dtype == np.int32
        and TOKENIZER.decode(tokens) == "<|user|>hello world<eos>\n<|assistant|>"
    )
    assert (
        tokens.tolist()
        == InferenceContext(TOKENIZER, 1.0, 0)
        .tokenize_prompt([{"role": "user", "content": PROMPT}])
        .tolist()
    )


@pytest.mark.parametrize("template", [None, "{{ raise_exception('no system messages') }}"])
def test_a_template_that_fails_is_replaced_by_plain_lines_with_a_warning(
    template: str | None, caplog: pytest.LogCaptureFixture
):
    context = InferenceContext(bpe(template))
    assert context.tokenizer.decode(context.tokenize_prompt(PROMPT)) == "user: hello world"  # type: ignore[attr-defined]
    assert (
        "chat template failed" in caplog.text
        and context.metrics()["inference_context/template_failures"] == 1
    )


def test_a_prompt_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="no tokens come of the prompt ''"):
        InferenceContext(bpe("{{ '' }}")).tokenize_prompt("")


@pytest.mark.parametrize(
    "text", [" hello world", "two plus\ttwo", "caf\u00e9 \u20ac\U0001f600", "four<eos>"]
)
def test_bpe_tokens_are_looked_up_not_encoded_again(text: str):
    """`Ġhello` encoded again would be `Ä`, `ł`, `hello`; half of a character cannot be encoded at
    all.
    """
    tokens = printed(text)
    found = InferenceContext(TOKENIZER, 1.0, 0).response_tokens_from_choice(choice(tokens))
    assert found.tolist() == TOKENIZER.encode(text) and found.dtype == np.int32
    if not text.isascii():
        assert len(tokens) > len(text)  # its characters are split over tokens


def test_decoded_text_is_not_taken_for_a_token():
    with pytest.raises(
        ValueError, match="' hello' is no token of the vocabulary.*return_token_ids"
    ):
        InferenceContext(TOKENIZER, 1.0, 0).response_tokens_from_choice(choice([" hello"]))


def test_ids_that_the_server_sends_decide():
    context = InferenceContext(TOKENIZER, 1.0, 0)
    assert context.response_tokens_from_choice(
        choice([" hello", " world"], ids=[7, 9])
    ).tolist() == [7, 9]
    assert context.response_tokens_from_choice(choice(["token_id:7", "token_id:9"])).tolist() == [
        7,
        9,
    ]


def test_missing_logprobs_and_zero_tokens_are_errors():
    context = InferenceContext(TOKENIZER, 1.0, 0)
    bare = choice(["four"])
    bare.logprobs = None
    for method in (context.response_tokens_from_choice, context.logprobs_from_choice):
        with pytest.raises(ValueError, match="missing logprobs; ask for them with logprobs=True"):
            method(bare)
        with pytest.raises(ValueError, match="zero tokens"):
            method(choice([]))
    with pytest.raises(ValueError, match="zero tokens"):
        context.response_tokens_from_choice(choice(["four"], ids=[]))


def test_a_rollout_has_the_tokens_logprobs_and_versions_of_its_choice():
    context = InferenceContext(TOKENIZER, 1.0, 0)
    ids = TOKENIZER.encode("the answer is four<eos>")
    said = choice(["?"] * len(ids), [-0.125 * i for i in range(len(ids))], ids)
    spans = [VersionSpan(version=3, start=0, end=2), VersionSpan(version=4, start=2, end=5)]
    how = InferenceMetadata(server="s", temperature=0.7, version_spans=spans)
    own = context.tokenize_prompt(PROMPT)
    made = context.create_rollout_from_choice(
        PROMPT, said, "gsm8k", "ex_123", 1.0, prompt_token_ids=own.tolist(), how=how, sample=2
    )
    asked, answer = made.turns
    assert (made.environment, made.problem_id, made.rollout_uid, made.reward, made.misaligned) == (
        "gsm8k",
        "ex_123",
        "gsm8k-ex_123-2",
        1.0,
        "",
    )
    assert (made.policy_version, made.newest_policy_version, made.temperature, made.truncated) == (
        3,
        4,
        0.7,
        False,
    )
    assert (
        asked.tokens is not None
        and asked.tokens.tolist() == own.tolist()
        and asked.tokens.dtype == np.uint16
        and asked.logprobs is None
    )
    assert (
        answer.tokens is not None and answer.tokens.tolist() == ids and answer.logprobs is not None
    )
    assert wide_logprobs(answer.logprobs).tolist() == [-0.125 * i for i in range(len(ids))]
    assert encode(decode("rollout/1", encode(made))) == encode(made)


def test_token_rewards_come_on_top_and_a_cut_answer_is_truncated():
    context = InferenceContext(TOKENIZER, 1.0, 0)
    said = printed("two")
    made = context.create_rollout_from_choice(
        PROMPT, choice(said, reason="length"), "e", "1", 1.0, token_rewards=[0.25] * len(said)
    )
    assert (
        made.reward == 1 + 0.25 * len(said) and made.rewards == {"reward": 1.0} and made.truncated
    )


COUNTS = {
    "rollouts": 2,
    "misaligned": 0,
    "short": 1,
    "template_failures": 0,
    "unchecked": 2,
    "suspicious": 0,
}


def test_few_tokens_are_worth_a_warning(caplog: pytest.LogCaptureFixture):
    context = InferenceContext(TOKENIZER, 1.0, 0)
    with caplog.at_level(logging.WARNING):
        for ids in ([7] * 4, [7] * 5):
            context.create_rollout_from_choice(
                PROMPT, choice(["?"] * len(ids), ids=ids), "e", "1", 0.0
            )
    assert caplog.text.count("tokens for 1") == 1 and "only 4 tokens" in caplog.text
    assert context.metrics() == {f"inference_context/{k}": v for k, v in COUNTS.items()}


def test_what_does_not_fit_is_misaligned_and_counted():
    context = InferenceContext(TOKENIZER, 1.0, 0)
    own = context.tokenize_prompt(PROMPT).tolist()
    other = [own[0], own[1] + 1, *own[2:]]
    for sent, ids, says in (
        (
            other,
            [7, 8],
            f"token 1 of the server's prompt is {own[1] + 1}, tokenize_prompt gives {own[1]}",
        ),
        (own[:-1], [7, 8], f"prompt has {len(own) - 1} tokens, tokenize_prompt gives {len(own)}"),
        (own, [7, 8, 9], "3 sampled tokens with 2 logprobs"),
    ):
        made = context.create_rollout_from_choice(
            PROMPT, choice(["?", "?"], ids=ids), "e", "1", 1.0, prompt_token_ids=sent
        )
        assert says in made.misaligned and made.turns[0].tokens.tolist() == sent  # type: ignore[union-attr]
        assert decode("rollout/1", encode(made)).misaligned == made.misaligned  # type: ignore[attr-defined]
    assert context.metrics()["inference_context/misaligned"] == 3


def test_misalignment_by_hand():
    one = np.array([1, 2])
    two = np.array([1, 3])
    assert misalignment(one, one, 4, 4) == ""
    assert misalignment(one, two, 4, 4).startswith(
        "token 1 of the server's prompt is 3, tokenize_prompt gives 2"
    )


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path):
    with pytest.raises(ModelError, match=f"{tmp_path}: no tokenizer can be loaded"):
        InferenceContext.of_model(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    assert (
        InferenceContext.of_model(tmp_path).tokenize_prompt(PROMPT).tolist()
        == InferenceContext(TOKENIZER).tokenize_prompt(PROMPT).tolist()
    )


def test_the_call_of_the_design_gives_rollouts_of_their_own_at_the_contexts_version_and_temperature(
    caplog: pytest.LogCaptureFixture,
):
    """Five arguments, four choices of one completion: four rollouts, none of them a duplicate,
    expired or sampled at another temperature.
    """
    context = InferenceContext(TOKENIZER, temperature=0.7, policy_version=5)
    choices = [
        choice(["?"] * 5, ids=[7] * 5).model_copy(update={"index": index}) for index in range(4)
    ]
    with caplog.at_level(logging.WARNING):
        made = [context.create_rollout_from_choice(PROMPT, one, "e", "1", 1.0) for one in choices]
    assert [rollout.rollout_uid for rollout in made] == [
        "e-1-0",
        "e-1-1",
        "e-1-2",
        "e-1-3",
    ] and len({rollout.group_id for rollout in made}) == 1
    assert {
        (rollout.policy_version, rollout.temperature, rollout.misaligned) for rollout in made
    } == {(5, 0.7, "")}
    # that nothing could be compared is said
    assert context.counts["unchecked"] == 4 and caplog.text.count("has no prompt_token_ids") == 1
    assert all(rollout.metadata == {"prompt_token_ids": "not sent"} for rollout in made)
    labelled = choice(["?"] * 5, ids=[7] * 5).model_copy(
        update={
            "weight_versions": [
                {"version": 6, "start": 0, "end": 2},
                {"version": 7, "start": 2, "end": 5},
            ]
        }
    )
    answered = context.create_rollout_from_choice(PROMPT, labelled, "e", "1", 1.0)
    # where the server says it
    assert (answered.policy_version, answered.newest_policy_version) == (6, 7)


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"temperature": 1.0}, "its policy version is unknown"),
        ({"policy_version": 1}, "its temperature is unknown"),
    ],
)
def test_what_nobody_says_is_not_made_up(told: dict[str, Any], says: str):
    context = InferenceContext(TOKENIZER, **told)
    made = context.create_rollout_from_choice(PROMPT, choice(["?"] * 5, ids=[7] * 5), "e", "1", 1.0)
    assert says in made.misaligned and context.counts["misaligned"] == 1


@pytest.mark.parametrize(
    ("logprobs", "says"),
    [
        ([0.0] * 5, "all 5 are 0"),
        ([-1.0, 0.5, -1.0, -1.0, -1.0], "token 1 has 0.5, above 0"),
        ([-1.0, -1.0, -9999.0, -1.0, -1.0], "token 2 has -9999"),
        ([-0.5, 0.0, -3.0, -20.0, -0.1], ""),
    ],
)
def test_suspicious_logprobs_are_warned_of_and_counted(
    logprobs: list[float], says: str, caplog: pytest.LogCaptureFixture
):
    context = InferenceContext(TOKENIZER, 1.0, 0)
    with caplog.at_level(logging.WARNING):
        made = context.create_rollout_from_choice(
            PROMPT, choice(["?"] * 5, logprobs, [7] * 5), "e", "1", 1.0
        )
    assert (says in made.metadata.get("logprobs", "")) and (
        f"suspicious logprobs of 1: {says}" in caplog.text
    ) == bool(says)
    assert context.metrics()["inference_context/suspicious"] == bool(says)
