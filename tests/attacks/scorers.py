"""Attacks of an answer on the process that scores it: S1 and S2 of the review, and what S3 means
for scorers.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from streamrl.config.sections.envs import Env
from streamrl.envs.api import Completion, Problem, SingleTurnEnv
from streamrl.envs.engine.runner import RolloutRunner
from streamrl.envs.engine.time_limits import TimeLimitExceeded
from streamrl.envs.sandbox.limits import SandboxLimits
from streamrl.envs.sandbox.subprocess_call import CallFailed, SubprocessCall
from streamrl.envs.shipped.math_verify import MathVerify
from streamrl.envs.shipped.reasoning_gym import ReasoningGym, Scorers
from tests.attacks.table import Attack
from tests.support.waiting import patience

GYM = "envs/shipped/reasoning_gym.py"
BOUNDED = "envs/sandbox/subprocess_call.py"
# Tasks of reasoning-gym 0.1.25 whose scorers evaluate the answer: with Python's eval, and with
# SymPy's parser. The ninth, polynomial_multiplication, poses other problems in another process
# unless PYTHONHASHSEED is set; its parser is that of the integrations.
EVAL = ("string_insertion", "spiral_matrix", "binary_matrix", "n_queens")
PARSE = ("countdown", "puzzle24", "simple_integration", "intermediate_integration")
RUNS_IT = "tests.attacks.executed:executed"  # what a scorer may be
TOP = 0.5  # nobody earns so much who has not answered


@contextmanager
def secret() -> Iterator[str]:
    value = "hunter2-of-the-env"
    with patch.dict(os.environ, STREAMRL_KAFKA_PASSWORD=value):
        yield value


def evaluated(directory: Path) -> str:
    """Each task that evaluates answers is given one that would write a file, and would make the
    scorer's answer equal to anything.
    """
    # All in one expression, as an answer has to be; what it is worth is what it was equal to.
    write = f"open({str(directory / 'pwned')!r}, 'w').write('x')"
    forge = (
        "type('Any', (str,), {'__eq__': lambda s, o: True, '__hash__': str.__hash__, '__float__':"
        " lambda s: 24.0, '__int__': lambda s: 24})('x')"
    )

    async def score() -> list[str]:
        found: list[str] = []
        shared = Scorers(patience(30), processes=1)
        for task in (*EVAL, *PARSE):
            env = ReasoningGym(1, task)
            env.scorers = shared
            problem = env.problem(0)
            numbers = problem.answer["metadata"].get("numbers") or [1, 2, 3, 4]
            comment = " + ".join(map(str, numbers))
            for text in (f"[{write}]", write, f"[{forge}]", forge, f"{forge} or ({comment})"):
                if (worth := (await env.rewards(problem, Completion(text, True)))["score"]) >= TOP:
                    found.append(f"{task} gave {worth} for {text[:40]}")
        await shared.close()
        return found

    found = asyncio.run(score())
    return "; ".join(found) or ("an answer has written a file" if list(directory.iterdir()) else "")


def endless(directory: Path) -> str:
    """A power tower in a task whose scorer works it out: others go on meanwhile, and nobody is
    given a score.
    """

    async def score() -> str:
        env = ReasoningGym(1, "countdown", {"timeout_s": 1.0, "processes": 1})
        ticks = 0
        try:
            judging = asyncio.create_task(
                env.rewards(env.problem(0), Completion("9**9**9**9", True))
            )
            while not judging.done():
                await asyncio.sleep(0.05)
                ticks += 1
            found = await judging
            return f"it was given {found}" if found["score"] >= TOP else ""
        except (CallFailed, RuntimeError):
            return "" if ticks > 3 else "the event loop stood still"
        finally:
            await env.close()

    return asyncio.run(score())


def running(text: str) -> Callable[[Path], str]:
    """Where a library runs the answer: what can that do? It sets `found` to the harm done."""

    def attempt(directory: Path) -> str:
        file = directory / "precious"
        file.write_text("hunter2-of-the-env")
        file.chmod(0o644)

        async def call() -> Any:
            scorer = SubprocessCall(RUNS_IT, SandboxLimits(patience(30), 1024))
            try:
                return await scorer(f"FILE, ENV = {str(file)!r}, {os.getpid()}\n{text}")
            finally:
                await scorer.close()

        with secret() as value:
            try:
                found = str(asyncio.run(call()) or "")
            except (CallFailed, RuntimeError) as error:
                found = str(error) if value in str(error) else ""
        return found or ("" if file.read_text() == value else "a file has changed")

    return attempt


READS = """
import os
found = os.environ.get('STREAMRL_KAFKA_PASSWORD', '')
for path in (FILE, f'/proc/{ENV}/environ', f'/proc/{os.getppid()}/environ',
             f'/proc/{os.getppid()}/mem', '/proc/self/environ', '/etc/passwd'):
    try: found += path + open(path, 'rb').read(60).decode('latin-1')
    except OSError: pass
for descriptor in range(3, 64):
    try: found += os.read(descriptor, 60).decode('latin-1')
    except OSError: pass
"""
ACTS = """
import os, resource, socket, subprocess
found = ''
for name, attempt in (('program', lambda: subprocess.run(['/bin/true'])), ('fork', os.fork),
                      ('socket', socket.socket), ('kill', lambda: os.kill(ENV, 0)),
                      ('parent', lambda: os.kill(os.getppid(), 9)),
                      ('memory', lambda: bytearray(2 << 30)), ('write', lambda: open(FILE, 'w')),
                      ('limit', lambda: resource.prlimit(ENV, resource.RLIMIT_NOFILE, (8, 8)))):
    try: attempt(); found += name + ' '
    except (OSError, MemoryError): pass
"""


def later(directory: Path) -> str:
    """What one answer does to its scorer changes no later verdict."""

    async def call() -> Any:
        scorer = SubprocessCall(RUNS_IT, SandboxLimits(patience(30), 1024))
        with suppress(CallFailed, RuntimeError):
            await scorer(
                "import builtins, sys\nbuiltins.exec = lambda *a:"
                " a[1].update(found='forged')\nsys.modules['json'].dumps = None"
            )
        try:
            return await scorer("found = 1")
        finally:
            await scorer.close()

    found = asyncio.run(call())
    return "" if found == 1 else f"the next verdict was {found}"


def standing_still(directory: Path) -> str:
    """A plain reward function that never ends: the event loop goes on, and the rollout is not given
    a reward.
    """
    import threading

    over = threading.Event()

    class Hangs(SingleTurnEnv):
        def problem(self, number: int) -> Problem:
            return Problem([])

        def rewards(self, problem: Problem, completion: Completion) -> dict[str, float]:
            over.wait()
            return {"score": 1.0}

    async def judge() -> str:
        runner = RolloutRunner(Hangs(), Env(env_timeout_s=0.2), None)  # type: ignore[arg-type]  # nothing is sampled
        try:
            found = await runner.call(
                Hangs().rewards, Problem([]), Completion("", True), what="its rewards"
            )
        except TimeLimitExceeded:
            return ""
        return f"it was given {found}"

    try:
        return asyncio.run(judge())
    finally:
        over.set()


def without_verdict(directory: Path) -> str:
    """LaTeX that hangs math-verify: no verdict, and no reward."""

    async def judge() -> str:
        verify = MathVerify(timeout_s=0.5, processes=1)
        try:
            tower = Completion("$" + "9^{" * 6 + "9" + "}" * 6 + "$", True)
            return f"it was given {await verify(Problem([], '42'), tower, {})}"
        except (CallFailed, RuntimeError):
            return ""
        finally:
            await verify.close()

    return asyncio.run(judge())


ATTACKS = (
    Attack("S1", "an answer that reasoning-gym evaluates", GYM, evaluated),
    Attack("S1", "an answer that reasoning-gym never finishes", GYM, endless),
    Attack("S1", "read secrets and files from a scorer", BOUNDED, running(READS)),
    Attack("S1", "act on others from a scorer", BOUNDED, running(ACTS)),
    Attack("S1", "forge the verdicts of later answers", BOUNDED, later),
    Attack("S2", "a reward function that never ends", "envs/engine/runner.py", standing_still),
    Attack(
        "S2",
        "LaTeX that math-verify never finishes",
        "envs/shipped/math_verify.py",
        without_verdict,
    ),
)
