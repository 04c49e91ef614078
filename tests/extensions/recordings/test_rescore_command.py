from __future__ import annotations

import asyncio
from io import StringIO

from rich.console import Console

from streamrl.config.run_file import parse
from streamrl.extensions.recordings.progress import no_progress
from streamrl.extensions.recordings.rescore_command import print_result, rescore_and_close
from tests.extensions.recordings.test_rescore import Doubles, answer, recorded, scorer

RUN = parse({"run": "r", "envs": {"copy": {}}})


class Closed(Doubles):
    closed = 0

    async def close(self) -> None:
        self.closed += 1


def test_the_env_is_closed_and_the_line_says_what_to_do_next():
    env = Closed()
    judge = scorer(answer, env=env)
    log = recorded()
    result = asyncio.run(rescore_and_close(RUN, log, "copy", judge, {"answer": 1.0}, no_progress))
    assert env.closed == 1
    output = StringIO()
    print_result(result, judge, RUN, Console(file=output, width=200))
    assert output.getvalue().splitlines() == [
        "4 rollouts rescored by answer@1, 0 failed; mean reward 1.0000 before, 2.0000 after",
        "train on them: streamrl fork r --at 0 --as NEW --rewards answer@1",
    ]
    again = asyncio.run(rescore_and_close(RUN, log, "copy", judge, {"answer": 1.0}, no_progress))
    print_result(again, judge, RUN, Console(file=output, width=200))
    assert "0 rollouts rescored by answer@1, 0 failed, 4 had it before" in output.getvalue()
