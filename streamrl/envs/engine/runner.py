"""One problem played to its end, n times: the policy speaks, the env replies, until it is over or a
limit is reached. Or the env leads (`led.py`).

Every turn goes on from the very tokens before it; where the chat template rewrites what was said,
the rollout forks (`inference/prefix.py`). A limit that is reached ends a rollout truncated, with
what was said so far: a turn's tokens, turns, the context, time, a tool that takes too long or
fails.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from streamrl.config import run_file
from streamrl.envs.api import Earned, Env, Judged, Leads, Message, Reward, one_line
from streamrl.envs.engine import driver
from streamrl.envs.engine.driver import Sampler
from streamrl.envs.engine.rewards import Linear, leveled, linearise, together, totals
from streamrl.envs.engine.transcript import Talk, Task, aligned, failed
from streamrl.envs.engine.turns import Late, in_thread, is_coroutine, limited, turn
from streamrl.inference.client import ContextFull, Sampled, SamplingFailed, TimedOut
from streamrl.records import Rollout

logger = logging.getLogger(__name__)

# at once: more would only wait for Python's lock; one that is late is left behind, and makes room
REWARD_THREADS = 16


def reward_threads() -> asyncio.Semaphore:
    return asyncio.Semaphore(REWARD_THREADS)


@dataclass(frozen=True)
class Game:
    """What all conversations of an env have in common."""

    env: Env | Leads
    settings: run_file.Env
    sampler: Sampler
    rewards: Mapping[str, Reward] = field(default_factory=dict[str, Reward])  # beside the env's own
    # for rewards that are no coroutines
    threads: asyncio.Semaphore = field(default_factory=reward_threads)

    async def play(self, task: Task, n: int) -> list[Rollout]:
        """n rollouts of one problem. Raises SamplingFailed when not even the first turn can be had."""
        if hasattr(self.env, "converse"):
            return await self._led(task, n)
        problem = task.problem
        if problem.tokens:
            first = await self.sampler.sample([], n, self.settings, (), problem.tokens)
        else:
            first = await self.sampler.sample(problem.messages, n, self.settings, problem.tools)
        return list(
            await asyncio.gather(
                *[self._rollout(task, index, sampled) for index, sampled in enumerate(first)]
            )
        )

    async def _rollout(self, task: Task, index: int, first: Sampled) -> Rollout:
        oldest = min((span.version for span in first.version_spans), default=0)
        try:
            talk = Talk.begun(task.problem, first, time.time())
            if hasattr(self.env, "reply"):
                await self._go_on(talk)
            return aligned(task, index, talk, await self._judge(talk))
        except SamplingFailed as error:
            return failed(task, index, str(error), max(oldest, 0))
        except Exception as error:
            # an env is somebody else's code: whatever it raises, or gives, is this rollout's
            # failure
            return failed(task, index, one_line(error), max(oldest, 0))

    async def _led(self, task: Task, n: int) -> list[Rollout]:
        """The env leads, and judges all of them together."""
        env = cast(Leads, self.env)
        seats = await driver.play(env, task.problem, n, self.settings, self.sampler)
        judged = iter(await self._judged(env, task, [seat for seat in seats if not seat.failure]))
        oldest = max(min(version for seat in seats for version in seat.talk.versions), 0)
        found: list[Rollout] = []
        for seat in seats:
            try:
                verdict = SamplingFailed(seat.failure) if seat.failure else next(judged)
                found.append(
                    aligned(task, seat.index, seat.talk, await self._linear(seat.talk, verdict))
                )
            except SamplingFailed as error:
                found.append(failed(task, seat.index, str(error), oldest))
            except Exception as error:
                found.append(failed(task, seat.index, one_line(error), oldest))
        return found

    async def _judged(
        self, env: Leads, task: Task, played: Sequence[driver.Seat]
    ) -> Sequence[Judged | Exception]:
        """What each has earned, or why that cannot be said."""
        try:
            judged = await self.valued(
                env.judge, task.problem, [seat.notes for seat in played], what="its rewards"
            )
            if len(judged) != len(played):
                raise ValueError(
                    f"rewards of {len(judged)} rollouts, where there are {len(played)}"
                )
        except Exception as error:
            return [error] * len(played)
        return judged

    async def _go_on(self, talk: Talk) -> None:
        """Until it is over; within the time of a rollout."""
        try:
            async with asyncio.timeout(self.settings.rollout_timeout_s):
                while not talk.truncation and (replied := await self._reply(talk)):
                    await self._answer(talk, replied)
        except TimeoutError:
            talk.truncation = "time"

    async def _reply(self, talk: Talk) -> list[Message]:
        """What the env says; nothing when it is over, or cannot say."""
        try:
            said = await called(
                self.env.reply,  # type: ignore[attr-defined]
                talk.problem,
                tuple(talk.messages),
                timeout_s=self.settings.env_timeout_s,
            )
            return _messages(said or ())
        except Late as error:
            talk.truncation, talk.note = "tool-time", str(error)
        except Exception as error:  # a tool that fails ends the rollout, not the env
            talk.truncation, talk.note = "tool-error", one_line(error)
        return []

    async def _answer(self, talk: Talk, replied: list[Message]) -> None:
        """What the policy says to that."""
        if len(talk.said) >= self.settings.max_turns:
            talk.truncation = "turns"
            return
        messages = [*talk.messages, *replied]
        try:
            (sampled,) = await self.sampler.sample(
                messages,
                1,
                self.settings,
                talk.problem.tools,
                talk.history,
                talk.samples[-1].server_id,
            )
        except ContextFull as error:
            talk.truncation, talk.note = "context", str(error)
        except TimedOut as error:
            talk.truncation, talk.note = "time", str(error)
        else:
            talk.heard(replied, sampled, time.time())

    async def _judge(self, talk: Talk) -> Linear:
        """What it has earned."""
        env = cast(Env, self.env)
        return await self._linear(
            talk, await self.valued(env.rewards, talk.problem, talk.answer, what="its rewards")
        )

    async def _linear(self, talk: Talk, judged: Judged | Exception) -> Linear:
        """That and what the functions of the run file give, as one. Raises what could not be
        judged.
        """
        if isinstance(judged, Exception):
            raise judged
        earned: Earned = leveled(judged)
        for name, reward in self.rewards.items():
            more = await self.valued(
                reward, talk.problem, talk.answer, totals(earned), what=f"reward {name!r}"
            )
            earned = together(earned, leveled(more, name))
        return linearise(
            earned, self.settings.reward_weights, [len(said.tokens) for said in talk.said]
        )

    async def valued(self, function: Callable[..., Any], *arguments: Any, what: str) -> Any:
        """What the function gives: awaited, or of a thread of its own where it is no coroutine
        function, so that the env goes on meanwhile.

        Only as many threads as `REWARD_THREADS` work at once, and the time limit begins when a
        thread does. Raises Late.
        """
        if is_coroutine(function):
            return await limited(function(*arguments), self.settings.env_timeout_s, what)

        async def in_turn() -> Any:
            async with turn(self.threads):
                found = await in_thread(function, *arguments)
            return await found if inspect.isawaitable(found) else found

        return await limited(in_turn(), self.settings.env_timeout_s, what)


def _messages(said: Any) -> list[Message]:
    if bad := [
        message
        for message in said
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys()
    ]:
        raise TypeError(f"not a message with role and content but {bad[0]!r}")
    return [dict(message) for message in said]


async def called(function: Callable[..., Any], *arguments: Any, timeout_s: float) -> Any:
    """What the function returns: awaited, or else in a thread of its own, which is left behind when
    it is late. Raises Late.
    """
    work = function(*arguments) if is_coroutine(function) else in_thread(function, *arguments)
    return await limited(work, timeout_s, "a reply")
