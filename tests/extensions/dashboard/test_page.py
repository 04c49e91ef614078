"""The page in a real browser: a run on a real broker, opened while it goes on, and after."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import yaml
from playwright.sync_api import Page
from tokenizers import Tokenizer, models

from streamrl.config import run_file, topology
from streamrl.config.run_file import RunFile
from streamrl.extensions.dashboard import server
from streamrl.stream.log.kafka import topic_changes
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.meter import Meter
from streamrl.stream.log.protocol import Log, Output
from streamrl.stream.records import InferenceMetadata, Metric, Rollout, Turn, VersionSpan
from tests.extensions.dashboard.browser import PATIENCE_MS, PHONE, chromium, page_of
from tests.extensions.dashboard.made import AGENTS, SESSION_METRICS, session_messages
from tests.support.beats import repeating
from tests.support.build import floats, rollout, tokens
from tests.support.data_path import (
    RUN,
    announce,
    publish,
    running,
    wait_for_batches,
    wait_until_heard,
)
from tests.support.waiting import patience

ROOT = Path(__file__).parents[3]
WORDS = ("<pad>", "1", "2", "one", "two", "three")
LOOK_MS = 50
# a point a step; which env's rewards a batch has depends on who came first
LOSS = "#panels svg[aria-label=Loss] path.line"
POINTS = f"(document.querySelector('{LOSS}')?.getAttribute('d') ?? '').split(/[ML]/).length - 1"
SESSIONS_TEXT = "document.querySelector('#sessions').innerText.replace(/\\s+/g, ' ')"
EVIL = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"


@pytest.fixture
def run(tmp_path: Path, run_name: str, broker: str) -> RunFile:
    """A run with its topics and a tokenizer."""
    settings = {**RUN.model_dump(mode="json"), "run": run_name, "runs_dir": str(tmp_path)}
    run = run_file.parse(settings)
    (run.directory / "model").mkdir(parents=True)
    (run.directory / "run.yaml").write_text(yaml.safe_dump(settings))
    Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>")).save(
        str(run.directory / "model" / "tokenizer.json")
    )
    topic_changes.apply(run, {"bootstrap.servers": broker})
    return run


class Source:
    """Env and learner in one: a version, what it sampled, and how the learner did."""

    def __init__(self, log: Log) -> None:
        self.log, self.meter, self.steps = log, Meter(log, "learner-lead"), 0

    def step(self) -> None:
        """One more: the version is announced, its groups come, and so does the batch."""
        k = self.steps
        self.steps = self.steps + 1
        announce(self.log, k)
        # or its rollouts might be counted to the version before
        wait_until_heard(self.log, PATIENCE_MS / 1000)
        made = [
            sampled(env, k, g, i)
            for env in RUN.envs
            for g in range(5 * k, 5 * k + 5)
            for i in range(2)
        ]
        publish(
            self.log,
            *(
                Output(topology.rollouts(record.environment), record.group_id, record)
                for record in made
            ),
        )
        wait_for_batches(self.log, k + 1, PATIENCE_MS / 1000)
        self.meter.publish({"learner/loss": 1 / (k + 1), "learner/step_s": 0.1}, step=k)

    def close(self) -> None:
        self.meter.close()


def sampled(env: str, version: int, group: int, sample: int) -> Rollout:
    """Its answer is of two versions, one more certain than the other."""
    oldest = max(version - 1, 0)
    spans = [
        VersionSpan(version=oldest, start=0, end=1),
        VersionSpan(version=version, start=1, end=3),
    ]
    how = InferenceMetadata(
        server="inference-0", temperature=1.0, version_spans=spans if version else []
    )
    answer = Turn(
        message="",
        role="assistant",
        tokens=tokens(3, 4, 5),
        logprobs=floats(-0.01, -4.0, -0.5),
        inference_metadata=how,
    )
    turns = [Turn(message="12=", role="user", tokens=tokens(1, 2)), answer]
    return rollout(
        env, f"{env}-{group}", sample, oldest, version, reward=(group + sample) % 2, turns=turns
    )


@contextmanager
def dashboard(run: RunFile, broker: str) -> Iterator[str]:
    """`streamrl dashboard` as a user starts it."""
    command = [
        sys.executable,
        "-m",
        "streamrl.cli",
        "dashboard",
        str(run.directory / "run.yaml"),
        "--port",
        "0",
    ]
    environment = {**os.environ, "STREAMRL_KAFKA": broker, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        assert process.wait(patience(60)) == 0


@contextmanager
def in_process(run: RunFile, log: Log) -> Iterator[str]:
    """The page of a log in memory."""
    stop = threading.Event()
    address = Queue[str]()
    thread = threading.Thread(
        target=server.serve,
        args=(run, lambda: nullcontext(log), stop),
        kwargs={"port": 0, "say": address.put},
    )
    thread.start()
    try:
        yield address.get(timeout=patience(60))
    finally:
        stop.set()
        thread.join(patience(60))


def points(page: Page) -> int:
    return page.evaluate(POINTS)


def until(page: Page, expression: str, argument: Any = None) -> None:
    """Wait until it is true. Not with `wait_for_function`: that is eval in the page, which the page
    forbids.
    """
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while not page.evaluate(expression, argument):
        assert time.monotonic() < deadline, (
            f"{expression} was not true within {PATIENCE_MS / 1000:.0f} s"
        )
        page.wait_for_timeout(LOOK_MS)


def colours(page: Page) -> Sequence[str]:
    return page.eval_on_selector_all(
        ".turn.assistant .tok",
        "found => found.map(token => getComputedStyle(token).backgroundColor)",
    )


def choose(page: Page, name: str, value: str) -> None:
    """Filter, and wait for the answer: the count of what is found changes, or the rows do."""
    with page.expect_response(
        lambda answer: "/api/rollouts?" in answer.url and f"{name}=" in answer.url
    ):
        field = page.locator(f"#filters [name={name}]")
        (
            field.select_option(value)
            if field.evaluate("element => element.tagName") == "SELECT"
            else field.fill(value)
        )


def test_a_run_is_watched_live_browsed_and_replayed(run: RunFile, broker: str):
    log = KafkaLog({"bootstrap.servers": broker}, run.run)
    source = Source(log)
    with (
        dashboard(run, broker) as address,
        chromium() as browser,
        page_of(browser, address) as (page, complaints),
    ):
        with running(log, run):
            source.step()
            source.step()
            watch_it_grow(page, source)
            publish(
                log,
                Output(
                    "rollouts.copy",
                    "evil",
                    rollout(
                        "copy",
                        "evil",
                        0,
                        3,
                        failure=EVIL,
                        metadata={EVIL: EVIL},
                        rollout_uid=EVIL,
                        problem_id=EVIL,
                    ),
                ),
            )
            until(page, "document.querySelector('#fates .fate-failed') !== null")
        source.close()
        text_stays_text(page)
        browse(page)
        slide(page)
        assert complaints == []
        light = page.evaluate("getComputedStyle(document.body).backgroundColor")
        with page_of(browser, address, PHONE, "dark") as (phone, more):
            on_a_phone(phone, light)
            assert more == []
    with (
        dashboard(run, broker) as address,
        chromium() as browser,
        page_of(browser, address) as (page, complaints),
    ):
        # the run is over, and all there
        until(page, "document.getElementById('found').textContent.startsWith('81')")
        until(page, f"{POINTS} === 4")
        assert complaints == []


def watch_it_grow(page: Page, source: Source) -> None:
    until(page, "document.getElementById('step').textContent === 'step 1 of 1'")
    until(page, "document.getElementById('status').textContent === 'running'")
    until(page, f"{POINTS} === 2")
    source.step()
    source.step()
    until(page, "document.getElementById('step').textContent === 'step 3 of 3'")
    until(page, f"{POINTS} === 4")
    assert page.locator(".node").all_inner_texts()[2].startswith("buffer")
    until(page, "document.querySelector('.n-buffer .dot').classList.contains('running')")
    assert page.locator(".n-learner .badge").inner_text() == "v3"
    assert (
        page.locator("#by-env rect").count() >= 2
        and page.locator("#fates .fate-batched").count() >= 1
    )


def text_stays_text(page: Page) -> None:
    choose(page, "fate", "failed")
    row = page.locator("#rows tr[data-place]")
    until(page, "document.querySelectorAll('#rows tr[data-place]').length === 1")
    assert row.locator(".c-uid").inner_text() == EVIL
    row.click()
    page.wait_for_selector("dialog .error")
    assert page.locator("dialog .error").inner_text() == f"failed: {EVIL}"
    assert (
        page.locator("dialog dd", has_text=EVIL).count() >= 1
        and page.locator("dialog script, dialog img, #rows img").count() == 0
    )
    assert page.evaluate("window.hacked") is None
    page.keyboard.press("Escape")


def browse(page: Page) -> None:
    page.locator("#filters [name=fate]").select_option("batched")
    choose(page, "version_min", "1")
    choose(page, "reward_min", "0.5")
    until(
        page,
        "[...document.querySelectorAll('#rows .c-fate')].every(cell => cell.textContent ==="
        " 'batched') && document.querySelector('#rows .c-fate')",
    )
    page.locator("#rows tr").first.click()
    page.wait_for_selector(".tok")
    assert page.locator(".turn.assistant .tok").all_inner_texts() == ["one", "two", "three"]
    by_logprob = colours(page)
    assert len(set(by_logprob)) == 3
    page.locator(".set button", has_text="advantage").click()
    by_advantage = colours(page)
    assert len(set(by_advantage)) == 1 and by_advantage[0] not in by_logprob
    page.locator(".set button", has_text="version").click()
    assert len(set(colours(page))) == 2  # two versions made it
    page.locator(".turn.assistant .tok").nth(1).hover()
    probe = page.locator(".probe").inner_text()
    assert (
        '"two"' in probe
        and "logprob -4.0000" in probe
        and "advantage" in probe
        and "by version" in probe
    )
    batch = page.locator("dialog .story .link").first
    number = batch.inner_text().removeprefix("batch ")
    with page.expect_response(lambda answer: f"batch={number}" in answer.url):
        batch.click()
    until(
        page,
        "number => [...document.querySelectorAll('#rows .c-batch')].every(cell => cell.textContent"
        " === number)",
        number,
    )
    assert page.locator("#rows tr[data-place]").count() > 1
    page.locator("#filters button[type=reset]").click()
    until(page, "document.getElementById('found').textContent.startsWith('81')")


def slide(page: Page) -> None:
    whole = state_of(page)
    page.locator("#slider").fill("0")
    until(
        page,
        "document.getElementById('step').textContent === 'step 0 of 3' &&"
        " document.querySelectorAll('#by-env g').length === 1",
    )
    until(page, "!document.getElementById('found').textContent.startsWith('81')")
    first = state_of(page)
    assert all(first[name] != whole[name] for name in whole), {
        name for name in whole if first[name] == whole[name]
    }
    page.locator("#live").click()
    until(page, "document.getElementById('found').textContent.startsWith('81')")
    assert points(page) == 4


def state_of(page: Page) -> dict[str, Any]:
    """What every piece of the page shows."""
    texts = {
        name: page.locator(f"#{name}").inner_text()
        for name in ("tiles", "fates", "rows", "found", "step")
    }
    loop = page.locator(".node .badge").all_inner_texts()
    return {
        **texts,
        "loop": loop,
        "curve": points(page),
        "bars": page.locator("#by-env g").count(),
        "ages": page.locator("#by-age g").count(),
    }


def on_a_phone(page: Page, light: str) -> None:
    page.wait_for_selector("#rows tr[data-place]")
    until(page, "document.querySelectorAll('#panels path.line').length > 0")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    page.locator("#rows tr[data-place]").nth(1).click()
    page.wait_for_selector("dialog .story")
    assert (
        page.evaluate("document.querySelector('dialog').getBoundingClientRect().width") <= PHONE[0]
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]


def test_sessions_of_agents_have_a_panel():
    topics = ("policy-versions", "fates", "metrics", "batches", "rollouts.agent", "rollouts.copy")
    log = MemoryLog(dict.fromkeys(topics, 1))
    announce(log, 0)
    sessions = [m for m in session_messages() if m.topic == "rollouts.agent"]
    log.append(sessions, marker=False)
    with (
        repeating(partial(say_of_sessions, log), 1.0),
        in_process(AGENTS, log) as address,
        chromium() as browser,
        page_of(browser, address) as (page, complaints),
    ):
        for said in (
            "gateway ×2 42 calls/s open sessions 12 tokens/s 950 added to a call 0.020 s",
            "answered from the log 4 refused 1",
            "wait for rewards 4",
            "agent 3 ended",
            "finished 2 cut off: time 1 forks of a conversation by cause: template 2",
        ):
            until(page, f"({SESSIONS_TEXT}).includes({said!r})")
        assert not complaints


def say_of_sessions(log: Log) -> None:
    """What gateway and assembler report once in a second."""
    for source, values in SESSION_METRICS.items():
        metric = Metric(source=source, time_s=time.time(), values=values)
        publish(log, Output(topology.METRICS, source, metric))
