"""An agent server by NeMo Gym's contract: rewards are the server's own, each model call belongs to
the session of its episode, and a server that dies in the middle is a failed rollout.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from streamrl.envs.servers.process import INSIDE
from streamrl.envs.sessions.settings import Gateway
from streamrl.stream.local_kafka.ports import free_port
from streamrl.stream.records import ModelCall, Reward
from tests.support.env_servers import (
    EnvServer,
    ends,
    gateway_of,
    of_kind,
    problems_ended,
    run_of,
    starts,
)
from tests.support.gateways import Gateways
from tests.support.modules import module_of
from tests.support.sampling_stub import tool_call
from tests.support.waiting import until

SERVER = Path(__file__).parents[1] / "nemo_gym_server.py"
TASKS = 6
JUDGED = TASKS - 1  # The judge of the last task fails.
TOOL = {
    "type": "function",
    "name": "increment_counter",
    "strict": True,
    "parameters": {"type": "object", "properties": {"count": {"type": "integer"}}},
}


@pytest.fixture(scope="module", autouse=True)
def _importable() -> Iterator[None]:
    """The programs of the inside find each other there."""
    sys.path.insert(0, str(INSIDE))
    yield
    sys.path.remove(str(INSIDE))


def program() -> Any:
    return module_of(INSIDE / "streamrl_nemo_gym.py")


def adds_twice(prompt: str, choice: int) -> str:
    """The policy adds the number that it is asked for, twice, and then says so."""
    (number,) = re.findall(r"add (\d+)", prompt)
    if prompt.count("<tool>") == 2:
        return "done"
    return tool_call("increment_counter", count=int(number))


def row_of(task: int) -> dict[str, Any]:
    parameters = {
        "input": [{"role": "user", "content": f"add {task}"}],
        "tools": [TOOL],
        "metadata": {"mine": "stays"},
    }
    expected = 5 if task < JUDGED else -1
    return {
        "responses_create_params": parameters,
        "initial_count": task % 2,
        "expected_count": expected,
        "agent_ref": {"name": "counter_agent"},
    }


def reward_of(task: int) -> float:
    """What the server gives for what the policy does."""
    initial = task % 2
    return 1 / (1 + abs(5 - initial - 2 * task)) + initial / 1000


@contextmanager
def served(directory: Path, dies_after: int = 0, **env: Any) -> Iterator[Gateways]:
    """A run whose env is the agent of such servers, and its gateway."""
    dataset = directory / "tasks.jsonl"
    dataset.write_text("".join(json.dumps(row_of(task)) + "\n" for task in range(TASKS)))
    port = free_port()
    run = run_of(
        directory,
        f"nemo-gym:http://127.0.0.1:{port}/",
        sys.executable,
        params={"dataset": str(dataset), "version": "0.6.0"},
        max_groups_in_flight=2,
        max_tokens=80,
        **env,
    )
    with gateway_of(run, adds_twice) as gateway:
        url = f"http://127.0.0.1:{run.settings_of(Gateway).port}"
        command = [sys.executable, SERVER, str(port), url, str(dies_after)]
        environment = {**os.environ, "POLICY_API_KEY": gateway.key("sample")}
        process = subprocess.Popen(command, env=environment)
        try:
            until(lambda: answers(f"http://127.0.0.1:{port}/run"), 60)
            server = EnvServer(run, gateway)
            try:
                yield gateway
            finally:
                server.stop()
        finally:
            process.kill()
            process.wait()


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5)
    except urllib.error.HTTPError as error:
        return error.code == 405
    except OSError:
        return False
    return True


def earned(gateway: Gateways) -> dict[str, float]:
    """The reward of each session that has one."""
    records = of_kind(gateway, Reward)
    return {each.rollout: each.value for each in records if isinstance(each, Reward)}


def test_rewards_are_the_servers_own_and_calls_belong_to_their_sessions(tmp_path: Path):
    with served(tmp_path) as gateway:
        until(lambda: len(problems_ended(gateway)) == TASKS, 60)
        ended = ends(gateway)
        begun = starts(gateway)
        rewards = earned(gateway)
        calls = of_kind(gateway, ModelCall)
    tasks = {name: int(begun[name].problem_id) for name in ended}
    whole = {name: task for name, task in tasks.items() if task < JUDGED}
    assert len(set(whole.values())) == JUDGED
    assert {ended[name].failure for name in whole} == {""}
    assert {name: rewards[name] for name in whole} == {
        name: reward_of(task) for name, task in whole.items()
    }
    failed = tasks.keys() - whole.keys()
    assert {ended[name].failure for name in failed} == {"judge_failed"}
    assert not failed & rewards.keys()
    for name, task in tasks.items():
        first, second, third = (call for call in calls if call.session == name)
        assert first.messages[0]["content"] == f"add {task}"
        assert (second.continues, third.continues) == (first.call, second.call)
        assert not (second.fork or third.fork)
    source = next(iter(begun.values())).metadata
    assert (source["package"], source["version"]) == ("nemo-gym", "0.6.0")
    assert (source["agent"], source["dataset"]) == ("counter_agent", "tasks.jsonl")
    assert len(source["dataset_version"]) == 12


def test_a_server_that_dies_in_the_middle_is_a_failed_rollout(tmp_path: Path):
    with served(tmp_path, dies_after=12) as gateway:
        until(lambda: sum(bool(end.failure) for end in ends(gateway).values()) >= 4, 60)
        ended = ends(gateway)
        begun = starts(gateway)
        rewards = earned(gateway)
        calls = of_kind(gateway, ModelCall)
    failed = {name for name, end in ended.items() if end.failure}
    assert not failed & rewards.keys()
    assert any(call.session in failed for call in calls)  # in the middle of it
    assert {name: rewards[name] for name in ended.keys() - failed} == {
        name: reward_of(int(begun[name].problem_id)) for name in ended.keys() - failed
    }


def test_what_was_not_judged_is_no_reward():
    module = program()

    def failure(**fields: Any) -> str:
        with pytest.raises(module.Failed) as error:
            module.outcome(fields, named=False)
        return str(error.value)

    assert failure(
        reward=0.0, _ng_failure_class="judge_failed", _ng_failure_judge_error="gone"
    ) == ("judge_failed: gone")
    assert "skip_verification" in failure(reward=0.0, verification_skipped=True)
    assert "mask_sample" in failure(reward=1.0, mask_sample=True)
    for reward in (None, "1", True, float("nan")):
        assert "which is no number" in failure(reward=reward)
    with pytest.raises(module.Failed, match="no JSON object"):
        module.outcome([1], named=False)


def test_components_have_names_where_the_run_asks_for_them():
    module = program()
    result = {"reward": 1.5, "reward_components": {"right": 1.0, "brief": 0.5}, "response": {}}
    assert module.outcome(result, named=False).rewards == {"reward": 1.5}
    assert module.outcome(result, named=True).rewards == {
        "reward": 1.5,
        "right": 1.0,
        "brief": 0.5,
    }
    cut_off = {"reward": 1, "response": {"incomplete_details": {"reason": "max_output_tokens"}}}
    assert module.outcome(cut_off, named=False).truncation == "context"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("{", r"tasks\.jsonl:1 is no JSON"),
        ('\n{"question": 1}', r"tasks\.jsonl:2 has no responses_create_params"),
        ('{"question": "\udcff"}', r"tasks\.jsonl:1 is no JSON"),
    ],
)
def test_a_dataset_that_is_none_is_named(tmp_path: Path, text: str, says: str):
    dataset = tmp_path / "tasks.jsonl"
    with pytest.raises(SystemExit, match="cannot be read"):
        program().read(dataset)
    dataset.write_text(text, errors="surrogateescape")
    with pytest.raises(SystemExit, match=says):
        program().rows_of(program().read(dataset), str(dataset))


def test_a_line_of_a_dataset_ends_with_a_line_feed_only():
    """JSON may have other separators of lines in its texts as they are."""
    row = {"responses_create_params": {"input": "one\u2028two\x85three"}}
    content = json.dumps(row, ensure_ascii=False).encode()
    assert program().rows_of(b"%s\r\n\n%s\n" % (content, content), "tasks.jsonl") == [row, row]


def test_an_env_has_one_agent_and_the_version_is_known():
    module = program()
    rows = [{"agent_ref": {"name": name}} for name in "ab"]
    with pytest.raises(SystemExit, match=r"several agents \(a, b\)"):
        module.agent_of(rows)
    assert module.agent_of([{"agent_ref": {"name": "a"}}, {"agent_ref": "a"}]) == "a"
    assert module.agent_of([{}]) == ""
    with pytest.raises(SystemExit, match=r"params\.version"):
        module.installed_version()


def test_an_answer_that_does_not_end_fails_its_session():
    module = program()
    assert module.read_at_most(BytesIO(b"abc"), 3) == b"abc"
    with pytest.raises(module.Failed, match="has more than 2 bytes"):
        module.read_at_most(BytesIO(b"abc"), 2)
