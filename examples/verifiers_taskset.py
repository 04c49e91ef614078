"""A taskset of the library verifiers, version 1 of its API, with its harness. It knows
nothing of streamrl. The run file names it:

    envs:
      sums:
        kind: verifiers:examples/verifiers_taskset.py
        python: .venv-verifiers/bin/python
        params: {agent: {runtime: {type: subprocess}}}

The policy is asked for a sum of two digits, and may then correct itself.
"""

from collections.abc import Iterator

import httpx
import verifiers.v1 as vf

__all__ = ["SumTaskset", "TwoTurns"]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Whether the last answer is the sum."""
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def brief(self, trace: vf.Trace) -> float:
        """The shorter the policy's answers, the better."""
        length = sum(len(str(message.content)) for message in trace.assistant_messages)
        return 1 / (1 + length)


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self) -> Iterator[SumTask]:
        for first in range(10):
            for second in range(10):
                data = SumData(prompt=f"{first}+{second}=", answer=str(first + second))
                yield SumTask(data, self.config.task)


class TwoTurns(vf.Harness[vf.HarnessConfig]):
    """Asks, answers "again", and asks once more."""

    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [{"role": "user", "content": data.prompt}]
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(base_url=endpoint, headers=headers, timeout=60) as client:
            for follow_up in ("again", ""):
                body = {"model": ctx.model, "messages": messages}
                answer = await client.post("/chat/completions", json=body)
                answer.raise_for_status()
                text = answer.json()["choices"][0]["message"]["content"]
                messages.append({"role": "assistant", "content": text})
                if follow_up:
                    messages.append({"role": "user", "content": follow_up})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
