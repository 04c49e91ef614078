"""The dashboard with a long run: time until it has read it, memory, how long answers take, how long
until the page stands in a browser.

    python -m bench.dashboard [--rollouts 100000] [--prompt 16] [--response 32] ...

The run is made as for `bench.replay`, with the real buffer and batcher on a real broker. The exit
code is 1 beyond `LIMIT_MB` or `LIMIT_MS`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import httpx

from bench.measure import RESULTS, peak_rss_mb, quantile, write
from bench.replay import ROOT, STREAMRL, long_run
from streamrl.config.run_file import RunFile
from tests.extensions.dashboard.browser import chromium, page_of

LIMIT_MB = 512
LIMIT_MS = 250  # of a page of rollouts, the median
ASKED = 40
PAGES = {
    "a page, newest first": "/api/rollouts",
    "page 500": "/api/rollouts?page=500",
    "by env, fate, version and reward": (
        "/api/rollouts?env=env-0&fate=batched&version_min=10&version_max=60&reward_min=0.5"
    ),
    "by reward, at step 40": "/api/rollouts?sort=reward-high&step=40",
    "by a piece of the uid": "/api/rollouts?text=-77-",
    "the overview at step 40": "/api/overview?step=40",
}


def main() -> None:
    with long_run(__doc__) as (run, address, work):
        measured = {"work": work, **measure(run, address)}
    print(json.dumps(measured, indent=1))
    write(RESULTS / "dashboard.json", measured)
    slowest = max(answer["median"] for answer in measured["answers_ms"].values())
    sys.exit(1 if measured["peak_mb"] > LIMIT_MB or slowest > LIMIT_MS else 0)


def measure(run: RunFile, address: str) -> dict[str, Any]:
    """Start the dashboard, wait until it has read everything, ask it."""
    started = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "STREAMRL_KAFKA": address}
    command = [*STREAMRL, "dashboard", str(run.directory / "run.yaml"), "--port", "0"]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        answers_s = time.monotonic() - started
        with httpx.Client(base_url=url, timeout=60) as client:
            while client.get("/api/overview").json()["read"] < 1:
                time.sleep(0.05)
            read_s = time.monotonic() - started
            found = client.get("/api/rollouts").json()
            answers = {
                what: timed(lambda path=path: client.get(path)) for what, path in PAGES.items()
            }
            rows = [
                row
                for page in range(ASKED)
                for row in client.get(f"/api/rollouts?page={page * 20}&fate=batched").json()[
                    "rows"
                ][:1]
            ]
            places = iter(
                [f"/api/rollouts/{row['env']}/{row['partition']}/{row['offset']}" for row in rows]
            )
            answers["one rollout: its tokens and its batch, from the topics"] = timed(
                lambda: client.get(next(places)), len(rows)
            )
        with chromium() as browser:
            opened = time.monotonic()
            with page_of(browser, url) as (page, complaints):
                page.wait_for_selector("#rows tr[data-place]")
                stands_s = time.monotonic() - opened
                assert complaints == []
        peak_mb = round(peak_rss_mb(process.pid))
    finally:
        process.terminate()
        process.wait(60)
    return {
        "rollouts_found": found["total"],
        "first_answer_s": round(answers_s, 2),
        "all_read_s": round(read_s, 2),
        "page_in_browser_s": round(stands_s, 2),
        "peak_mb": peak_mb,
        "answers_ms": answers,
    }


def timed(ask: Callable[[], httpx.Response], times: int = ASKED) -> dict[str, float]:
    """Milliseconds of an answer: median and slowest."""
    took: list[float] = []
    for _ in range(times):
        begun = time.perf_counter()
        ask().raise_for_status()
        took.append(1000 * (time.perf_counter() - begun))
    return {"median": round(quantile(took, 0.5), 1), "max": round(max(took), 1)}


if __name__ == "__main__":
    main()
