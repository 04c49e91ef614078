"""The env's loop over a log in memory, with a client that answers at once: what it launches, what
it publishes, and how it goes on after a crash.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from typing import ClassVar

import pytest

from streamrl.config.run_file import RunFile, parse
from streamrl.config.sections.envs import Env
from streamrl.envs import process, report
from streamrl.envs import replica as replica_module
from streamrl.envs.api import Problem
from streamrl.envs.replica import BURST_S
from streamrl.envs.shipped.copy_digits import CopyDigits
from streamrl.inference.clients import client
from streamrl.inference.clients.client import SampledCompletion, SamplingFailed
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.memory import MemoryLog, MemoryWriter
from streamrl.stream.log.protocol import Message, Output
from streamrl.stream.log.reading import read
from streamrl.stream.records import Demand, EnvProgress, Rollout, Server, VersionSpan
from streamrl.system.errors import ConfigError, TopicMissing, TransactionFailed
from tests.support import life
from tests.support.build import floats, tokens
from tests.support.data_path import publish
from tests.support.life import PATIENCE_S
from tests.support.waiting import patience

GROUP = 2  # rollouts; 4 + 3 tokens each: 14 a group


class FakeClient:
    """Answers every conversation with the same three tokens."""

    delay_s = 0.0
    fails = ""
    in_flight = most = 0
    asked: ClassVar[list[str]] = []

    def __init__(self, pool: str, **settings: object) -> None: ...

    def on_server(self, server_id: str, server: object, old: bool = False) -> None: ...

    async def close(self) -> None: ...

    async def sample(
        self, messages: list[dict[str, str]], n: int, env: Env, tools: object = (), *more: object
    ) -> list[SampledCompletion]:
        FakeClient.asked.append(messages[-1]["content"])
        FakeClient.in_flight += 1
        FakeClient.most = max(FakeClient.most, FakeClient.in_flight)
        try:
            await asyncio.sleep(self.delay_s)
        finally:
            FakeClient.in_flight -= 1
        if self.fails:
            raise SamplingFailed(self.fails)
        spans = [VersionSpan(version=0, start=0, end=3)]
        return [
            SampledCompletion(
                server_id="s",
                prompt_tokens=tokens(1, 8, 11, 15),
                tokens=tokens(8, 11, 2),
                logprobs=floats(-1, -1, -1),
                text="47",
                finish_reason="stop",
                version_spans=spans,
                latency_s=0.0,
                temperature=1.0,
                top_p=1.0,
                top_k=-1,
                max_tokens=3,
            )
            for _ in range(n)
        ]


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    monkeypatch.setattr(client, "Client", FakeClient)
    for name, value in (("delay_s", 0.0), ("fails", ""), ("in_flight", 0), ("most", 0)):
        monkeypatch.setattr(FakeClient, name, value)
    monkeypatch.setattr(FakeClient, "asked", [])
    return FakeClient


def run_file(replicas: int = 1, **env: object) -> RunFile:
    return parse(
        {
            "run": "r",
            "envs": {"copy-digits": {"replicas": replicas, **env}},
            "buffer": {"group_size": GROUP},
        }
    )


def log_for(replicas: int = 1) -> MemoryLog:
    topics = [
        "demand",
        "servers",
        "rollouts.copy-digits",
        "metrics",
        *(f"journal.env-copy-digits-{i}" for i in range(replicas)),
    ]
    return MemoryLog(dict.fromkeys(topics, 1))


def wants(log: MemoryLog, wanted: int, closed: dict[str, int] | None = None) -> None:
    demand = Demand(
        environment="copy-digits", wanted_tokens=wanted, held_tokens=0, closed_groups=closed or {}
    )
    publish(
        log,
        Output("demand", "copy-digits", demand),
        *(
            Output(
                "servers", f"s{version}", Server(server_id=f"s{version}", url="", version=version)
            )
            for version in (4, 3)
        ),
    )


def published(log: MemoryLog) -> list[Rollout]:
    events = (to_event(m, ("rollout",)).record for m in read(log, "rollouts.copy-digits", 0, 0))
    return [record for record in events if isinstance(record, Rollout)]


def live(
    log: MemoryLog,
    run: RunFile,
    until: Callable[[], bool],
    replica: int = 0,
    timeout_s: float = PATIENCE_S,
) -> float:
    """One life of the env. Returns the seconds that stopping took."""
    return life.run_until(
        lambda stop: process.main(run, log, stop, "copy-digits", replica), until, timeout_s
    )


def no_more_than(log: MemoryLog, groups: int) -> Callable[[], bool]:
    """Holds once so many groups are published, and none has followed for a while."""
    counted = -1
    since = time.monotonic()

    def rests() -> bool:
        nonlocal counted, since
        if len(published(log)) != counted:
            counted = len(published(log))
            since = time.monotonic()
        return counted >= groups * GROUP and time.monotonic() > since + 0.5

    return rests


def test_it_publishes_what_is_wanted_and_no_more():
    log = log_for()
    wants(log, 60)
    live(log, run_file(max_tokens=3), no_more_than(log, 5))
    # A guess of 12 tokens a group lets it begin 5; those done are measured at 14, so a fifth (at
    # 56) is the last below 60
    assert {r.group_id for r in published(log)} == {f"copy-digits-{i}" for i in range(5)}
    assert len(published(log)) == 5 * GROUP


def test_the_seed_decides_which_problems_are_posed(fake: type[FakeClient]):
    """The first one of seed 5 is the second one of seed 0."""
    seeded = {"run": "r", "envs": {"copy-digits": {"seed": 5}}, "buffer": {"group_size": GROUP}}
    log = log_for()
    wants(log, 1)
    live(log, parse(seeded), lambda: len(published(log)) == GROUP)
    assert fake.asked == ["57="]


def test_what_was_closed_makes_room():
    log = log_for()
    wants(log, 60)
    live(log, run_file(max_tokens=3), lambda: len(published(log)) == 5 * GROUP)
    wants(log, 60, {"copy-digits-0": 4})
    live(log, run_file(max_tokens=3), lambda: len({r.group_id for r in published(log)}) == 9)


def test_without_a_demand_nothing_is_launched_and_it_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(report, "REPORT_S", 0.1)
    monkeypatch.setattr(report, "NO_DEMAND_S", 0.2)
    log = log_for()
    live(log, run_file(), lambda: "no demand heard" in caplog.text)
    assert published(log) == []


def test_groups_in_flight_and_their_rate_are_bounded(fake: type[FakeClient]):
    fake.delay_s = 0.05
    log = log_for()
    wants(log, 10**6)
    live(log, run_file(max_groups_in_flight=3), lambda: len(published(log)) >= 40)
    assert fake.most == 3
    log = log_for()
    wants(log, 10**6)
    begun = time.monotonic()
    live(log, run_file(max_groups_per_s=10), lambda: len(published(log)) >= 15 * GROUP)
    # The first launch is due at once, and those of the burst before it are made up for.
    assert (
        len({r.group_id for r in published(log)}) <= 10 * (time.monotonic() - begun + BURST_S) + 2
    )


def test_a_generation_that_fails_is_published_with_its_failure(fake: type[FakeClient]):
    fake.fails = "inference-0: no answer within 60 s"
    log = log_for()
    wants(log, 10)
    live(log, run_file(), lambda: len(published(log)) >= GROUP)
    assert {(r.failure, r.policy_version) for r in published(log)} == {(fake.fails, 4)}


def test_failures_say_nothing_about_the_size_of_a_group_and_slow_it_down(
    fake: type[FakeClient], caplog: pytest.LogCaptureFixture
):
    fake.fails = "refused"
    log = log_for()
    wants(log, 10**6, {"copy-digits-0": 0})
    begun = time.monotonic()
    live(log, run_file(max_groups_in_flight=2), lambda: len(published(log)) >= 7 * GROUP)
    # Pairs at 0, 0.2, 0.6, 1.2 s: the pause grows by 0.1 s with each group in a row
    assert time.monotonic() - begun > 1.0 and len({r.group_id for r in published(log)}) <= 10
    assert "rollouts failed, the last: refused" in caplog.text
    log = log_for()
    wants(log, 60)
    live(log, run_file(max_tokens=3), no_more_than(log, 5))
    # 12 tokens each, as guessed: not one more because failures cost nothing
    assert len({r.group_id for r in published(log)}) == 5


def test_a_problem_that_cannot_be_posed_is_published_as_failed_and_the_next_is_posed(
    monkeypatch: pytest.MonkeyPatch,
):
    def problem(self: CopyDigits, number: int) -> Problem:
        if number == 1:
            raise KeyError("no such word")
        return Problem([{"role": "user", "content": "47="}], "47")

    monkeypatch.setattr(CopyDigits, "problem", problem)
    log = log_for()
    wants(log, 60)
    live(log, run_file(max_tokens=3), lambda: len({r.group_id for r in published(log)}) == 5)
    failed = {(r.problem_id, r.failure) for r in published(log) if r.failure}
    assert failed == {("1", "problem 1: KeyError: 'no such word'")}


@pytest.mark.parametrize("topic", ["demand", "rollouts.copy-digits"])
def test_a_missing_topic_is_named(topic: str):
    log = MemoryLog({name: 1 for name in log_for().topics() if name != topic})
    if topic != "demand":
        wants(log, 60)
    with pytest.raises(TopicMissing, match=topic):
        live(log, run_file(), lambda: False)


@pytest.mark.parametrize("die_at", range(8))
def test_after_a_crash_no_problem_is_repeated_or_skipped(
    die_at: int, monkeypatch: pytest.MonkeyPatch
):
    """Dies before or after any of the first commits, its claim among them, then lives on."""
    log = log_for()
    calls = count()
    commit = MemoryWriter.commit

    def dying(writer: MemoryWriter, *arguments: object) -> list[int]:
        if next(calls) == die_at:
            raise RuntimeError("killed before")
        offsets = commit(writer, *arguments)  # type: ignore[arg-type]
        if next(calls) == die_at:
            raise RuntimeError("killed after")
        return offsets

    wants(log, 10**6)
    monkeypatch.setattr(MemoryWriter, "commit", dying)
    with pytest.raises(RuntimeError, match="killed"):
        live(log, run_file(max_groups_in_flight=4), lambda: False)
    monkeypatch.setattr(MemoryWriter, "commit", commit)
    live(log, run_file(max_groups_in_flight=4), lambda: len(published(log)) >= 60)
    uids = [(r.group_id, r.rollout_uid) for r in published(log)]
    assert len(uids) == len(set(uids))
    assert set(uids) == {
        (r.group_id, f"{r.group_id}-{i}") for r in published(log) for i in range(GROUP)
    }
    last = [
        to_event(m, ("env-progress",)).record for m in read(log, "journal.env-copy-digits-0", 0, 0)
    ][-1]
    assert isinstance(last, EnvProgress)
    done = {int(r.problem_id) for r in published(log)}
    assert last.published_groups == len(done)
    assert done | set(last.open_problems) >= set(range(max(done))) and not done & set(
        last.open_problems
    )


def test_replicas_pose_different_problems():
    log = log_for(2)
    wants(log, 100)
    for replica in (0, 1):
        live(
            log,
            run_file(2, max_tokens=3),
            lambda r=replica: len({x.group_id for x in published(log)}) >= 4 * (r + 1),
            replica,
        )
    by_producer = {
        p: {int(r.problem_id) % 2 for r in published(log) if r.producer == p}
        for p in ("copy-digits-0", "copy-digits-1")
    }
    assert by_producer == {"copy-digits-0": {0}, "copy-digits-1": {1}}


def test_replicas_that_are_added_pose_no_problem_again():
    log = log_for(3)
    wants(log, 10**6)
    for replicas, replica in ((1, 0), (3, 2), (3, 0), (3, 1)):
        before = len(published(log))
        live(
            log,
            run_file(replicas, max_tokens=3, max_groups_in_flight=2),
            lambda n=before: len(published(log)) >= n + 10,
            replica,
        )
    numbers = list(dict.fromkeys((r.producer, r.problem_id) for r in published(log)))
    assert len({number for _, number in numbers}) == len(numbers) >= 4 * 5


def test_it_stops_at_once_whatever_is_in_flight(fake: type[FakeClient]):
    fake.delay_s = 3600.0
    log = log_for()
    wants(log, 10**6)
    assert live(log, run_file(), lambda: fake.most > 0) < patience(10)


def test_what_is_finished_when_it_is_stopped_is_committed(
    fake: type[FakeClient], monkeypatch: pytest.MonkeyPatch
):
    log = log_for()
    commit = MemoryWriter.commit
    stopping = threading.Event()
    asked = count()

    def slow(writer: MemoryWriter, *arguments: object) -> list[int]:
        offsets = commit(writer, *arguments)  # type: ignore[arg-type]
        if published(log) and not stopping.is_set():
            stopping.set()
            # the groups launched with the first finish meanwhile, and it is told to stop
            time.sleep(0.4)
        return offsets

    async def sample(
        self: FakeClient, messages: list[dict[str, str]], n: int, env: Env, tools: object = ()
    ) -> list[SampledCompletion]:
        fake.delay_s = 0.2 if next(asked) else 0.0
        return await answer(self, messages, n, env)

    answer = fake.sample
    monkeypatch.setattr(MemoryWriter, "commit", slow)
    monkeypatch.setattr(fake, "sample", sample)
    wants(log, 10**6)
    live(log, run_file(max_groups_in_flight=3), stopping.is_set)
    assert {r.group_id for r in published(log)} == {f"copy-digits-{i}" for i in range(3)}


def hosted_run(**settings: dict[str, object]) -> tuple[RunFile, MemoryLog]:
    """A run whose envs copy digits in one host, and its log, in which each wants much."""
    envs = {
        env: {"kind": "copy-digits", "host": "all", "max_tokens": 3, **more}
        for env, more in settings.items()
    }
    topics = ["demand", "servers", "metrics", "journal.host-all", *(f"rollouts.{e}" for e in envs)]
    log = MemoryLog(dict.fromkeys(topics, 1))
    for env in envs:
        demand = Demand(environment=env, wanted_tokens=10**6, held_tokens=0, closed_groups={})
        publish(log, Output("demand", env, demand))
    run = parse({"run": "r", "envs": envs, "buffer": {"group_size": GROUP}})
    return run, log


def rollouts_of(log: MemoryLog, env: str) -> list[Rollout]:
    events = (to_event(m, ("rollout",)).record for m in read(log, f"rollouts.{env}", 0, 0))
    return [record for record in events if isinstance(record, Rollout)]


def test_a_host_is_all_its_envs_and_continues_each_where_it_was():
    run, log = hosted_run(first={}, second={"replicas": 2})
    producers = ("first-0", "second-0", "second-1")

    def fewest() -> int:
        made = Counter(r.producer for env in run.envs for r in rollouts_of(log, env))
        return min(made[producer] for producer in producers)

    for least in (10, 20):
        life.run_until(
            lambda stop: process.host_main(run, log, stop, "all"),
            lambda n=least: fewest() >= n * GROUP,
        )
    for env in run.envs:
        made = rollouts_of(log, env)
        numbers = [(r.producer, r.rollout_uid) for r in made]
        assert len(numbers) == len(set(numbers))
        posed = {int(rollout.problem_id) for rollout in made}
        assert len(posed) * GROUP == len(made)


def test_an_env_whose_code_blocks_does_not_hold_up_the_others_of_its_host(
    monkeypatch: pytest.MonkeyPatch,
):
    run, log = hosted_run(quick={}, blocked={"seed": 5})
    released = threading.Event()
    rewards = CopyDigits.rewards

    def blocking(self: CopyDigits, *arguments: object) -> dict[str, float]:
        if self.seed:
            released.wait()
        return rewards(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(CopyDigits, "rewards", blocking)
    try:
        life.run_until(
            lambda stop: process.host_main(run, log, stop, "all"),
            lambda: len(rollouts_of(log, "quick")) >= 50 * GROUP,
        )
        assert rollouts_of(log, "blocked") == []
    finally:
        released.set()


def test_an_unknown_host_is_named_and_a_hosted_env_has_no_process():
    run, log = hosted_run(first={})
    with pytest.raises(ConfigError, match="no env of the run has the host 'al'; "):
        process.host_main(run, log, threading.Event(), "al")
    with pytest.raises(ConfigError, match="start it with `streamrl host RUN all`"):
        process.main(run, log, threading.Event(), "first")


def test_an_unknown_env_or_replica_is_named():
    with pytest.raises(ConfigError, match="the run has no env 'nope'; it has copy-digits"):
        process.main(run_file(), log_for(), threading.Event(), "nope")
    with pytest.raises(ConfigError, match="replicas is 1: there is no replica 4"):
        process.main(run_file(), log_for(), threading.Event(), "copy-digits", 4)


def held_out(problems: int, digits: int = 1) -> RunFile:
    """A run whose env has ten problems, so many of which are kept for evaluation."""
    envs = {"copy-digits": {"max_tokens": 3, "params": {"digits": digits}}}
    return parse(
        {
            "run": "r",
            "envs": envs,
            "buffer": {"group_size": GROUP},
            "eval": {"envs": {"copy-digits": {"problems": problems}}},
        }
    )


def test_what_is_kept_for_evaluation_is_never_posed():
    log = log_for()
    wants(log, 10**6)
    live(log, held_out(7), lambda: len(published(log)) >= 60)
    posed = {rollout.turns[0].message for rollout in published(log)}
    assert posed == {f"{i}=" for i in range(10)} - held_texts() and len(posed) == 3
    last = [
        to_event(m, ("env-progress",)).record for m in read(log, "journal.env-copy-digits-0", 0, 0)
    ][-1]
    assert (
        isinstance(last, EnvProgress)
        and last.published_groups == len({r.group_id for r in published(log)}) < last.next_problem
    )


def test_an_env_that_has_nothing_else_to_pose_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replica_module, "HELD_OUT_IN_A_ROW", 100)
    log = log_for()
    wants(log, 10**6)
    with pytest.raises(
        ConfigError,
        match=(
            r"^envs.copy-digits: 100 problems in a row are kept for evaluation; lower `problems` in"
            r" eval.envs$"
        ),
    ):
        live(log, held_out(10), lambda: False)


def test_an_open_problem_that_is_kept_since_is_let_go():
    log = log_for()
    wants(log, 10**6)
    progress = EnvProgress(producer="copy-digits-0", next_problem=20, open_problems=[*range(20)])
    publish(log, Output("journal.env-copy-digits-0", "copy-digits-0", progress))
    live(log, held_out(7), lambda: len(published(log)) >= 60)
    assert not {rollout.turns[0].message for rollout in published(log)} & held_texts()


def held_texts() -> set[str]:
    """The first seven different problems that the seed gives."""
    return set(
        list(dict.fromkeys(CopyDigits(0, 1).problem(i).messages[0]["content"] for i in range(100)))[
            :7
        ]
    )


class Absent(MemoryLog):
    """A broker that is away for a while: the next commits fail, "lost" before or "unanswered" after
    they are in the log.
    """

    def __init__(self, topics: dict[str, int], *fails: str) -> None:
        super().__init__(topics)
        self.fails = list(fails)
        self.opened = 0

    def writer(self, identity: str, changelog_topic: str = "") -> MemoryWriter:
        self.opened += identity.startswith("env-")
        made = super().writer(identity, changelog_topic)
        return AbsentWriter(self, made) if identity.startswith("env-") else made


class AbsentWriter(MemoryWriter):
    def __init__(self, log: Absent, made: MemoryWriter) -> None:
        super().__init__(log, made._identity, made._epoch)
        self._absent = log

    def commit(self, messages: Sequence[Message]) -> int:
        how = self._absent.fails.pop(0) if self._absent.fails else ""
        offset = super().commit(messages) if how != "lost" else -1
        if how:
            raise TransactionFailed(f"the broker is away ({how})")
        return offset


@pytest.mark.parametrize(
    "fails", [("lost", "lost", "lost"), ("unanswered",), ("lost", "unanswered")]
)
def test_what_was_sampled_outlives_the_absence_of_the_broker(fails: tuple[str, ...]):
    """No life ends, nothing in flight is asked for again, and every rollout is there once."""
    asked: list[int] = []

    class Counting(FakeClient):
        async def sample(
            self,
            messages: list[dict[str, str]],
            n: int,
            env: Env,
            tools: object = (),
            *more: object,
        ) -> list[SampledCompletion]:
            asked.append(n)
            return await super().sample(messages, n, env, tools, *more)

    log = Absent(
        dict.fromkeys(
            ("demand", "servers", "rollouts.copy-digits", "metrics", "journal.env-copy-digits-0"), 1
        ),
        *fails,
    )
    wants(log, 60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "Client", Counting)
        live(log, run_file(max_tokens=3), no_more_than(log, 5))
    uids = [rollout.rollout_uid for rollout in published(log)]
    assert (
        len(uids) == len(set(uids)) == len(asked) * GROUP
        and not log.fails
        and log.opened == 1 + len(fails)
    )
