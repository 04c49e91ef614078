"""An env server: an answer earns 1 if it is as long as the question."""

from contextlib import asynccontextmanager

from openai import AsyncOpenAI
from streamrl_sessions import Outcome, serve


class SameLength:
    problems = 100

    def __init__(self):
        self.source = {"package": "same-length", "version": "1"}  # into each rollout's metadata

    async def play(self, problem, session):
        client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
        question = "a" * (problem % 10 + 1)
        asked = [{"role": "user", "content": question}]
        answer = await client.chat.completions.create(model="policy", messages=asked)
        await client.close()
        text = answer.choices[0].message.content
        return Outcome({"length": float(len(text) == len(question))})


@asynccontextmanager
async def make_env(settings):  # settings.params are those of the run file
    yield SameLength()


if __name__ == "__main__":
    serve(make_env)
