from __future__ import annotations

import httpx
import openai
import pytest

from streamrl.inference.clients.chat_endpoint import ChatEndpoint, NoUsableAnswer

REQUEST = httpx.Request("POST", "http://m/v1/chat/completions")


def status(code: int) -> openai.APIStatusError:
    return openai.APIStatusError("no", response=httpx.Response(code, request=REQUEST), body=None)


def endpoint(*answers: str | Exception, attempts: int = 3) -> tuple[ChatEndpoint, list[str]]:
    """An endpoint that gives these answers in turn, and the questions that it was asked."""
    asked: list[str] = []
    left = [*answers]
    made = ChatEndpoint(
        base_url="http://m/v1",
        model="m",
        api_key="",
        attempts=attempts,
        timeout_s=1.0,
        pause_s=0.0,
        options={},
    )

    async def answer(question: str) -> str:
        asked.append(question)
        found = left.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    made._answer = answer  # type: ignore[method-assign]
    return made, asked


async def test_a_question_is_asked_again_until_its_answer_can_be_read():
    lost = openai.APIConnectionError(request=REQUEST)
    made, asked = endpoint(lost, "seven", "7")
    assert await made.ask("how many?", int) == 7
    assert asked == ["how many?"] * 3


async def test_after_the_last_attempt_the_model_and_the_cause_are_named():
    made, asked = endpoint("one", "two", attempts=2)
    with pytest.raises(NoUsableAnswer, match="^m at http://m/v1: ValueError: .*'two'"):
        await made.ask("how many?", int)
    assert len(asked) == 2


@pytest.mark.parametrize(("code", "attempts"), [(401, 1), (422, 1), (500, 3), (429, 3)])
async def test_what_is_refused_is_not_asked_again(code: int, attempts: int):
    made, asked = endpoint(*[status(code)] * 3)
    with pytest.raises(NoUsableAnswer):
        await made.ask("how many?", int)
    assert len(asked) == attempts
