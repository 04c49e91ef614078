"""Plays a part of a run: `python -m tests.run.orchestrator.actor NAME RUN.yaml`. The actor called
learner plays the whole loop by publishing what a run leaves in its topics, with a reward that
rises; the others only live, each with a child of its own, and import nothing for it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time

STEPS = 60


def play(path: str) -> None:
    from streamrl.config import run_file
    from streamrl.stream.local_kafka import connect
    from streamrl.stream.log.kafka.log import KafkaLog
    from tests.run.orchestrator import script

    run = run_file.load(path)
    script.play(run, KafkaLog(connect.client_settings(run), run.run), STEPS)


def main() -> None:
    name, path = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    print(f"{name} is on stage", flush=True)
    if name == "batcher" and "/doomed/" in path:
        sys.exit("out of cues")
    if name == "learner":
        play(path)
    time.sleep(600)


if __name__ == "__main__":
    main()
