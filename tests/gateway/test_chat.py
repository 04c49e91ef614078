"""Chat completions, through the openai SDK as agents use it."""

from __future__ import annotations

from pathlib import Path

import openai

from streamrl.records import SessionStart
from tests.support.gateways import Gateways, gateways
from tests.support.sampling_stub import END


def client(gateway: Gateways, url: str, session: str = "s0", **fields: object) -> openai.OpenAI:
    opened = gateway.begin(url, session, **fields)
    return openai.OpenAI(base_url=opened["base_url"], api_key=opened["api_key"], max_retries=0)


def test_a_conversation_goes_on_token_for_token(tmp_path: Path):
    with gateways(tmp_path) as gateway:
        api = client(gateway, gateway.start())
        conversation = [{"role": "user", "content": "one"}]
        for question in ("two", "three"):
            answer = api.chat.completions.create(model="policy", messages=conversation)
            said = answer.choices[0].message
            conversation += [
                {"role": "assistant", "content": said.content},
                {"role": "user", "content": question},
            ]
        start, first, second = gateway.records()
        assert isinstance(start, SessionStart) and start.problem_id == "7"
        assert second.continues == first.call and not second.fork
        assert bytes(second.prompt[second.prompt < END].tolist()) == b"two"
        assert second.messages == [{"role": "user", "content": "two"}]
        assert answer.usage.prompt_tokens == len(first.prompt) + len(first.tokens) + len(
            second.prompt
        )
