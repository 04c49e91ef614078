"""Settings of the envs that cannot work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from streamrl.config.choices import NAME, SERVERS, SERVERS_AT_URLS, template_problem
from streamrl.config.sections.envs import ServerEnv, Sessions
from streamrl.system.text import nearest_or_all

if TYPE_CHECKING:
    from streamrl.config.run_file import RunFile

# The shipped env that samples nothing, and its class, by either of which a run file may name it.
DEMONSTRATIONS = ("demonstrations", "streamrl.envs.shipped.demonstrations:Demonstrations")


def env_problems(run: RunFile) -> Iterator[str]:
    if not run.envs:
        yield "envs: a run needs at least one env"
    for name, env in run.envs.items():
        if not NAME.fullmatch(name):
            yield f"envs.{name}: not a name of lowercase letters, digits and '-'"
        if env.host and not NAME.fullmatch(env.host):
            yield f"envs.{name}.host: not a name of lowercase letters, digits and '-'"
        if env.host and not env.replicas:
            yield f"envs.{name}.host: with `replicas: 0` its rollouts come from outside"
        if problem := template_problem(env.chat_template_kwargs):
            yield f"envs.{name}.chat_template_kwargs: {problem}"
        imitates = env.loss.cross_entropy or env.loss.teacher_kl
        shows = (env.kind or name) in DEMONSTRATIONS and env.replicas
        if shows and (env.loss.policy_gradient or not imitates):
            yield (
                f"envs.{name}.loss: demonstrations are imitated, nothing in them is sampled; set"
                " policy_gradient: 0 and cross_entropy: 1"
            )
        if shows and run.buffer_of(name).group_size > 1:
            yield (
                f"envs.{name}.buffer: nothing in demonstrations is compared; set"
                " {group_size: 1, min_group_size: 1}"
            )
        if isinstance(env, ServerEnv):
            yield from _server_problems(run, name, env)
        elif env.replicas and env.kind.partition(":")[0] in SERVERS:
            yield (
                f"envs.{name}.python: {env.kind} runs in an environment with its own packages;"
                " give the path of its Python"
            )
        if env.sessions:
            yield from _session_problems(name, env.sessions)
    total = sum(env.fraction for env in run.envs.values())
    if total > 1 + 1e-9:
        yield f"envs: the fractions add up to {total:.4g}; at most 1 is possible"
    target = run.orchestrator.target
    if target is not None and target.env not in run.envs:
        yield (
            f"orchestrator.target.env {target.env!r} is not one of the envs: {', '.join(run.envs)}"
        )


def _session_problems(name: str, sessions: Sessions) -> Iterator[str]:
    for reward in sessions.reward_ranges:
        if sessions.rewards and reward not in sessions.rewards:
            yield (
                f"envs.{name}.sessions.reward_ranges.{reward}: no reward of the sessions;"
                f" {nearest_or_all(reward, sessions.rewards)}"
            )


def _server_problems(run: RunFile, name: str, env: ServerEnv) -> Iterator[str]:
    """Problems of an env whose processes run in a separate environment."""
    if env.kind.partition(":")[0] not in SERVERS and not env.kind.endswith(".py"):
        yield (
            f"envs.{name}.kind: an env with its own Python is {' or '.join(SERVERS)}:NAME, or"
            f" FILE.py; {env.kind!r} is neither"
        )
    server, _, target = env.kind.partition(":")
    if server in SERVERS_AT_URLS and not target.startswith(("http://", "https://")):
        yield f"envs.{name}.kind: {server}: is followed by the server's address, http://HOST:PORT"
    if server == "nemo-gym" and not env.params.get("dataset"):
        yield f"envs.{name}.params.dataset: the tasks of the agent server are needed, a JSONL file"
    for evaluation, own in run.eval.envs.items():
        if (own.env or evaluation) == name:
            yield f"eval.envs.{evaluation}: {name} has its own Python, so it cannot be asked"
