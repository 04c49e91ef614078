import pytest

from streamrl.config.run_file import parse
from streamrl.run.monitoring.frame import Frame
from streamrl.run.monitoring.run_view import new_view
from tests.run.monitoring.events import running_frame


def test_a_run_before_its_first_server_has_all_its_time_left():
    frame = running_frame()
    assert frame.running_s == 30.0 and frame.left_s == 570.0
    before = Frame(frame.run, new_view(frame.run, 100.0), frame.time_s)
    assert before.running_s is None and before.left_s == 600.0
    frame.view.active_before_s = 500.0  # of earlier sessions
    assert frame.running_s == 30.0 and frame.left_s == 70.0
    unlimited = Frame(parse({"run": "r", "envs": {"copy": {}}}), before.view, before.time_s)
    assert unlimited.left_s is None


def test_the_reward_is_over_the_batches_of_the_target():
    frame = running_frame()
    assert frame.reward("copy") == pytest.approx(0.3) and frame.reward("unknown") is None
