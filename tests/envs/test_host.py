"""What the replicas of a process are told, and what they publish together."""

from __future__ import annotations

from typing import Any

import pytest

from streamrl.envs.host import EnvHost
from streamrl.envs.replica import RolloutGroup
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.protocol import Message, Output
from streamrl.stream.records import Demand, Server
from tests.envs.test_replica import Launched, replica, wanted
from tests.support.build import rollout


class Servers:
    def __init__(self) -> None:
        self.heard: list[tuple[str, bool]] = []

    def on_server(self, server_id: str, server: object, old: bool = False) -> None:
        self.heard.append((server_id if server else f"{server_id} is gone", old))


def message(topic: str, key: str, record: Any, offset: int = 0) -> Message:
    return to_message(Output(topic, key, record))._replace(partition=0, offset=offset)


def named(env: str) -> Launched:
    made = replica()
    made.name = env
    made.limit.producer = f"{env}-0"
    made.journal = "journal.host-all"
    return made


def test_demand_goes_to_its_env_and_servers_to_the_clients_of_all(
    caplog: pytest.LogCaptureFixture,
):
    servers = Servers()
    copy, add = named("copy"), named("add")
    host = EnvHost([copy, add], [servers], {("servers", 0): 5})  # type: ignore[list-item]
    ready = Server(server_id="s", url="", version=4, state="ready", heartbeat_s=1.0)
    host.on_messages(
        [
            message("demand", "add", wanted(9, "add")),
            message("demand", "copy", wanted(7)),
            message("demand", "sort", wanted(5, "sort")),
            message("servers", "s", ready, offset=4),
            message("servers", "s", ready, offset=5),
            Message("servers", b"s", None, partition=0, offset=6),
            Message("servers", b"s", b"\xc1", (("schema", b"server/1"),), partition=0, offset=7),
        ]
    )
    assert (copy.limit.demand, add.limit.demand) == (wanted(7), wanted(9, "add"))
    assert (copy.version, add.version) == (4, 4)
    assert servers.heard == [("s", True), ("s", False), ("s is gone", False)]
    assert "servers[0]@7 is skipped" in caplog.text


def test_what_several_envs_have_finished_is_one_transaction_with_the_progress_of_each():
    copy, add, idle = named("copy"), named("add"), named("idle")
    host = EnvHost([copy, add, idle], [])
    finished: list[tuple[Launched, RolloutGroup]] = []
    for each in (copy, add):
        each.cursor.next()
        finished.append((each, RolloutGroup(0, [rollout(each.name, "g", 0)])))
    messages = host.outputs([(each, [group]) for each, group in finished])  # type: ignore[misc]
    assert [(m.topic, m.key) for m in messages] == [
        ("rollouts.copy", b"g"),
        ("journal.host-all", b"copy-0"),
        ("rollouts.add", b"g"),
        ("journal.host-all", b"add-0"),
    ]
    assert copy.cursor.progress.published_groups == add.cursor.progress.published_groups == 1


def test_replicas_of_one_env_are_all_told_of_its_demand():
    pair = [named("copy"), named("copy")]
    host = EnvHost(pair, [])
    demand: Demand = wanted(7)
    host.on_messages([message("demand", "copy", demand)])
    assert [each.limit.demand for each in pair] == [demand, demand]
