"""From the learner's last update to the new version serving on every server, by stage, against
copying and hashing the bytes and vLLM's own reload.

    python -m bench.weights [--size "1 MB" --size "100 MB" --size "1 GB"] [--rounds 7] ...

bench/README.md says how and why; the figures go to bench/results/weights.json, where other sizes
stay as they were.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from bench.measure import RESULTS, quantile, spread, write
from bench.memory import fill_page_cache
from streamrl.config import topology
from streamrl.config.run_file import RunFile, parse
from streamrl.inference.servers.version_follower import VersionFollower
from streamrl.inference.servers.vllm_launch import MODEL
from streamrl.learner.publisher import VersionPublisher
from streamrl.learner.trainer import open_trainer
from streamrl.stream.local_kafka import broker
from streamrl.stream.log.codec import to_event
from streamrl.stream.log.kafka import topic_changes
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.protocol import Log, beginning_offset
from streamrl.stream.records import Metric, PolicyVersion, Server
from streamrl.weights.pull import pull

SIZES = {"1 MB": (2, 128), "100 MB": (10, 512), "1 GB": (25, 1024)}  # layers, hidden size
# ends when the copies are verified: two vLLMs with it do not fit into this machine's memory
UNSERVED = "1 GB"
CONTEXT = 2048  # tokens: a request is in flight for as long as a round takes
STREAMS = 4  # requests in flight on each server
PATIENCE_S = 240.0
# before the chain and before the plain work: memory that the one has just freed is written to up to
# ten times as fast
REST_S = 3.0
STAGES = ("export", "hash", "probe", "announce", "pull", "pause", "reload", "resume")


def run_file(directory: Path, layers: int, hidden: int) -> RunFile:
    return parse(
        {
            "run": "weights",
            "runs_dir": str(directory),
            "envs": {"copy-digits": {}},
            "batcher": {"max_seq_len": CONTEXT, "total_token_budget": CONTEXT},
            "model": {"max_seq_len": CONTEXT, "tiny": {"layers": layers, "hidden": hidden}},
            "learner": {"checkpoint_every": 1_000_000},  # none
            "inference": {"max_model_len": CONTEXT, "heartbeat_s": 0.5, "replicas": 2},
        }
    )


class Topic:
    """What comes in on a topic, as records."""

    def __init__(self, log: Log, topic: str, schema: str) -> None:
        self._reader = log.reader(
            {(topic, p): beginning_offset(log, topic, p) for p in range(log.topics()[topic])}
        )
        self._schema, self.found = schema, list[Any]()

    def until(
        self, wanted: Callable[[list[Any]], Any], what: str, alive: Callable[[], None]
    ) -> Any:
        """What `wanted` makes of all records so far, once that is anything."""
        deadline = time.monotonic() + PATIENCE_S
        while not (made := wanted(self.found)):
            alive()
            if time.monotonic() > deadline:
                raise SystemExit(f"bench: {what} did not come within {PATIENCE_S:.0f} s")
            self.found += [
                event.record
                for m in self._reader.poll(500, 0.05)
                if (event := to_event(m, (self._schema,))).record is not None
            ]
        return made


class Agents:
    """Real servers, each the process `streamrl inference` and its vLLM."""

    def __init__(self, run: RunFile, log: Log, directory: Path, address: str) -> None:
        self._run = directory / "run.json"
        self._directory = directory
        self._address = address
        self._run.write_text(run.to_json())
        self.servers, self.metrics = (
            Topic(log, "servers", "server"),
            Topic(log, "metrics", "metric"),
        )
        self.processes: list[subprocess.Popen[bytes]] = []

    def have(self, count: int, version: int) -> None:
        """So many, serving `version`: together they start sooner than one after the other, so the
        most are to be wanted first.
        """
        while len(self.processes) > count:
            self.end(self.processes.pop())
        if len(self.processes) == count:
            return
        environment = {
            **os.environ,
            "STREAMRL_KAFKA": self._address,
            "PYTHONPATH": str(Path(__file__).parents[1]),
        }
        for index in range(len(self.processes), count):
            command = [
                sys.executable,
                "-m",
                "streamrl.cli",
                "inference",
                str(self._run),
                "--index",
                str(index),
            ]
            with (self._directory / f"inference-{index}.log").open("wb") as log:
                self.processes.append(
                    subprocess.Popen(command, env=environment, stdout=log, stderr=log)
                )
        self.serve(version)

    def urls(self) -> list[str]:
        """Of those that there are."""

        def known(records: list[Any]) -> list[str] | None:
            urls = {
                record.server_id: record.url for record in records if isinstance(record, Server)
            }
            found = [
                urls.get(topology.inference_part(topology.GENERATION, index), "")
                for index in range(len(self.processes))
            ]
            return found if all(found) else None

        return self.servers.until(known, "the address of every server", self.check)

    def serve(self, version: int) -> list[dict[str, float]]:
        """Wait until every server serves `version`; what each measured."""

        def found(records: list[Any]) -> list[dict[str, float]] | None:
            values = [
                r.values
                for r in records
                if isinstance(r, Metric) and r.step == version and "inference/pull_s" in r.values
            ]
            return values if len(values) == len(self.processes) else None

        return self.metrics.until(
            found, f"version {version} on {len(self.processes)} servers", self.check
        )

    def check(self) -> None:
        for index, process in enumerate(self.processes):
            if process.poll() is not None:
                said = (self._directory / f"inference-{index}.log").read_text()[-1000:]
                raise SystemExit(
                    f"bench: inference-{index} ended with {process.returncode}: {said}"
                )

    def end(self, process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        process.wait(60)

    def stop(self) -> None:
        for process in self.processes:
            self.end(process)


class Copiers:
    """`count` agents up to vLLM: each hears of a version, pulls it and verifies it."""

    def __init__(self, run: RunFile, log: Log, directory: Path, count: int) -> None:
        self._store, self._announced = (
            run.store,
            [VersionFollower(log, run.learner.name) for _ in range(count)],
        )
        self._copies = [directory / f"copy-{index}" for index in range(count)]

    def begin(self, version: int) -> Callable[[], list[dict[str, float]]]:
        """Begin to wait for `version`. Returns what waits until each has it."""
        pool = ThreadPoolExecutor(len(self._copies))
        found = [
            pool.submit(self._copy, version, *pair)
            for pair in zip(self._announced, self._copies, strict=True)
        ]

        def finish() -> list[dict[str, float]]:
            with pool:
                return [one.result() for one in found]

        return finish

    def _copy(self, version: int, announced: VersionFollower, copy: Path) -> dict[str, float]:
        while (newest := announced.newest(0.05)) is None or newest.version != version:
            pass
        heard_s = time.time() - newest.time_s
        started = time.perf_counter()
        pull(newest, self._store, copy, link=True)
        return {"inference/heard_s": heard_s, "inference/pull_s": time.perf_counter() - started}

    def close(self) -> None:
        for announced in self._announced:
            announced.close()


def plain(directory: Path, copies: int, scratch: Path) -> float:
    """Seconds to copy the files and to hash them, one after the other, as one would by hand;
    `copies` times at once.
    """

    def one(index: int) -> None:
        to = scratch / f"plain-{index}"
        shutil.copytree(directory, to)
        for path in sorted(to.iterdir()):
            with path.open("rb") as file:
                hashlib.file_digest(file, "sha256")
        shutil.rmtree(to)

    started = time.perf_counter()
    with ThreadPoolExecutor(copies) as pool:
        list(pool.map(one, range(copies)))
    return time.perf_counter() - started


@contextmanager
def requests(urls: Sequence[str]) -> Iterator[list[list[float]]]:
    """`STREAMS` requests in flight on each server for as long as the block lasts; of each request,
    the times (s) of its tokens.
    """
    over = threading.Event()
    times = list[list[float]]()

    def ask(url: str) -> None:
        body = {
            "model": MODEL,
            "prompt": [1, 4, 5, 6],
            "max_tokens": CONTEXT - 8,
            "ignore_eos": True,
            "stream": True,
            "temperature": 1.0,
        }
        with httpx.Client(base_url=url, timeout=60.0) as client:
            while not over.is_set():
                times.append(seen := list[float]())
                with client.stream("POST", "/v1/completions", json=body) as answer:
                    for line in answer.iter_lines():
                        if line.startswith("data:"):
                            seen.append(time.monotonic())
                        if over.is_set():
                            return

    threads = [
        threading.Thread(target=ask, args=(url,), daemon=True)
        for url in urls
        for _ in range(STREAMS)
    ]
    for thread in threads:
        thread.start()
    try:
        yield times
    finally:
        over.set()
        for thread in threads:
            thread.join(60)


def gaps(
    times: Sequence[Sequence[float]], start: float = float("-inf"), end: float = float("inf")
) -> list[float]:
    """Seconds from each token of a request to its next, for all requests; of those that lie between
    the two times at least in part.
    """
    return [
        after - before
        for request in times
        for before, after in pairwise(request)
        if after > start and before < end
    ]


def stages(
    learner: dict[str, float],
    record: PolicyVersion,
    updated_s: float,
    servers: Sequence[dict[str, float]],
) -> dict[str, float]:
    """Seconds of each stage, and in all, on the server that was last. `updated_s`: when the update
    was done, by the clock of `record.time_s`.

    The learner computes the probe between the end of the hashing and the time that it announces.
    """
    spent = [
        {
            "announce": values["inference/heard_s"],
            **{
                name: values[f"inference/{name}_s"]
                for name in ("pull", "pause", "reload", "resume")
                if f"inference/{name}_s" in values
            },
        }
        for values in servers
    ]
    slowest = max(spent, key=lambda stages: sum(stages.values()))
    made = {"export": learner["export_s"], "hash": learner["hash_s"]}
    made["probe"] = record.time_s - updated_s - made["export"] - made["hash"]
    return {**made, **slowest, "all": sum(made.values()) + sum(slowest.values())}


def measure(
    size: str, directory: Path, rounds: int, servers: Sequence[int]
) -> list[dict[str, Any]]:
    """One size, with each number of servers: a quiet round is the chain and then the plain work;
    then rounds with requests in flight.
    """
    run = run_file(directory, *SIZES[size])
    results = list[dict[str, Any]]()
    with ExitStack() as stack:
        kafka = broker.start(directory / "kafka")
        stack.callback(kafka.stop)
        address = {"bootstrap.servers": kafka.address}
        topic_changes.apply(run, address)
        log = KafkaLog(address, run.run)
        policy = stack.enter_context(open_trainer(run))
        publisher = stack.enter_context(
            VersionPublisher(
                run.learner.name, policy, {}, log.writer("learner-lead", "policy-versions")
            )
        )
        announced = Topic(log, "policy-versions", "policy-version")

        def update() -> tuple[dict[str, float], PolicyVersion, float]:
            """The next version, as if a step had just made it; what it took, its announcement, and
            when it began.
            """
            policy.position = policy.position._replace(version=policy.version + 1, sha256="")
            updated_s = time.time()
            made = publisher.publish(policy.version - 1)
            publisher.wait()
            record = announced.until(
                lambda records: [r for r in records if r.version == policy.version],
                "an announcement",
                lambda: None,
            )[0]
            return made.spent, record, updated_s

        update()
        agents = None if size == UNSERVED else Agents(run, log, directory, kafka.address)
        if agents:
            stack.callback(agents.stop)
        for count in sorted(servers, reverse=True):
            copiers = None if agents else Copiers(run, log, directory, count)
            if agents:
                agents.have(count, policy.version)

            def chain() -> dict[str, float]:
                waits = copiers.begin(policy.version + 1) if copiers else None  # noqa: B023
                spent, record, updated_s = update()
                return stages(
                    spent,
                    record,
                    updated_s,
                    waits() if waits else agents.serve(record.version) if agents else [],
                )

            def both() -> dict[str, float]:
                time.sleep(REST_S)
                made = chain()
                time.sleep(REST_S)
                copied_s = plain(
                    Path(announced.found[-1].uri.removeprefix("file://")),
                    count,  # noqa: B023
                    directory,
                )
                least = copied_s + made.get("reload", 0.0)
                of_vllm = sum(made.get(stage, 0.0) for stage in ("pause", "resume"))
                return {
                    **made,
                    "plain": copied_s,
                    "ratio": made["all"] / least,
                    "ratio_to_swap": made["all"] / (least + of_vllm),
                }

            chain()  # the first of everything
            quiet = [both() for _ in range(rounds)]
            results.append(
                {
                    "size": size,
                    "bytes": announced.found[-1].size_bytes,
                    "servers": count,
                    "vllm": agents is not None,
                    **middle(quiet),
                }
            )
            if agents:
                results[-1]["in_flight"] = busy(chain, agents.urls(), rounds)
            if copiers:
                copiers.close()
    return results


def busy(chain: Callable[[], dict[str, float]], urls: Sequence[str], rounds: int) -> dict[str, Any]:
    """The same with requests in flight: how long the longest was without a token, and how long a
    token takes otherwise.
    """
    made = list[dict[str, float]]()
    pauses = list[float]()
    usual = list[float]()
    for _ in range(rounds):
        with requests(urls) as times:
            time.sleep(2.0)
            begun = time.monotonic()
            made.append(chain())
            ended = time.monotonic()
            time.sleep(1.0)
        pauses.append(max(gaps(times, begun, ended)))
        usual += gaps(times, end=begun)
    return {
        **middle(made),
        "pause_seen_s": {"median": quantile(pauses, 0.5), "max": max(pauses)},
        "between_tokens_s": quantile(usual, 0.5),
    }


def middle(rounds: Sequence[dict[str, float]]) -> dict[str, Any]:
    """The median of every figure, and of the ratio its ends, too."""
    found: dict[str, Any] = {
        name: quantile([one[name] for one in rounds], 0.5) for name in rounds[0]
    }
    for name in {"ratio", "ratio_to_swap"} & set(found):
        found[name] = spread([one[name] for one in rounds])
    return found


def table(results: Sequence[dict[str, Any]]) -> Table:
    heads = [f"{r['size']}, {r['servers']} server{'s' * (r['servers'] > 1)}" for r in results]
    shown = Table(
        "ms",
        *heads,
        box=None,
        title="from the update to the tokens of the new version",
        title_justify="left",
    )
    for column in shown.columns[1:]:
        column.justify = "right"

    def row(
        label: str,
        cell: Callable[[dict[str, Any]], float | None],
        unit: float = 1000,
        digits: int = 1,
    ) -> None:
        shown.add_row(
            label,
            *("" if (value := cell(r)) is None else f"{unit * value:,.{digits}f}" for r in results),
        )

    for stage in STAGES:
        row("pull, verify" if stage == "pull" else stage, lambda r, s=stage: r.get(s))
    row("all", lambda r: r["all"])
    row("copying and hashing, plainly", lambda r: r["plain"])
    row("ratio to that and the reload", lambda r: r["ratio"]["median"], 1, 2)
    row("  and vLLM's pause and resume, too", lambda r: r["ratio_to_swap"]["median"], 1, 2)
    row(
        "pause seen in flight, median",
        lambda r: r["in_flight"]["pause_seen_s"]["median"] if "in_flight" in r else None,
    )
    row("  longest", lambda r: r["in_flight"]["pause_seen_s"]["max"] if "in_flight" in r else None)
    row(
        "  between tokens otherwise",
        lambda r: r["in_flight"]["between_tokens_s"] if "in_flight" in r else None,
    )
    row(
        "all, with requests in flight",
        lambda r: r["in_flight"]["all"] if "in_flight" in r else None,
    )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--size",
        action="append",
        choices=list(SIZES),
        help="of the weights; may be repeated: default all",
    )
    parser.add_argument(
        "--servers", type=int, action="append", help="may be repeated: default 1, 2"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS / "weights.json")
    given = parser.parse_args()
    sizes = given.size or list(SIZES)
    before = json.loads(given.out.read_text())["results"] if given.out.exists() else []
    results = [one for one in before if one["size"] not in sizes]
    for size in sizes:
        with tempfile.TemporaryDirectory() as directory:
            fill_page_cache(Path(directory))
            results += measure(size, Path(directory), given.rounds, given.servers or [1, 2])
    results.sort(key=lambda one: (list(SIZES).index(one["size"]), one["servers"]))
    write(given.out, {"results": results})
    Console(width=160).print(table(results))


if __name__ == "__main__":
    main()
