"""The two ends of the data path, each a process: who makes rollouts, and who takes batches. They
take orders on stdin, a JSON object a line.

    python -m bench.stations generator SETTINGS.json
    python -m bench.stations trainer SETTINGS.json
    python -m bench.stations follower-0 SETTINGS.json

The generator takes {"rate": rollouts/s}, where null is as many as are wanted and 0 pauses. The
trainer takes {"report": true} and prints the latencies since the last report, in s. A follower is
another trainer of the same batches, which nobody follows.

Both count what they have done in a file of eight bytes that anybody may map.
"""

from __future__ import annotations

import json
import mmap
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.work import Shape, Source, age_ms
from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.envs.flow_control import OutstandingLimit
from streamrl.envs.problem_cursor import ProblemCursor
from streamrl.learner.model.examples import expand
from streamrl.stream.log.codec import to_event, to_message
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.protocol import Log, Output, Writer, beginning_offset
from streamrl.stream.processor.processor import REPORT_S
from streamrl.stream.records import Batch, Demand, EnvProgress, PolicyVersion, Rollout
from streamrl.system.tuning import tune_process

TURN_GROUPS = 8  # that an env launches until it is the next one's turn, if it may
LATENCIES = 200_000  # kept; a round has fewer


class Count:
    """A number that one process writes and others read."""

    def __init__(self, path: Path, create: bool = False) -> None:
        if create:
            path.with_suffix(".new").write_bytes(bytes(8))
            path.with_suffix(".new").rename(path)  # whoever sees it sees all of it
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8)

    def get(self) -> int:
        return struct.unpack_from("<q", self._map)[0]

    def add(self, n: int) -> None:
        struct.pack_into("<q", self._map, 0, self.get() + n)


class Orders:
    """What came in on stdin last; its end ends the process."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.over = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            self.values = {**self.values, **json.loads(line)}
        self.over.set()


def generate(run: RunFile, log: Log, shape: Shape, count: Count, orders: Orders) -> None:
    """Every env of the run in turn, within its demand, a transaction at a time: rollouts and the
    env's progress.
    """
    writer = log.writer("env-bench")
    reader = log.reader(
        {(topic, 0): beginning_offset(log, topic, 0) for topic in ("demand", "policy-versions")}
    )
    names = list(run.envs)
    source = Source(shape)
    at_once = shape.transaction_groups
    credits = {
        env: OutstandingLimit(f"{env}-0", 1, float(shape.group * shape.rollout_tokens))
        for env in names
    }
    cursors = {
        env: ProblemCursor(EnvProgress(producer=f"{env}-0", next_problem=0), 1) for env in names
    }
    late = {
        env: strew(writer, source, env, shape.stragglers // len(names) // (shape.group - 1))
        for env in names
    }
    version = 0
    due = 0.0
    turn = 0
    begun = 0
    last = time.monotonic()
    while not orders.over.is_set():
        for message in reader.poll(500, 0):
            match to_event(message, ("demand", "policy-version")).record:
                case Demand() as demand:
                    credits[demand.environment].on_demand(demand)
                case PolicyVersion(version=announced):
                    version = max(version, announced)
                case _:
                    pass
        rate = orders.values.get("rate", 0)
        now = time.monotonic()
        due = at_once if rate is None else min(due + (now - last) * rate / shape.group, at_once)
        last = now
        outputs: list[Output] = []
        done: dict[str, list[int]] = {}
        waiting = 0  # envs in a row that want nothing
        while due >= 1 and waiting < len(names):
            env = names[turn % len(names)]
            if begun == TURN_GROUPS or not credits[env].allows():
                turn, begun, waiting = turn + 1, 0, 0 if begun else waiting + 1
                continue
            begun += 1
            number = cursors[env].next()
            done.setdefault(env, []).append(number)
            credits[env].launched += 1
            outputs += sent(env, delayed(late[env], source.group(env, number, version)))
            due -= 1
        if outputs:
            rollouts = len(outputs)
            outputs += [
                Output(f"journal.env-{env}-0", f"{env}-0", cursors[env].complete(numbers))
                for env, numbers in done.items()
            ]
            writer.commit([to_message(output) for output in outputs])
            count.add(rollouts)
        else:
            time.sleep(0.002)


def sent(env: str, rollouts: Sequence[Rollout]) -> list[Output]:
    return [Output(topology.rollouts(env), rollout.group_id, rollout) for rollout in rollouts]


def delayed(late: deque[Rollout], group: list[Rollout]) -> list[Rollout]:
    """The group but for one, which joins those that are late; instead the one that has been late
    for longest, and completes its group.
    """
    if not late:
        return group
    late.append(group[0])
    return [late.popleft(), *group[1:]]


def strew(writer: Writer, source: Source, env: str, groups: int) -> deque[Rollout]:
    """Begin groups that lack a rollout each: as many the buffer holds from now on. Returns what
    they lack.
    """
    late = deque[Rollout]()
    for start in range(0, groups, source.shape.transaction_groups):
        begun = [
            source.group(env, -1 - number, 0)
            for number in range(start, min(start + source.shape.transaction_groups, groups))
        ]
        writer.commit([to_message(output) for group in begun for output in sent(env, group[1:])])
        late.extend(group[0] for group in begun)
    return late


def train(
    run: RunFile, log: Log, vocab_size: int, count: Count, orders: Orders, leads: bool
) -> None:
    """Batches to trainer arrays; each of the lead's gives a policy version."""
    writer = log.writer("learner-lead") if leads else None
    latencies: list[float] | None = None  # not noted before the first report
    reader = log.reader({("batches", 0): beginning_offset(log, "batches", 0)})
    marked_s = 0.0

    def announce(version: int) -> None:
        if writer is None:
            return
        batch = version - 1 if version else None
        made = {
            "uri": "",
            "size_bytes": 0,
            "sha256": "",
            "batch": batch,
            "time_s": time.time(),
            "vocab_size": vocab_size,
        }
        record = PolicyVersion(learner=run.learner.name, version=version, **made)
        writer.commit([to_message(Output("policy-versions", run.learner.name, record))])

    announce(0)
    while not orders.over.is_set():
        if orders.values.pop("report", None):
            print(json.dumps({"latencies_s": latencies or []}), flush=True)
            latencies = []
        for message in reader.poll(1, 0.02):
            batch = to_event(message, ("batch",)).record
            assert isinstance(batch, Batch), batch
            arrays = expand(batch)
            assert np.count_nonzero(arrays.segment_ids) == int(batch.sequence_lengths.sum())
            if latencies is not None and len(latencies) < LATENCIES:
                latencies += [age_ms(uid) / 1000 for uid in batch.uids]
            count.add(len(batch.uids))
            announce(batch.number + 1)
            if writer is not None and time.monotonic() - marked_s >= REPORT_S:
                writer.commit_offsets({("batches", 0): message.offset + 1}, wait=False)
                marked_s = time.monotonic()


def main(role: str, path: str) -> None:
    tune_process()
    settings = json.loads(Path(path).read_text())
    run = RunFile.model_validate(settings["run"])
    shape = Shape(**settings["shape"])
    log = KafkaLog(settings["kafka"], run.run)
    count = Count(Path(settings["counts"]) / role, create=True)
    orders = Orders()
    if role == "generator":
        generate(run, log, shape, count, orders)
    else:
        train(run, log, shape.vocab_size, count, orders, leads=role == "trainer")


if __name__ == "__main__":
    main(*sys.argv[1:])
