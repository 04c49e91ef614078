from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from streamrl.cli.command import cli
from streamrl.extensions.recordings import commands, fork
from streamrl.extensions.recordings.fork import ForkRequest, Retrain
from streamrl.extensions.recordings.new_rewards import ScorerVersion
from tests.support.data_path import RUN


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["replay", "r", "--from", "3"], "--from needs --weights"),
        (["fork", "r", "--as", "x"], "Missing option '--at'"),
        (
            ["fork", "r", "--at", "3", "--as", "x", "--rollouts", "--rewards", "a@1"],
            "--rewards takes all rollouts along",
        ),
        (
            ["fork", "r", "--at", "3", "--as", "x", "--rollouts", "--retrain"],
            "--retrain takes all rollouts along",
        ),
        (["rescore", "r"], "Missing option '--reward'"),
        (["fork", "r", "--at", "3"], "Missing option '--as'"),
        (["dead-letters", "retry", "r"], "Name what to put back"),
    ],
)
def test_options_that_need_each_other(arguments: list[str], says: str):
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 2 and says in result.stderr


@pytest.mark.parametrize(
    ("options", "rollouts"),
    [
        ([], "none"),
        (["--rollouts"], "untrained"),
        (["--retrain"], Retrain()),
        (["--rewards", "a@1,b@2"], Retrain((ScorerVersion("a", "1"), ScorerVersion("b", "2")))),
        (["--retrain", "--rewards", "a@1"], Retrain((ScorerVersion("a", "1"),))),
    ],
)
def test_a_fork_is_asked_for_with_some_of_the_rollouts(
    options: list[str], rollouts: Any, monkeypatch: pytest.MonkeyPatch
):
    requests: list[ForkRequest] = []
    monkeypatch.setattr(commands, "load_run", lambda run: RUN)
    monkeypatch.setattr(fork, "fork_command", lambda request, *_: requests.append(request))
    command = ["fork", "small", "--at", "3", "--as", "x", "--set", "buffer.max_age=1", *options]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 0, result.output
    assert requests == [ForkRequest(RUN, "x", 3, ("buffer.max_age=1",), rollouts)]
