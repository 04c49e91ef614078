"""The rule by which servers are chosen, on worked numbers, and what comes of it over thousands of
requests (in virtual time: nothing is slow).
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from streamrl.inference.clients import registry as room
from streamrl.inference.clients.registry import KnownServer, Registry, choose_server, live_servers
from streamrl.stream.records import Server


def server(name: str, **fields: Any) -> Server:
    return Server(
        **{"server_id": name, "url": "", "state": "ready", "heartbeat_s": 100.0, **fields}
    )


def chosen(
    load: dict[str, float], last: str = "", margin: float = 0, asked: dict[str, int] | None = None
) -> str | None:
    found = choose_server([server(name) for name in load], load, asked or {}, last, margin)
    return found and found.server_id


def test_only_live_servers_of_the_pool_are_asked():
    others = [
        server("starting", state="starting"),
        server("broken", state="error"),
        server("elsewhere", pool="evaluation"),
    ]
    heard = [KnownServer(s, 100.0) for s in (server("a"), server("b"), *others)] + [
        KnownServer(server("silent"), 100.0 - room.SILENT_S - 1)
    ]
    assert [s.server_id for s in live_servers(heard, "generation", 100.0)] == ["a", "b"]
    assert [s.server_id for s in live_servers(heard, "generation", 100.0, avoid={"b"})] == ["a"]
    assert [s.server_id for s in live_servers(heard, "evaluation", 100.0)] == ["elsewhere"]


def test_a_record_under_the_key_of_another_server_is_passed_over():
    registry = Registry("generation")
    registry.on_server("a", server("a"), 1.0)
    registry.on_server("a", server("b"), 2.0)
    registry.on_server("c", server("b"), 2.0)
    found = registry.choose(2.0)
    assert found is not None and found.server_id == "a"
    assert list(registry.servers) == ["a"]


@pytest.mark.parametrize("skew_s", [-3600.0, 0.0, 3600.0])
def test_the_clock_of_another_machine_decides_nothing(skew_s: float):
    """By the clock of its machine a server is an hour ahead or behind: it is asked as long as it is
    heard of, and no longer.
    """
    registry = Registry("generation")
    registry.on_server("a", server("a", heartbeat_s=500.0 + skew_s), 500.0)
    assert (
        registry.choose(500.0 + room.SILENT_S) is not None
        and registry.choose(501.0 + room.SILENT_S) is None
    )


def test_three_heartbeats_may_pass_however_long_they_are():
    registry = Registry("generation", heartbeat_s=30.0)
    registry.on_server("a", server("a"), 0.0)
    assert registry.choose(90.0) is not None and registry.choose(91.0) is None


def test_a_record_from_before_this_process_is_no_sign_of_life():
    registry = Registry("generation")
    registry.on_server("a", server("a"), 0.0, old=True)
    assert registry.choose(0.0) is None and registry.age("a", 0.0) == float("inf")
    registry.on_server("a", server("a"), 1.0)
    assert registry.choose(1.0) is not None


def test_servers_whose_probe_failed_are_asked_only_where_no_other_is_ready(
    caplog: pytest.LogCaptureFixture,
):
    """All of them failing, by a little, does not stop the run; it is said once, and when it is
    over.
    """
    registry = Registry("generation")
    registry.on_server("a", server("a", state="error", doubted=True, error="off by 0.11"), 100.0)
    registry.on_server("dead", server("dead", state="error"), 100.0)
    with caplog.at_level("INFO"):
        for _ in range(2):
            found = registry.choose(100.0)
            assert found is not None and found.server_id == "a"
        registry.on_server("b", server("b"), 100.0)
        found = registry.choose(100.0)
        assert found is not None and found.server_id == "b"
    assert [record.message for record in caplog.records] == [
        (
            "no server of pool generation has passed its probe; those that failed it are asked all"
            " the same: off by 0.11"
        ),
        "a server of pool generation has passed its probe again",
    ]


def test_the_least_loaded_is_chosen_and_of_equals_the_one_asked_longest_ago():
    assert chosen({"a": 3, "b": 2, "c": 4}) == "b"
    assert (
        chosen({"a": 2, "b": 2}, asked={"a": 7, "b": 5}) == "b"
        and chosen({"a": 2, "b": 2, "new": 2}, asked={"a": 7, "b": 5}) == "new"
    )
    assert chosen({}) is None


def test_loads_less_than_half_a_request_apart_are_equal():
    found = [
        choose_server([server("a"), server("b")], {"a": load, "b": 2}, {"b": 1}, grain=8 / 2)
        for load in (5.9, 6)
    ]
    assert [s and s.server_id for s in found] == ["a", "b"]


def test_a_conversation_stays_while_its_server_exceeds_the_least_by_no_more_than_the_margin():
    assert [chosen({"a": load, "b": 2}, last="a", margin=4) for load in (0, 2, 6, 7)] == [
        "a",
        "a",
        "a",
        "b",
    ]
    # no margin: among equals only
    assert (
        chosen({"a": 3, "b": 2}, last="a") == "b"
        and chosen({"a": 2, "b": 2}, last="b", asked={"b": 1}) == "b"
    )
    assert chosen({"a": 3, "b": 2}, last="gone", margin=9) == "b"


def loads(registry: Registry) -> dict[str, float]:
    return {name: registry.load(name) for name in registry.servers}


def test_load_is_what_is_in_flight_from_here_plus_what_others_have_by_the_reports():
    registry = Registry("generation")
    registry.acquire("a", 8)
    registry.acquire("b", 8)
    registry.on_server("a", server("a", in_flight=8), 100.0)  # its 8 are ours, and counted once
    registry.on_server("b", server("b", in_flight=12), 100.0)  # four are somebody else's
    assert loads(registry) == {"a": 8, "b": 12}
    registry.acquire("a", 2)
    registry.release("b", 8)
    assert loads(registry) == {"a": 10, "b": 4}
    registry.on_server(
        "b", server("b", in_flight=14), 100.0
    )  # a fifth of the news is believed at once
    assert loads(registry) == {"a": 10, "b": 4 + 0.2 * 10}


def test_a_report_from_before_our_requests_came_is_no_reason_to_send_more():
    registry = Registry("generation")
    registry.acquire("a", 8)
    registry.on_server("a", server("a", in_flight=0), 100.0)
    registry.release("a", 8)
    assert loads(registry) == {"a": 0}  # not -8


def test_a_suspect_is_left_alone_until_it_is_heard_of():
    registry = Registry("generation")
    for name in ("a", "b"):
        registry.on_server(name, server(name), 100.0)
    registry.mark_failed("a")
    assert [registry.choose(100.0).server_id for _ in range(2)] == ["b", "b"]  # type: ignore[union-attr]
    registry.mark_failed("b")
    assert registry.choose(100.0) is None
    registry.on_server("a", server("a"), 100.0)
    assert registry.choose(100.0).server_id == "a"  # type: ignore[union-attr]


# ---- many requests, in virtual time --------------------------------------------------------------


class World:
    """Servers that share their time among what is in flight on them and say every second how much
    that is; clients that go by it.
    """

    def __init__(self, names: str, clients: int, margin: float, seed: int = 0) -> None:
        self.now, self.events, self.order, self.random = (
            0.0,
            list[tuple[float, int, Callable[[], None]]](),
            count(),
            random.Random(seed),
        )
        self.registries = [Registry("generation") for _ in range(clients)]
        for registry in self.registries:
            registry.stick_margin = margin
        self.flying, self.asked, self.up = Counter[str](), Counter[str](), set[str]()
        for name in names:
            self.join(name, self.random.random())

    def after(self, seconds: float, then: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), then))

    def join(self, name: str, offset_s: float = 0.0) -> None:
        self.up.add(name)
        self.tell(name, server(name, heartbeat_s=self.now))
        self.after(offset_s, lambda: self.beat(name))

    def beat(self, name: str) -> None:
        if name in self.up:
            self.tell(name, server(name, in_flight=self.flying[name], heartbeat_s=self.now))
            self.after(1.0, lambda: self.beat(name))

    def leave(self, name: str) -> None:
        self.up.remove(name)
        self.tell(name, None)

    def tell(self, name: str, record: Server | None) -> None:
        for registry in self.registries:
            registry.on_server(name, record, self.now)

    def group(self, registry: Registry, size: int, turns: int) -> None:
        """`size` rollouts in one request, which go on by themselves; then another group,
        for ever.
        """
        left = [size]

        def done() -> None:
            left[0] -= 1
            if not left[0]:
                self.group(registry, size, turns)

        def go_on(name: str, turn: int) -> None:
            if turn == turns:
                done()
            else:
                self.ask(registry, 1, name, lambda here: go_on(here, turn + 1))

        self.ask(registry, size, "", lambda here: [go_on(here, 1) for _ in range(size)])

    def ask(
        self, registry: Registry, sequences: int, last: str, then: Callable[[str], object]
    ) -> None:
        found = registry.choose(self.now, sequences, last=last)
        assert found is not None
        name = found.server_id
        registry.acquire(name, sequences)
        self.asked[name] += 1
        self.flying[name] += sequences

        def end() -> None:
            registry.release(name, sequences)
            self.flying[name] -= sequences
            then(name)

        self.after(self.random.uniform(0.01, 0.05) * (1 + self.flying[name] / 8), end)

    def run(self, requests: int) -> dict[str, int]:
        """How many of so many requests each server gets."""
        before = Counter(self.asked)
        target = self.asked.total() + requests
        while self.asked.total() < target:
            self.now, _, then = heapq.heappop(self.events)
            then()
        return dict(self.asked - before)


BUSY = [(1, 20, 8, 1), (1, 20, 8, 4), (2, 10, 8, 1), (2, 10, 8, 4), (4, 10, 8, 1), (4, 10, 8, 4)]
IDLE = [(1, 1, 1, 1), (1, 1, 1, 4), (1, 1, 8, 1), (1, 1, 8, 4), (2, 1, 8, 1), (4, 1, 8, 1)]


@pytest.mark.parametrize(("clients", "groups", "size", "turns"), [*BUSY, *IDLE])
def test_with_equal_servers_requests_are_within_a_tenth_of_even(
    clients: int, groups: int, size: int, turns: int
):
    """Hardly anything to do or plenty of it, one client or several that know nothing of each other
    but what servers say once a second.
    """
    world = World("abc", clients, margin=8)
    for registry in world.registries:
        for _ in range(groups):
            world.group(registry, size, turns)
    got = world.run(3_000)
    assert set(got) == {"a", "b", "c"} and all(
        900 <= requests <= 1_100 for requests in got.values()
    ), got


def test_clients_do_not_run_after_the_same_server(monkeypatch: pytest.MonkeyPatch):
    """The difference between most and least in flight, in parts of the mean: what is left of it
    when a report is believed by a fifth only.
    """

    def spread(news: float) -> float:
        monkeypatch.setattr(room, "LOAD_EMA", news)
        world = World("abc", 4, margin=8)
        seen = list[float]()
        for registry in world.registries:
            for _ in range(10):
                world.group(registry, 8, 4)
        for _ in range(60):
            world.run(50)
            flying = [world.flying[name] for name in "abc"]
            seen.append(3 * (max(flying) - min(flying)) / sum(flying))
        return sum(seen) / len(seen)

    assert spread(0.2) < 0.3 < 1.0 < spread(1.0)


def test_one_that_joins_gets_its_part_and_one_that_leaves_none():
    world = World("ab", 2, margin=8)
    for registry in world.registries:
        for _ in range(10):
            world.group(registry, 8, 3)
    assert set(world.run(1_000)) == {"a", "b"}
    world.join("c")
    world.run(200)
    assert all(900 <= requests <= 1_100 for requests in world.run(3_000).values())
    world.leave("a")
    assert set(world.run(1_000)) == {"b", "c"}


def test_most_turns_stay_where_their_prefix_is():
    def stayed(margin: float) -> float:
        world = World("abc", 2, margin)
        same = list[bool]()
        ask = world.ask

        def watched(
            registry: Registry, sequences: int, last: str, then: Callable[[str], object]
        ) -> None:
            ask(
                registry,
                sequences,
                last,
                lambda here: (same.append(here == last) if last else None, then(here)),
            )

        world.ask = watched  # type: ignore[method-assign]
        for registry in world.registries:
            for _ in range(10):
                world.group(registry, 8, 4)
        world.run(3_000)
        return sum(same) / len(same)

    assert stayed(8) > 0.95 > 0.9 > stayed(0)
