"""What a fork inherits of versions, problems and visits."""

from __future__ import annotations

import pytest

from streamrl.config.run_file import with_overrides
from streamrl.config.sections.operation import Fork
from streamrl.extensions.recordings.fork import child_run_file
from streamrl.extensions.recordings.fork_topics import copy_inherited
from streamrl.stream.log.memory import MemoryLog
from streamrl.stream.log.protocol import Output
from streamrl.stream.processor.journal import last_record
from streamrl.stream.records import EnvProgress, PolicyVersion, Rollout, Visit
from tests.support.data_path import RUN, TOPICS, announce, publish, published
from tests.support.forks import ENVS, VERSION, batches, fork, recorded_run


@pytest.fixture(scope="module")
def parent() -> MemoryLog:
    return recorded_run()


def test_versions_up_to_the_first_are_inherited_and_that_one_lies_in_the_forks_store(
    parent: MemoryLog,
):
    _, log = fork(parent, with_rollouts=False)
    versions = published(log, "policy-versions", PolicyVersion)
    assert [(version.version, version.uri) for version in versions] == [
        (0, "file:///nowhere"),
        (1, "file:///nowhere"),
        (2, "file:///new/v000002"),
    ]
    assert published(log, "rollouts.copy", Rollout) == [] and batches(log) == []


def test_envs_pose_the_next_problems_and_are_credited_with_the_groups_they_have(parent: MemoryLog):
    result, log = fork(parent)
    progress = {env: last_record(log, f"journal.env-{env}-0", EnvProgress) for env in RUN.envs}
    assert all(
        p is not None and p.next_problem == 40 and p.open_problems == [] for p in progress.values()
    )
    assert sum(p.published_groups for p in progress.values() if p) == result.groups
    assert all(p is not None and p.published_groups > 0 for p in progress.values())


def test_what_is_known_of_problems_is_inherited_as_far_as_it_was_known_by_then():
    """Two of three visits are by versions up to the fork's; and none where the problems are
    others.
    """
    filtered = with_overrides(
        RUN, ["envs.copy.pass_rate={between: [0, 0.9]}", "envs.add.pass_rate={between: [0, 0.9]}"]
    )
    log = MemoryLog({**TOPICS, **ENVS, "visits.copy": 1})
    announce(log, 0)
    visits = [
        Visit(environment="copy", problem=i, epoch=0, passed=2, rollouts=2, policy_version=version)
        for i, version in enumerate((0, 2, 3))
    ]
    publish(log, *(Output("visits.copy", f"{visit.problem}-0", visit) for visit in visits))
    for overrides, expected in (
        ((), visits[:2]),
        (("envs.copy.params={digits: 3}",), []),
        (("envs.copy.pass_rate=null",), []),
    ):
        run = child_run_file(filtered, "other", overrides).model_copy(
            update={"fork": Fork(run="small", version=VERSION, sha256="ab")}
        )
        new = MemoryLog({**TOPICS, **ENVS, "visits.copy": 1, "visits.add": 1})
        copy_inherited(log, new, filtered, run, "", False, time_s=1.0)
        assert published(new, "visits.copy", Visit) == expected
