"""A gateway for tests that only ask it for what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import openai
import pytest

from tests.support.gateways import Gateways, gateways
from tests.support.waiting import patience


class Shared(NamedTuple):
    gateway: Gateways
    url: str
    key: str
    api: openai.OpenAI


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    with gateways(tmp_path_factory.mktemp("runs")) as gateway:
        url = gateway.start()
        key = gateway.begin(url)["api_key"]
        api = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=patience(30))
        yield Shared(gateway, url, key, api)
