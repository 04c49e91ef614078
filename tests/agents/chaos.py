"""`python -m tests.agents.chaos`: sessions of 20 calls, while the gateway's replicas, the
assembler, the server, the agents and the broker are killed at random moments. Exit code 1 if a call
or a session was lost or doubled, or if a token differs from the same session without a kill.

The server is a stub whose answers are a function of the prompt, so what each session has to be is
known. Everything else is real: processes, broker, HTTP.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import click
import httpx
import numpy as np
import yaml

from streamrl.config import run_file, topology
from streamrl.config.run_file import RunFile
from streamrl.extensions.gateway.key_command import make_key
from streamrl.extensions.recordings.processors import processors_of
from streamrl.extensions.recordings.replay import replay
from streamrl.stream.local_kafka import broker, ports
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.kafka import topic_changes
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import ModelCall, Rollout
from tests.agents.account import records
from tests.inference.stub import Stub
from tests.support.sampling_stub import END, SamplingStub, by_checksum, rendered, text_of
from tests.support.waiting import patience

ROOT = Path(__file__).parents[2]
ENV = "agent"
TURNS = 20
AGENTS = 8  # at a time
BEAT_S = 0.5
ANSWER_S = 120.0  # an agent waits for so long
PAUSE_S = 0.5  # on average between two kills
GONE_S = 0.3  # how long a killed server or broker stays away
VICTIMS = ("gateway-0", "gateway-1", "assembler", "agent", "agent", "server", "broker")
STREAMRL = (sys.executable, "-m", "streamrl.cli")


class Killed(Exception):
    """An agent dies here."""


class Result(NamedTuple):
    sessions: int
    kills: Counter[str]
    lost: int  # calls that were answered, or sessions, that the log does not have
    doubled: int  # calls or sessions that count twice
    different: int  # rollouts whose tokens are not those of the session without a kill
    is_identical: bool  # the replay of the assembler

    @property
    def is_clean(self) -> bool:
        return self.is_identical and not (self.lost or self.doubled or self.different)


class Run:
    """A broker, two replicas of the gateway, an assembler, and a server that can be killed."""

    def __init__(self, directory: Path, stack: ExitStack, server: Stub | None = None) -> None:
        self.directory = directory
        self.broker = broker.start(directory / "kafka", die_with_parent=True)
        stack.callback(lambda: self.broker.stop())
        first, second = ports.choose_ports(0)
        while second != first + 1:
            first, second = first, first + 1
        self.urls = [f"http://127.0.0.1:{port}" for port in (first, second)]
        self.file = directory / "run.yaml"
        self.file.write_text(yaml.safe_dump(self._settings(first)))
        self.run: RunFile = run_file.load(self.file)
        self.key = make_key(self.run, ENV, "open", days=1)
        kafka = {"bootstrap.servers": self.broker.address}
        topic_changes.apply(self.run, kafka)
        self.log = KafkaLog(kafka, self.run.run)
        self.stub = stack.enter_context(server or SamplingStub())
        self.over = threading.Event()
        # By the name of a part: the arguments of `streamrl` that start it.
        self.commands = self._commands()
        # The URL of the replica of each call that was answered, and how many there were of a victim
        # when it was killed last.
        self.answers: list[str] = []
        self._answers_at_kill: dict[str, int] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for work in (self._beat, self._supervise):
            thread = threading.Thread(target=work)
            thread.start()
            stack.callback(thread.join)
        stack.callback(self.over.set)

    def kill(self, victim: str) -> None:
        self._answers_at_kill[victim] = self._answers_through(victim)
        if victim == "server":
            self.stub.mode = "broken"
            time.sleep(GONE_S)
            self.stub.mode = "ok"
        elif victim == "broker":
            port = self.broker.port
            self.broker.process.kill()
            self.broker.process.wait()
            time.sleep(GONE_S)
            self.broker = broker.start(self.directory / "kafka", port=port, die_with_parent=True)
        else:
            self._processes[victim].send_signal(signal.SIGKILL)

    def is_back(self, victim: str) -> bool:
        """Has a call been answered with its help since it was killed last? An answer needs the
        broker, the server and one replica, but not the assembler: that has to run.
        """
        if victim == "assembler":
            return self._processes[victim].poll() is None
        return self._answers_through(victim) > self._answers_at_kill.get(victim, 0)

    def _answers_through(self, victim: str) -> int:
        if victim.startswith("gateway"):
            return self.answers.count(self.urls[int(victim.rpartition("-")[2])])
        return len(self.answers)

    def _settings(self, port: int) -> dict[str, Any]:
        sessions = {"idle_s": 600, "reward_wait_s": 600}
        env = {"max_tokens": 200, "timeout_s": 60, "sessions": sessions}
        return {
            "run": "kill-agents",
            "runs_dir": str(self.directory),
            "kafka": {"bootstrap.servers": self.broker.address},
            "envs": {ENV: env},
            "gateway": {"port": port, "replicas": 2},
            "metrics": {"serve": False},
        }

    def _commands(self) -> dict[str, tuple[str, ...]]:
        file = str(self.file)
        return {
            "gateway-0": ("gateway", file, "--index", "0"),
            "gateway-1": ("gateway", file, "--index", "1"),
            "assembler": ("assembler", file),
        }

    def _supervise(self) -> None:
        """Start each part again once it has ended."""
        while not self.over.is_set():
            for name, arguments in list(self.commands.items()):
                process = self._processes.get(name)
                if process is None or process.poll() is not None:
                    self._processes[name] = self._start(name, arguments)
            self.over.wait(0.05)
        for process in self._processes.values():
            process.terminate()
            process.wait()

    def _start(self, name: str, arguments: tuple[str, ...]) -> subprocess.Popen[bytes]:
        with (self.directory / f"{name}.log").open("ab") as output:
            return subprocess.Popen([*STREAMRL, *arguments], stdout=output, stderr=output, cwd=ROOT)

    def _beat(self) -> None:
        producer = self.log.producer()
        while not self.over.wait(BEAT_S):
            record = self.stub.record()
            producer.send(to_message(Output(topology.SERVERS, self.stub.name, record)))
        producer.close()


class Agent:
    """An agent that asks, and asks again at another replica when one has gone."""

    def __init__(self, run: Run, seed: int) -> None:
        self._run = run
        self._draw = random.Random(seed)
        self._http = httpx.Client(timeout=patience(60))
        self.answered = Counter[str]()  # calls, by session
        self.dies = threading.Event()  # at its next call

    def work(self, session: str) -> None:
        """Have a session to its end, in as many lives as it takes."""
        while True:
            try:
                self._live(session)
                return
            except Killed:
                continue

    def _live(self, session: str) -> None:
        body = {"task_id": session, "session_id": session, "resume": True}
        begun = self._post("/rl/start_session", self._run.key, body, f"start {self._draw.random()}")
        messages: list[dict[str, str]] = []
        for turn in range(TURNS):
            messages.append({"role": "user", "content": question(session, turn)})
            asked = {"model": "policy", "messages": messages}
            answer = self._post("/v1/chat/completions", begun["api_key"], asked, f"turn {turn}")
            messages.append(answer["choices"][0]["message"])
            self.answered[session] = max(self.answered[session], turn + 1)
        self._post("/rl/set_reward", begun["grading_key"], {"reward": 1.0}, "reward")
        self._post("/rl/end_session", begun["grading_key"], {}, "end")

    def _post(self, path: str, key: str, body: dict[str, Any], name: str) -> dict[str, Any]:
        deadline = time.monotonic() + patience(ANSWER_S)
        said = ""
        while True:
            if self.dies.is_set():
                self.dies.clear()
                raise Killed
            url = self._draw.choice(self._run.urls)
            headers = {"Idempotency-Key": name, "Authorization": f"Bearer {key}"}
            try:
                found = self._http.post(url + path, json=body, headers=headers)
                if found.status_code == 200:
                    self._run.answers.append(url)
                    return found.json()
                if found.status_code < 500 and found.status_code != 429:
                    raise SystemExit(f"{path}: {found.status_code} {found.text}")
                said = found.text
            except httpx.HTTPError as error:
                said = repr(error)
            if time.monotonic() > deadline:
                limit_s = patience(ANSWER_S)
                raise SystemExit(f"{path}: no replica has answered for {limit_s:g} s: {said}")
            time.sleep(0.05)


def question(session: str, turn: int) -> str:
    return f"{session}, turn {turn}?"


def expected(session: str) -> list[int]:
    """The tokens of a session that nobody disturbs."""
    messages: list[dict[str, Any]] = []
    tokens: list[int] = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": question(session, turn)})
        prompt = rendered(messages, [])
        said = by_checksum(text_of(prompt), 0)
        tokens = [*prompt, *said.encode(), END]
        messages.append({"role": "assistant", "content": said})
    return tokens


def hurt(
    run: Run, agents: list[Agent], working: list[Future[None]], kills: int, seed: int
) -> Counter[str]:
    """Kill so many times, at random moments, or until an agent has failed: none ends otherwise. A
    part is killed again once it is back: a run in which nothing ever comes up shows nothing.
    """
    draw = random.Random(seed)
    struck = Counter[str]()
    while struck.total() < kills and not any(agent.done() for agent in working):
        time.sleep(draw.expovariate(1 / PAUSE_S))
        victim = draw.choice(VICTIMS)
        if not run.is_back(victim):
            continue
        if victim == "agent":
            draw.choice(agents).dies.set()
        else:
            run.kill(victim)
        struck[victim] += 1
    return struck


def account(run: Run, agents: list[Agent], sessions: list[str], kills: Counter[str]) -> Result:
    calls = [c for c in records(run.log, topology.turns(ENV)) if isinstance(c, ModelCall)]
    counted = {(call.session, call.request, call.choice): call for call in calls}
    in_log = Counter(call.session for call in counted.values())
    rollouts = [r for r in records(run.log, topology.rollouts(ENV)) if isinstance(r, Rollout)]
    made = Counter(rollout.rollout_uid for rollout in rollouts)
    different = 0
    for rollout in rollouts:
        tokens = [turn.tokens for turn in rollout.turns if turn.tokens is not None]
        whole = np.concatenate(tokens).tolist() if tokens else []
        if rollout.failure or whole != expected(rollout.rollout_uid):
            different += 1
            print(described(rollout))
    lost = sum(not made[session] for session in sessions)
    for agent in agents:
        lost += sum(max(count - in_log[name], 0) for name, count in agent.answered.items())
    doubled = sum(max(count - 1, 0) for count in made.values())
    doubled += sum(max(count - TURNS, 0) for count in in_log.values())
    part = processors_of(run.run)["assembler"]
    difference = replay(run.log, part)[0].difference
    return Result(len(sessions), kills, lost, doubled, different, not difference)


def described(rollout: Rollout) -> str:
    """What is known of a rollout that is not what it should be."""
    sizes = [f"{'fork ' if turn.fork else ''}{turn.token_count}" for turn in rollout.turns]
    return f"{rollout.rollout_uid}: {rollout.failure or rollout.metadata}, turns of {sizes}"


def killed(directory: Path, kills: int, seed: int) -> Result:
    """Have sessions until so many kills are over, and account for all of them."""
    with ExitStack() as stack:
        run = Run(directory, stack)
        agents = [Agent(run, seed + number) for number in range(AGENTS)]
        sessions: list[str] = []
        over = threading.Event()

        def keep_on(agent: Agent, number: int) -> None:
            count = 0
            while not over.is_set():
                session = f"s{number}-{count}"
                sessions.append(session)
                agent.work(session)
                count += 1

        with ThreadPoolExecutor(AGENTS) as pool:
            working = [pool.submit(keep_on, agent, n) for n, agent in enumerate(agents)]
            try:
                struck = hurt(run, agents, working, kills, seed)
            finally:
                over.set()
            for each in working:
                each.result()
        wait_for_rollouts(run, len(sessions))
        return account(run, agents, sessions, struck)


def wait_for_rollouts(run: Run, count: int) -> None:
    deadline = time.monotonic() + patience(60)
    while time.monotonic() < deadline:
        rollouts = [r for r in records(run.log, topology.rollouts(ENV)) if isinstance(r, Rollout)]
        if len(rollouts) >= count:
            return
        time.sleep(0.2)


@click.command()
@click.option("--kills", type=click.IntRange(1), default=200, show_default=True)
@click.option("--seed", type=int, default=0, help="Whom and when.")
def main(kills: int, seed: int) -> None:
    """Kill parts of running sessions so many times, then account for every call."""
    os.environ.pop("STREAMRL_KAFKA", None)
    with tempfile.TemporaryDirectory() as directory:
        began = time.monotonic()
        result = killed(Path(directory), kills, seed)
        print(f"{kills} kills in {time.monotonic() - began:.0f} s: {dict(result.kills)}")
        print(
            f"{result.sessions} sessions of {TURNS} calls: {result.lost} lost, {result.doubled}"
            f" doubled, {result.different} with other tokens; replay"
            f" {'identical' if result.is_identical else 'DIFFERENT'}"
        )
    sys.exit(0 if result.is_clean else 1)


if __name__ == "__main__":
    main()
