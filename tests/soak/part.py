"""One process of a soak run: `python -m tests.soak.part RUN.yaml NAME`. Buffer and batcher are the
commands that everybody runs.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

from tests.soak.clock import Clock, follow

CLOCK = "clock"  # file in the run's directory


def main(file: str, name: str) -> None:
    follow(Clock(Path(file).parent / CLOCK))
    from streamrl import cli
    from tests.soak import learner, producers

    if name in ("buffer", "batcher"):
        sys.argv[1:] = [name, file]
        cli.main()
    elif name == "learner":
        stand_in(file, learner.main)
    else:
        stand_in(file, producers.main, int(name.rpartition("-")[2]))


def stand_in(file: str, main: Callable[..., None], *arguments: object) -> None:
    """Starts and ends as `streamrl` does."""
    import logging

    from streamrl.cli.shared import LOG_FORMAT
    from streamrl.config import run_file
    from streamrl.stream.local_kafka import connect
    from streamrl.stream.log.kafka.log import KafkaLog
    from streamrl.system.errors import StreamrlError
    from streamrl.system.signals import stop_on

    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr)
    stopped = stop_on([signal.SIGTERM])
    try:
        run = run_file.load(file)
        main(run, KafkaLog(connect.client_settings(run), run.run), stopped, *arguments)
    except StreamrlError as error:
        print(f"streamrl: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main(*sys.argv[1:])
