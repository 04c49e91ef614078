"""Tasksets of the library verifiers, version 1 of its API (from 0.4 on), as they are.

The library runs each episode: its harness, runtime, tools and rewards. Only its model client is
ours: it calls the gateway with the key of the episode's session. This runs in the env's own Python.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from streamrl_sessions import Failed, Outcome, Session, Settings, serve

# Only that Python has the library.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false
from verifiers.v1.clients import EvalClient, EvalClientConfig, ModelContext
from verifiers.v1.errors import ProviderError
from verifiers.v1.utils.loaders import import_taskset, load_environment, resolve_env_config

# Stop conditions that are limits, as streamrl calls them.
LIMITS = {
    "max_turns": "turns",
    "max_input_tokens": "context",
    "max_output_tokens": "context",
    "max_total_tokens": "context",
}


class SessionClient(EvalClient):
    """Calls the gateway for all episodes, each with the key of its session."""

    def __init__(self, config: EvalClientConfig) -> None:
        super().__init__(config)
        self.config = config
        self.keys: dict[str, str] = {}  # by the id of the trace

    def _headers(self, dialect: Any, incoming: Any, session_id: str | None) -> Any:
        key = self.keys.get(session_id or "")
        if key is None:
            raise ProviderError(
                "this agent does not train, so it cannot ask the policy; give it a client of its"
                " own in the env's params",
                status_code=400,
            )
        headers = super()._headers(dialect, incoming, session_id)
        headers.update(dialect.auth_headers(key))
        return headers


class VerifiersEnv:
    """An env of the library: a taskset, and the agent that works on its tasks."""

    def __init__(self, env: Any, client: SessionClient, source: dict[str, str]) -> None:
        self.source = source
        self._env = env
        self._client = client
        self._context = ModelContext(model="policy", client=client.config)
        self._tasks: list[Any] = []
        self._loading = iter(env.taskset)
        self.problems = 0
        if env.taskset.bounded:
            self._tasks = list(self._loading)
            self.problems = len(self._tasks)

    async def play(self, problem: int, session: Session) -> Outcome:
        traces = list[Any]()

        def on_trace(trace: Any) -> None:
            traces.append(trace)
            if trace.agent.trainable:
                self._client.keys[trace.id] = session.api_key

        (slot,) = self._env.slots(self._task(problem))
        try:
            episode = await self._env.run_slot(slot, self._context, on_trace=on_trace)
        finally:
            for trace in traces:
                self._client.keys.pop(trace.id, None)
        if sum(trace.agent.trainable for trace in traces) > 1:
            raise Failed(
                "several agent runs of the episode train, or one was tried again; a rollout has one"
            )
        return outcome(episode)

    def _task(self, problem: int) -> Any:
        """The task of that number. One that has no end is read as far as it is needed."""
        missing = problem + 1 - len(self._tasks)
        self._tasks += islice(self._loading, max(missing, 0))
        return self._tasks[problem]


def outcome(episode: Any) -> Outcome:
    """The outcome of an episode. Raises Failed for one that has failed."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        cause = f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode failed"
        raise Failed(cause)
    (trace,) = [trace for trace in episode.traces if trace.agent.trainable]
    unscored = [name for name, reward in trace.rewards.items() if reward is None]
    if unscored:
        raise Failed(f"reward {unscored[0]!r} was not computed")
    rewards = {name: reward.value for name, reward in trace.rewards.items()}
    truncation = LIMITS.get(trace.stop_condition or "", "")
    if trace.is_timeout or episode.is_timeout:
        truncation = "time"
    return Outcome(rewards, truncation)


@asynccontextmanager
async def make_env(settings: Settings) -> AsyncIterator[VerifiersEnv]:
    taskset = settings.target
    if taskset.endswith(".py"):
        sys.path.insert(0, str(Path(taskset).parent))
        taskset = Path(taskset).stem
    params = dict(settings.params)
    params["taskset"] = {**params.get("taskset", {}), "id": taskset}
    params["interception"] = {"type": "server"}
    config = resolve_env_config(params)
    env: Any = load_environment(config)
    client = SessionClient(EvalClientConfig(base_url=f"{settings.gateway}/v1", api_key_var="none"))
    async with env.serving():
        # The library makes a client of each configuration that it has not seen.
        env._interception.clients[client.config.model_dump_json()] = client
        yield VerifiersEnv(env, client, source_of(taskset))


def source_of(taskset: str) -> dict[str, str]:
    """Which packages made a rollout. A taskset that is no package has a digest of its file."""
    module = import_taskset(taskset)
    packages = importlib.metadata.packages_distributions()
    names = packages.get(module.__name__.partition(".")[0])
    if names:
        version = importlib.metadata.version(names[0])
    else:
        version = hashlib.sha256(Path(str(module.__file__)).read_bytes()).hexdigest()[:12]
    return {
        "package": "verifiers",
        "version": importlib.metadata.version("verifiers"),
        "taskset": taskset,
        "taskset_version": version,
    }


if __name__ == "__main__":
    serve(make_env)
