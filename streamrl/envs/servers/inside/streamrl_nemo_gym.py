"""An agent server of NeMo Gym as an env: each episode is a `POST /run` of a row of its dataset.

The servers of NeMo Gym run the episode: the agent server begins it at the resources server
(`/seed_session`), asks the model, calls the tools, and has the answer judged (`/verify`). Its model
server asks the gateway, with one key for the sessions of all episodes. That of an episode is in the
metadata of its parameters, which go from `/run` through the agent to the model. This runs in
any Python; in that of NeMo Gym it knows the version of the package.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import json
import math
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from streamrl_sessions import Failed, Outcome, Session, Settings, serve

SESSION_FIELD = "streamrl_session"  # of a call's metadata, as the gateway reads it
PARAMETERS = "responses_create_params"  # of a row: what the agent asks the model with
PACKAGE = "nemo-gym"
MAX_ANSWER = 64 << 20  # bytes of what /run answers
MAX_ERROR = 1 << 20


class NemoGym:
    """The params of the run file: `dataset`, the JSONL file of the agent's tasks, as NeMo Gym
    prepares them; `version`, that of NeMo Gym, where this Python does not have the package.
    """

    def __init__(
        self, settings: Settings, requests: ThreadPoolExecutor, dataset: str, version: str = ""
    ) -> None:
        self._settings = settings
        self._requests = requests
        self._url = settings.target.rstrip("/")
        content = read(Path(dataset))
        self._rows = rows_of(content, dataset)
        self._played = Counter[int]()  # episodes, by the number of the row
        self.problems = len(self._rows)
        self.source = {
            "package": PACKAGE,
            "version": version or installed_version(),
            "agent": agent_of(self._rows),
            "dataset": Path(dataset).name,
            "dataset_version": hashlib.sha256(content).hexdigest()[:12],
        }

    async def play(self, problem: int, session: Session) -> Outcome:
        task = self._task(problem, session)
        self._played[problem] += 1
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(
            self._requests, post, f"{self._url}/run", task, self._settings.session_limit_s
        )
        return outcome(result, named=bool(self._settings.rewards))

    def _task(self, problem: int, session: Session) -> dict[str, Any]:
        """The body of `/run`: the row, with the session that its model calls belong to."""
        row = self._rows[problem]
        parameters = row[PARAMETERS]
        metadata = dict(parameters.get("metadata") or {})
        metadata[SESSION_FIELD] = f"{self._settings.env}.{session.session_id}"
        return {
            **row,
            PARAMETERS: {**parameters, "metadata": metadata},
            "_ng_task_index": problem,
            "_ng_rollout_index": self._played[problem],
            "_ng_rollout_id": session.session_id,
        }


def outcome(result: Any, named: bool) -> Outcome:
    """The result of an episode that `/run` answers. `named`: with the components of its reward by
    their names, where the server gives any. Raises Failed for an episode that was not judged.
    """
    if not isinstance(result, dict):
        raise Failed("the agent server's answer is no JSON object")
    if result.get("_ng_failure_class"):
        causes = [value for key, value in result.items() if key.startswith("_ng_failure_")]
        raise Failed(": ".join(str(cause) for cause in causes))
    if result.get("verification_skipped"):
        raise Failed("the agent skips verification (skip_verification), so there is no reward")
    if result.get("mask_sample"):
        raise Failed("the agent server excludes this sample from training (mask_sample)")
    given: dict[str, Any] = {"reward": result.get("reward")}
    if named:
        given = {**(result.get("reward_components") or {}), **given}
    rewards = {name: number(name, value) for name, value in given.items()}
    response = result.get("response") or {}
    cut_off = response.get("incomplete_details")
    return Outcome(rewards, "context" if cut_off else "")


def number(name: str, value: Any) -> float:
    """The value of a reward. Raises Failed for anything that is no finite number."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise Failed(f"{name} is {value!r}, which is no number")
    return float(value)


def read(dataset: Path) -> bytes:
    """The dataset. Ends this process if it cannot be read."""
    try:
        return dataset.read_bytes()
    except OSError as error:
        raise SystemExit(f"params.dataset: {dataset} cannot be read ({error})") from None


def rows_of(content: bytes, dataset: str) -> list[dict[str, Any]]:
    """The tasks of a dataset. Ends this process if one of them is none."""
    rows = list[dict[str, Any]]()
    for place, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:  # neither JSON nor text
            raise SystemExit(f"params.dataset: {dataset}:{place} is no JSON ({error})") from None
        if not isinstance(row, dict) or not isinstance(row.get(PARAMETERS), dict):
            raise SystemExit(
                f"params.dataset: {dataset}:{place} has no {PARAMETERS}; have NeMo Gym prepare it"
            )
        rows.append(row)
    if not rows:
        raise SystemExit(f"params.dataset: {dataset} is empty")
    return rows


def agent_of(rows: list[dict[str, Any]]) -> str:
    """The agent that the rows are for, if they name one. Ends this process for several."""
    refs = [row.get("agent_ref") or "" for row in rows]
    names = sorted({str(ref.get("name", "") if isinstance(ref, dict) else ref) for ref in refs})
    if len(names) > 1:
        raise SystemExit(
            f"params.dataset: its rows are for several agents ({', '.join(names)}); an env has one"
        )
    return names[0]


def installed_version() -> str:
    """The version of NeMo Gym in this Python. Ends this process if there is none."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(
            f"params.version: this Python has no {PACKAGE}, and its servers do not report"
            " their version; give the one that they run"
        ) from None


def post(url: str, body: dict[str, Any], timeout_s: float) -> Any:
    """The JSON that is answered. Raises Failed for an error of the server."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return json.loads(read_at_most(response, MAX_ANSWER))
    except urllib.error.HTTPError as error:
        text = read_at_most(error, MAX_ERROR).decode("utf-8", "replace")
        raise Failed(f"the agent server answered {error.code}: {text}") from None


def read_at_most(response: Any, limit: int) -> bytes:
    """The body of a server's answer. Raises Failed if it is longer: an answer without an end would
    fill the memory of this process.
    """
    content = response.read(limit + 1)
    if len(content) > limit:
        raise Failed(f"the agent server's answer has more than {limit:,} bytes")
    return content


@asynccontextmanager
async def make_env(settings: Settings) -> AsyncIterator[NemoGym]:
    with ThreadPoolExecutor(settings.max_sessions) as requests:
        yield NemoGym(settings, requests, **settings.params)


if __name__ == "__main__":
    serve(make_env)
