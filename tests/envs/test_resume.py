"""Where a replica goes on, by what lies in the log."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from streamrl.config.run_file import RunFile, parse
from streamrl.config.sections.envs import Env, PassRate
from streamrl.envs.api import BaseEnv
from streamrl.envs.difficulty_filter import ProblemStats
from streamrl.envs.engine.runner import RolloutRunner
from streamrl.envs.host import EnvHost
from streamrl.envs.replica import Replica
from streamrl.envs.resume import (
    ReplicaName,
    begin_reading,
    progress_of_all,
    records_turns,
    resume_replicas,
)
from streamrl.envs.shipped.calculator import Calculator
from streamrl.envs.shipped.copy_digits import CopyDigits
from streamrl.inference.clients.client import make_client
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Output
from streamrl.stream.records import Demand, EnvProgress, Visit
from tests.support.data_path import publish

ENV = "copy-digits"
OTHER = "copy-digits-2"  # its name begins like the env's


def run_file(replicas: int) -> RunFile:
    envs = {ENV: {"replicas": replicas, "max_tokens": 3}, OTHER: {"kind": ENV}}
    return parse({"run": "r", "envs": envs, "buffer": {"group_size": 2}})


def log_with(*known: tuple[str, EnvProgress]) -> MemoryLog:
    topics = ["demand", "servers", f"visits.{ENV}", *(topic for topic, _ in known)]
    log = MemoryLog(dict.fromkeys(topics, 1))
    publish(log, *(Output(topic, made.producer, made) for topic, made in known))
    return log


def resumed(log: MemoryLog, replicas: int, number: int) -> Replica:
    run = run_file(replicas)
    client = make_client(run, "generation")
    settings = run.envs[ENV]
    assert isinstance(settings, Env)
    runner = RolloutRunner(CopyDigits(seed=0), settings, client, {})
    (replica,) = resume_replicas(run, log, {ReplicaName(ENV, number): runner})
    return replica


FIRST = EnvProgress(
    producer=f"{ENV}-0", next_problem=7, open_problems=[5], published_groups=6, replicas=1
)
LOG = ((f"journal.env-{ENV}-0", FIRST), (f"journal.env-{OTHER}-0", FIRST))


def test_a_replica_goes_on_where_its_last_process_was():
    replica = resumed(log_with(*LOG), 1, 0)
    assert replica.cursor.progress == FIRST
    assert replica.limit.launched == 7  # the six that are published, and the open one


def test_a_replica_waits_for_no_group_that_its_last_process_had_forgotten():
    forgetful = structs.replace(FIRST, epoch=2, forgotten_groups=4)
    limit = resumed(log_with((f"journal.env-{ENV}-0", forgetful)), 1, 0).limit
    assert (limit.launched, limit.epoch, limit.forgotten) == (3, 2, 4)


def test_a_replica_that_is_added_begins_behind_all_problems_that_were_posed():
    progress = resumed(log_with(*LOG), 3, 1).cursor.progress
    assert (progress.producer, progress.next_problem, progress.open_problems) == (
        f"{ENV}-1",
        7,
        [],
    )


def test_the_progress_of_an_env_is_not_that_of_another_whose_name_begins_alike():
    other = structs.replace(FIRST, producer=f"{OTHER}-0")
    log = log_with(LOG[0], (f"journal.env-{OTHER}-0", other))
    assert progress_of_all(log, {ENV}) == {ENV: [FIRST]}
    assert progress_of_all(log, {ENV, OTHER}) == {ENV: [FIRST], OTHER: [other]}


def test_an_env_goes_on_in_a_host_and_out_of_it_from_its_newest_progress():
    later = structs.replace(FIRST, next_problem=9, published_groups=8)
    latest = structs.replace(later, next_problem=10)
    other = structs.replace(FIRST, producer=f"{OTHER}-0")
    own, host = f"journal.env-{ENV}-0", "journal.host-all"
    log = log_with((own, FIRST), (host, later), (host, other), (host, latest))
    assert progress_of_all(log, {ENV}) == {ENV: [latest]}
    assert resumed(log, 1, 0).cursor.progress == latest


def records(kind: str, env: BaseEnv, **settings: int) -> bool:
    run = parse({"run": "r", "envs": {ENV: {"kind": kind, **settings}}})
    return records_turns(run, ENV, env)


def test_model_calls_are_recorded_where_a_rollout_may_have_several_turns():
    assert records("calculator", Calculator(seed=0))
    assert not records("calculator", Calculator(seed=0), max_turns=1)
    one_turn = CopyDigits(seed=0)
    assert not records("copy-digits", one_turn)
    assert not records("mine.py:Mine", one_turn)  # which the run file cannot know


def test_all_visits_are_known_before_a_problem_is_chosen():
    log = log_with()
    visit = Visit(environment=ENV, problem=3, epoch=0, passed=0, rollouts=2)
    demand = Demand(environment=ENV, wanted_tokens=9, held_tokens=0, closed_groups={})
    publish(log, Output(f"visits.{ENV}", "3-0", visit), Output("demand", ENV, demand))
    replica = resumed(log, 1, 0)
    unfiltered = EnvHost([replica], [])
    assert begin_reading(unfiltered, log) == {("demand", 0): 0, ("servers", 0): 0}
    env = CopyDigits(seed=0)
    seen = list[Visit]()

    class Stats(ProblemStats):
        def on_visit(self, visit: Visit) -> None:
            seen.append(visit)

    host = EnvHost([replace(replica, stats=Stats(PassRate(), ENV, env.dataset_index))], [])
    offsets = {("demand", 0): 0, ("servers", 0): 0, (f"visits.{ENV}", 0): 1}
    assert begin_reading(host, log) == offsets
    assert seen == [visit]
    assert host.began == {**offsets, ("demand", 0): 1}
