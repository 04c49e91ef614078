from __future__ import annotations

import pytest

from streamrl.envs.api import AgentLoopEnv, BaseEnv, MultiTurnEnv, SingleTurnEnv, Truncated
from streamrl.envs.shipped.copy_digits import CopyDigits


@pytest.mark.parametrize(
    ("kind", "lacks"),
    [
        (BaseEnv, {"problem"}),
        (SingleTurnEnv, {"problem", "rewards"}),
        (MultiTurnEnv, {"problem", "rewards", "reply"}),
        (AgentLoopEnv, {"problem", "converse", "judge"}),
    ],
)
def test_each_kind_of_env_has_its_methods(kind: type[BaseEnv], lacks: set[str]):
    assert kind.__abstractmethods__ == lacks


async def test_an_env_poses_no_problem_twice_and_has_nothing_to_close_unless_it_says_so():
    env = CopyDigits(0, 1)
    assert env.dataset_index(7) is None
    await env.close()


def test_a_limit_of_an_envs_own_has_its_name_and_a_note():
    ended = Truncated("turns", "asked for 9 tools")
    assert (ended.limit, ended.note, str(ended)) == ("turns", "asked for 9 tools", ended.note)
