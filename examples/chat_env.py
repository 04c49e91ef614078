"""An env that asks a server for chat completions itself, with the SDK of openai. InferenceContext
makes rollouts of what it answers. The policy is asked a digit, and earns 1 for an even one.

    python examples/chat_env.py RUN ENV MODEL GROUPS

The run file has `ENV: {replicas: 0}` under `envs`, so that the run makes its topics and starts no
process for it. MODEL is the directory of the run's model, whose tokenizer and chat template are
needed; the tiny model is in runs/RUN/model. The program publishes GROUPS groups and ends.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import openai

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.config.secrets import resolve_reference
from streamrl.envs.flow_control import OutstandingLimit
from streamrl.inference.clients.openai_context import InferenceContext
from streamrl.inference.clients.registry import Registry
from streamrl.run.orchestrator.run_directory import resolve_run
from streamrl.stream.local_kafka.connect import client_settings
from streamrl.stream.log.codec import to_event, to_message
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.protocol import Log, Output, partitions_of
from streamrl.stream.processor.part import open_part
from streamrl.stream.records import Demand, Rollout, Server

EVEN = ("0", "2", "4", "6", "8")


def main(run: RunFile, log: Log, env: str, model: Path, groups: int) -> None:
    settings = run.envs[env]
    name = topology.outside_identity(env)
    context = InferenceContext.of_model(model, settings.temperature)
    key = resolve_reference(run.inference.api_key, "inference.api_key") or "none"
    world = World(log, env, name, settings.pool)

    # Opening the writer fences an earlier process of this name.
    with open_part(log, name, log.writer(name)) as part:
        for number in range(groups):
            server = world.wait_for_work()
            group = f"{env}-{time.time_ns()}"
            question = f"{number % 10}="
            api = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key)
            completion = api.chat.completions.create(
                model=server.model,
                messages=[{"role": "user", "content": question}],
                n=run.buffer_of(env).group_size,
                max_tokens=settings.max_tokens,
                temperature=settings.temperature,
                logprobs=True,
                # Without ids it is unknown whether the prompt is the one that was sampled from.
                extra_body={"return_token_ids": True, "skip_special_tokens": False},
            )
            # vLLM does not say which version sampled which token. None is older than this one.
            context.policy_version = server.version
            rollouts = rollouts_of(context, env, group, name, question, completion)
            part.writer.commit(
                [to_message(Output(topology.rollouts(env), group, each)) for each in rollouts]
            )
            part.meter.publish(context.metrics())
            world.limit.launched += 1
            world.limit.record_group(sum(rollout.total_tokens for rollout in rollouts))


def rollouts_of(
    context: InferenceContext, env: str, group: str, producer: str, question: str, completion: Any
) -> list[Rollout]:
    """A rollout of each choice. What is not aligned with the server's tokens is marked, and is not
    trained on.
    """
    return [
        context.create_rollout_from_choice(
            prompt=question,
            choice=choice,
            env_name=env,
            env_example_id=question,
            reward=1.0 if choice.message.content in EVEN else 0.0,
            prompt_token_ids=getattr(completion, "prompt_token_ids", None),
            group_id=group,
            producer=producer,
        )
        for choice in completion.choices
    ]


class World:
    """What the env has to know: which servers there are, and how much work is wanted."""

    def __init__(self, log: Log, env: str, producer: str, pool: str) -> None:
        self._env = env
        self.limit = OutstandingLimit(producer=producer, replicas=1, guess_tokens=64.0)
        self._registry = Registry(pool)
        offsets = log.beginning_offsets(partitions_of(log, [topology.SERVERS, topology.DEMAND]))
        self._began = log.end_offsets(offsets)
        self._reader = log.reader(offsets)

    def wait_for_work(self) -> Server:
        """Wait until a group is wanted, and a server is there to sample it."""
        while True:
            self._read_new()
            server = self._registry.choose(time.monotonic())
            if server is not None and self.limit.allows():
                return server

    def _read_new(self) -> None:
        for message in self._reader.poll(500, 0.2):
            event = to_event(message, ("demand", "server"))
            match event.record:
                case Demand(environment=self._env) as demand:
                    is_first = self.limit.demand is None
                    self.limit.demand = demand
                    if is_first:  # The groups of earlier processes are closed.
                        self.limit.launched += self.limit.closed
                case Server() as server:
                    is_old = event.offset < self._began[event.topic, event.partition]
                    self._registry.on_server(event.key, server, time.monotonic(), is_old)
                case None if event.topic == topology.SERVERS:
                    self._registry.on_server(event.key, None, time.monotonic())
                case _:
                    pass


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    of_run = resolve_run(sys.argv[1])
    main(
        run=of_run,
        log=KafkaLog(client_settings(of_run), of_run.run),
        env=sys.argv[2],
        model=Path(sys.argv[3]),
        groups=int(sys.argv[4]),
    )
