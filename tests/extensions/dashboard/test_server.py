from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import nullcontext

import httpx
import pytest
from starlette.testclient import TestClient

from streamrl.extensions.dashboard import server
from streamrl.extensions.dashboard.reading import LiveState, follow
from streamrl.extensions.dashboard.state import new
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Output
from streamrl.system.errors import BrokerUnreachable, ConfigError, PortTaken
from tests.extensions.dashboard.made import RUN
from tests.support.build import rollout
from tests.support.data_path import announce, publish
from tests.support.life import run_until
from tests.support.waiting import patience

TOPICS = dict.fromkeys(("policy-versions", "fates", "metrics", "rollouts.copy", "batches"), 1)
EVIL = "<script>alert(1)</script>"


def made() -> MemoryLog:
    log = MemoryLog(TOPICS)
    announce(log, 0)
    publish(
        log,
        *(
            Output("rollouts.copy", EVIL, rollout("copy", EVIL, i, metadata={EVIL: EVIL}))
            for i in range(3)
        ),
    )
    return log


@pytest.fixture
def live() -> LiveState:
    live = LiveState(new(RUN))
    log = made()
    run_until(lambda stop: follow(live, log, stop), lambda: live.caught_up.is_set())
    live.log = log
    return live


@pytest.fixture
def client(live: LiveState) -> Iterator[TestClient]:
    with TestClient(
        server.app(live, ["127.0.0.1"], threading.Event()), base_url="http://127.0.0.1:8650"
    ) as client:
        yield client


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/page/app.js",
        "/page/style.css",
        "/api/overview",
        "/api/rollouts",
        "/api/rollouts/copy/0/0",
        "/nothing",
    ],
)
def test_every_answer_forbids_what_a_page_could_be_made_to_do(client: TestClient, path: str):
    answer = client.get(path)
    policy = answer.headers["content-security-policy"]
    assert (
        "default-src 'none'" in policy
        and "script-src 'self'" in policy
        and "frame-ancestors 'none'" in policy
    )
    assert "require-trusted-types-for 'script'" in policy and "unsafe" not in policy
    assert (
        answer.headers["x-content-type-options"] == "nosniff"
        and answer.headers["cache-control"] == "no-store"
    )
    assert answer.status_code == (404 if path == "/nothing" else 200)


def test_another_name_for_this_address_is_not_answered(client: TestClient):
    assert client.get("/api/overview", headers={"host": "evil.example:8650"}).status_code == 400


def test_only_so_many_pages_are_told_of_changes(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server, "STREAMS", 0)
    answer = client.get("/api/events")
    assert answer.status_code == 503 and "close one" in answer.json()["error"]


async def test_a_page_that_is_closed_makes_room(live: LiveState):
    answers = server.Api(live, threading.Event(), lambda: 1.0)
    changes = answers._changes()
    await anext(changes)
    assert answers._streams == 1
    await changes.aclose()
    assert answers._streams == 0


def test_nothing_can_be_written(client: TestClient):
    assert client.post("/api/rollouts").status_code == 405


def test_the_page_loads_nothing_from_elsewhere_and_makes_no_html_of_text():
    files = [path for path in server.PAGE.iterdir() if path.suffix in (".html", ".js", ".css")]
    assert len(files) >= 6
    for path in files:
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text and "https:" not in text and "@import" not in text, path.name
        assert not any(
            word in text
            for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(")
        ), path.name


def test_rollouts_by_page_and_filter(client: TestClient):
    found = client.get(
        "/api/rollouts", params={"group": EVIL, "fate": "in flight", "reward_max": "0.5"}
    ).json()
    assert found["total"] == 3 and {row["uid"] for row in found["rows"]} == {
        f"{EVIL}-{i}" for i in range(3)
    }
    assert client.get("/api/rollouts", params={"version_min": "1"}).json()["total"] == 0
    assert client.get("/api/rollouts", params={"page": "7"}).json()["rows"] == []


@pytest.mark.parametrize(
    "query, why",
    [
        ("fate=lost", "fate 'lost' is none of batched, "),
        ("sort=up", "sort 'up' is none of newest, "),
        ("batch=x", "batch is 'x', not a number"),
        ("reward_min=nan", "reward_min is 'nan', not a number"),
        ("version_max=99999999999", "version_max is '99999999999', not a number"),
        ("step=1.5", "step is '1.5', not a number"),
    ],
)
def test_a_bad_question_is_refused_in_words(client: TestClient, query: str, why: str):
    answer = client.get(f"/api/rollouts?{query}")
    assert answer.status_code == 400 and answer.json()["error"].startswith(why)


def test_one_rollout_as_it_is_and_one_that_is_not_there(client: TestClient):
    found = client.get("/api/rollouts/copy/0/1").json()
    assert (
        found["uid"] == f"{EVIL}-1"
        and found["metadata"] == {EVIL: EVIL}
        and found["turns"][1]["ids"] == [3, 4, 5]
    )
    missing = client.get("/api/rollouts/copy/0/99")
    assert (
        missing.status_code == 404
        and missing.json()["error"] == "no rollout is known at copy[0]@99"
    )


def test_a_broker_that_is_away_is_said(client: TestClient, live: LiveState):
    live.log = None
    assert "broker cannot be reached" in client.get("/api/rollouts/copy/0/0").json()["error"]

    class Away(MemoryLog):
        def reader(self, *_: object, **__: object) -> object:  # type: ignore[override]
            raise BrokerUnreachable("no Kafka broker answers")

    live.log = Away(TOPICS)  # type: ignore[assignment]
    live.log.producer().send(made().take(("rollouts.copy", 0), 0, 1)[0][0])
    answer = client.get("/api/rollouts/copy/0/0")
    assert answer.status_code == 503 and "no Kafka broker answers" in answer.json()["error"]


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.9", "::", "example.org"])
def test_an_address_that_others_reach_is_refused(host: str):
    with pytest.raises(
        ConfigError, match=r"it has no login; forward the port instead .* or give --public"
    ):
        server.check_host(host, public=False)
    server.check_host(host, public=True)
    server.check_host("127.0.0.1", public=False)
    server.check_host("::1", public=False)


def test_a_port_in_use_is_said():
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(PortTaken, match="give another --port"),
    ):
        stop = threading.Event()
        server.serve(RUN, lambda: nullcontext(None), stop, port=taken.getsockname()[1])


def test_it_serves_live_changes_and_ends_when_told():
    log = made()
    said = list[str]()
    seen = list[str]()

    def watch() -> None:
        while not said:
            assert not stopped.wait(0.01)
        with (
            httpx.Client(timeout=patience(60)) as client,
            client.stream("GET", f"{said[0]}api/events") as stream,
        ):
            for line in stream.iter_lines():
                if line.startswith("data: ") and '"newest":' in line:
                    seen.append(line)
                    if len(seen) == 1:
                        announce(log, 1)
                    if '"newest":1,' in line:
                        done.set()  # the stream is still open when the server is told to end

    done = threading.Event()
    stopped = threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run_until(
            lambda stop: server.serve(RUN, lambda: nullcontext(log), stop, port=0, say=said.append),
            done.is_set,
        )
    finally:
        stopped.set()
        watcher.join(patience(60))
    assert not watcher.is_alive() and '"newest":0,' in seen[0]
