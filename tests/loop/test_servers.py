"""Real servers in a run that goes on: one joins, one is killed with requests in it, one leaves;
conversations, under AReaL's capacity.
"""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections import Counter
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import yaml

from streamrl.batcher import process as batcher
from streamrl.buffer import process as buffer
from streamrl.config import topology
from streamrl.extensions.recordings.audit import audit
from streamrl.extensions.recordings.replay import replay
from streamrl.stream.local_kafka import connect
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.reading import read
from streamrl.stream.records import Metric, Rollout, Server
from tests.loop.runs import ROOT, STREAMRL, Live, live
from tests.support.live import vllm_processes
from tests.support.waiting import patience

ENV = "guess-number"
START_S = 400.0  # of vLLM, on a machine that does much else
Request = tuple[float, str]  # when it was answered, by whom


@pytest.mark.live
@pytest.mark.slow
def test_servers_join_leave_and_die_in_mid_request_and_no_rollout_is_lost_or_doubled(
    tmp_path: Path,
):
    settings = yaml.safe_load((ROOT / "deploy" / "runs" / f"{ENV}.yaml").read_text())
    settings["inference"]["replicas"], settings["batcher"]["admission"] = 2, "capacity"
    settings["envs"][ENV]["timeout_s"] = START_S  # a server that is frozen for a while is not late
    del settings["orchestrator"]
    with live(tmp_path, settings) as run:
        run.up()
        run.until(lambda: run.version() >= 1, "version 1", START_S)
        guest = subprocess.Popen(
            [*STREAMRL, "inference", str(run.file), "--index", "2"],
            cwd=ROOT,
            env=run.environment,
            start_new_session=True,
        )
        run.until(
            lambda: {"inference-0", "inference-1", "inference-2"} <= ready(run),
            "three servers",
            START_S,
        )
        # its first answers take longer: it is no equal yet
        run.advances(6, "with a third server that is new", START_S)
        begin_s = time.time()
        run.advances(14, "with three servers", START_S)
        end_s = time.time()
        kill_s = kill_in_mid_request(run, "inference-1")
        guest.terminate()
        assert guest.wait(patience(60)) == 0 and servers(run)["inference-2"] is None
        run.advances(2, "after inference-2 has left", START_S)
        run.until(lambda: alive(run, "inference-1", kill_s), "another life of inference-1", START_S)
        assert run.process is not None
        run.process.send_signal(signal.SIGINT)
        run.wait(60)
        run.nothing_left()
        with connect.connect_or_start(run.run):
            check_account(run)
            check_cut(run, "inference-1", kill_s)
            check_requests(run, begin_s, end_s)
            check_capacity(run)


def servers(run: Live) -> dict[str, Server | None]:
    """The last record of each."""
    return {
        event.key: event.record
        for event in (to_event(m, ("server",)) for m in read(run.log(), "servers", 0, 0))
    }  # type: ignore[misc]


def ready(run: Live) -> set[str]:
    return {
        name
        for name, server in servers(run).items()
        if server is not None and server.state == "ready"
    }


def alive(run: Live, name: str, since_s: float) -> bool:
    """Has its agent, or another one under its name, said something since, and nothing of an end?"""
    server = servers(run)[name]
    return server is not None and server.state != "error" and server.heartbeat_s > since_s


def kill_in_mid_request(run: Live, name: str) -> float:
    """Frozen first, so that what is sent to it is not answered; then SIGKILL for all of it. The
    others go on with the run and do its requests.

    Returns when it was killed.
    """
    record = servers(run)[name]
    assert record is not None
    family = vllm_processes(record.url)
    for process in family:
        process.suspend()
    run.advances(1, f"while {name} does not answer", START_S)
    killed_s = time.time()
    for process in family:
        process.kill()
    psutil.wait_procs(family, 10)
    run.advances(2, f"after {name} was killed", START_S)
    return killed_s


def check_account(run: Live) -> None:
    """Each rollout has ended once, or is in flight; no group lacks one, and none has failed; and
    the run replays bit for bit.
    """
    log = run.log()
    account = audit(log, run.run)
    rollouts = published(run)
    counts = Counter((rollout.group_id, rollout.rollout_uid) for rollout in rollouts)
    groups = {rollout.group_id for rollout in rollouts}
    assert account.balanced and account.published == len(rollouts), account.problems
    assert [rollout.failure for rollout in rollouts if rollout.failure] == []
    assert counts == {
        (group, f"{group}-{i}"): 1 for group in groups for i in range(run.run.buffer.group_size)
    }
    assert [
        replay(log, part)[0].difference
        for part in (buffer.make_processor(run.run), batcher.make_processor(run.run))
    ] == ["", ""]
    print(f"{len(rollouts)} rollouts in {len(groups)} groups: none failed, none lost, none doubled")


def check_cut(run: Live, name: str, killed_s: float) -> None:
    """Requests ended at that moment without an answer: the log of the env says so."""
    log = (run.run.directory / "logs" / f"env-{ENV}-0.log").read_text()
    said = re.findall(rf"^(\S+ \S+) WARNING .*: {name}: (?!no answer)", log, re.MULTILINE)
    cut = [
        time_s
        for time_s in (datetime.fromisoformat(when).timestamp() for when in said)
        if -1 <= time_s - killed_s <= 15
    ]
    print(f"{len(cut)} requests were cut by its death")
    assert cut


def check_requests(run: Live, begin_s: float, end_s: float) -> None:
    """Among three servers they are nearly even, as far as those that share two cores are equal
    (`test_registry.py` has equal ones: 10 %). More turns stay where their conversation was than a
    third, which is chance.
    """
    asked = dict[tuple[str, str] | tuple[str, int], Request]()
    pairs = list[tuple[str, str]]()
    for rollout in published(run):
        turns = [
            (turn.timestamp or 0.0, turn.inference_metadata.server)
            for turn in rollout.turns
            if turn.inference_metadata
        ]
        asked[rollout.group_id, ""] = turns[0]  # one request for the first turn of all
        asked |= {(rollout.rollout_uid, number): turn for number, turn in enumerate(turns[1:])}
        pairs += [
            (one, other)
            for (time_s, one), (_, other) in pairwise(turns)
            if begin_s <= time_s <= end_s
        ]
    counts = Counter(server for time_s, server in asked.values() if begin_s <= time_s <= end_s)
    stayed = sum(one == other for one, other in pairs) / len(pairs)
    even = counts.total() / 3
    print(
        f"{counts.total()} requests while there were three: {dict(counts)}; {stayed:.1%} of the"
        " turns stayed where they were"
    )
    assert set(counts) == {"inference-0", "inference-1", "inference-2"} and stayed > 0.5
    assert all(abs(count - even) <= 0.2 * even for count in counts.values()), counts


def check_capacity(run: Live) -> None:
    """What the env said of itself each second; and how many rollouts went on across an update."""
    said = [
        record.values for record in run.records("metrics", "metric") if isinstance(record, Metric)
    ]
    account = [
        (values["env/groups_outstanding"], values["env/groups_capacity"])
        for values in said
        if "env/groups_capacity" in values
    ]
    mixed = [
        values["batcher/mixed_versions_frac"]
        for values in said
        if "batcher/mixed_versions_frac" in values
    ]
    share = run.report()["envs"][ENV]["mixed_versions_frac"]
    assert all(outstanding <= capacity for outstanding, capacity in account) and max(mixed) > 0
    most = max(outstanding for outstanding, _ in account)
    print(
        f"at most {most:.0f} groups outstanding, never above the capacity; {share:.1%} of what was"
        " trained on is of mixed versions"
    )


def published(run: Live) -> list[Rollout]:
    return [
        record
        for record in run.records(topology.rollouts(ENV), "rollout")
        if isinstance(record, Rollout)
    ]
