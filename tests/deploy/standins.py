"""The parts of a run that need JAX or vLLM, by stand-ins in one process: `python -m
tests.deploy.standins RUN.yaml`.

The env and the learner are those of tests/chaos, which really take part in the loop; what the real
ones' metrics are called, they publish, with numbers of no meaning.
"""

from __future__ import annotations

import contextlib
import re
import signal
import sys
import threading
import time
from collections.abc import Callable

from streamrl.config import run_file
from streamrl.config.run_file import RunFile
from streamrl.run.monitoring.http import serving
from streamrl.run.monitoring.metric_names import METRICS
from streamrl.stream.local_kafka import connect
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.kafka.log import KafkaLog
from streamrl.stream.log.meter import Meter
from streamrl.stream.log.protocol import Log, Output
from streamrl.stream.records import Server
from streamrl.system.signals import stop_on
from tests.chaos import env, learner

EVERY_S = 0.5
NAMES = {"limit": "length", "evaluation": "hard", "k": "1", "caller": "own"}
VLLM = b'vllm:num_requests_running{engine="0"} 5.0\nvllm:num_requests_waiting{engine="0"} 2.0\n'


def values(prefix: str) -> dict[str, float]:
    """Every metric of that beginning."""
    return {
        re.sub(r"\{(\w+)\}", lambda m: NAMES[m[1]], known.name): 1e-6
        for known in METRICS
        if known.name.startswith(prefix)
    }


def measure(log: Log, source: str, prefix: str, stop: threading.Event) -> None:
    meter = Meter(log, source)
    writer = log.producer()
    while not stop.wait(EVERY_S):
        meter.publish(values(prefix))
        if prefix == "inference/":
            writer.send(
                to_message(
                    Output(
                        "servers",
                        source,
                        Server(
                            server_id=source,
                            url="",
                            version=0,
                            state="ready",
                            heartbeat_s=time.time(),
                        ),
                    )
                )
            )
    meter.close()
    writer.close()


def main(run: RunFile, stop: threading.Event) -> None:
    acts: list[tuple[str, str, Callable[[Log], None]]] = [
        ("learner-lead", "learner/", lambda log: learner.main(run, log, stop)),
        *(
            (f"env-{name}-0", "env/", lambda log, name=name: env.main(run, log, stop, name))
            for name in run.envs
        ),
        (
            "inference-0",
            "inference/",
            lambda log: log.register_metrics_page("/metrics/vllm", lambda: VLLM),
        ),
        ("evaluator", "evals/", lambda log: None),
    ]
    threads: list[threading.Thread] = []
    with contextlib.ExitStack() as held:
        for source, prefix, act in acts:
            log = held.enter_context(
                serving(run, KafkaLog(connect.client_settings(run), run.run), source)
            )
            log.mark_ready()
            threads += [
                threading.Thread(target=measure, args=(log, source, prefix, stop)),
                threading.Thread(target=act, args=(log,)),
            ]
        for thread in threads:
            thread.start()
        # a `join` has no time limit, and this thread would not hear of a signal
        while not stop.wait(EVERY_S):
            pass
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main(run_file.load(sys.argv[1]), stop_on([signal.SIGTERM]))
