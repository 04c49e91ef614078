from functools import partial
from random import Random

import pytest

from streamrl.extensions.advisor.engine import Answered, measure_engine
from streamrl.extensions.advisor.facts import Engine, Load, Request
from streamrl.extensions.advisor.simulated_server import Answer, SimulatedServer
from streamrl.extensions.advisor.timeline import Timeline

TRUE = Engine(0.05, 0.02, 0.001)


def recorded(slots: int, per_s: float) -> tuple[list[Request], list[tuple[float, float]]]:
    """The requests that a server of this speed has answered, and when it was paused."""
    random = Random(0)
    timeline = Timeline()
    server = SimulatedServer(timeline, TRUE, slots, lambda: Load(0.0, 0.5))
    requests = list[Request]()

    def ask(tokens: list[int]) -> None:
        begun = timeline.now_s

        def done(_: list[Answer]) -> None:
            requests.append(Request(begun, timeline.now_s, tuple(tokens)))

        server.ask(tokens, done)

    at_s = 0.0
    for _ in range(600):
        at_s += random.expovariate(per_s)
        tokens = [random.randint(5, 60) for _ in range(random.randint(1, 8))]
        timeline.after(at_s, partial(ask, tokens))
    pauses = [(5.0 * version, 5.0 * version + 0.5) for version in range(1, 20)]
    for version, (begin, _) in enumerate(pauses, 1):
        timeline.after(begin, partial(server.on_version, version))
    timeline.run(lambda: False)
    return requests, pauses


def test_the_speed_of_a_server_is_found_in_its_requests():
    requests, pauses = recorded(slots=1_000, per_s=3.0)
    found = measure_engine([Answered(requests, pauses)], slots=1_000)
    for sequences in (1, 10, 30):
        assert found.step_s(sequences) == pytest.approx(TRUE.step_s(sequences), rel=0.05)


def test_of_a_server_that_is_always_full_the_time_of_a_token_is_that_of_a_full_one():
    requests, pauses = recorded(slots=4, per_s=50.0)
    found = measure_engine([Answered(requests, pauses)], slots=4)
    assert found.step_s(4) == pytest.approx(TRUE.step_s(4), rel=0.05)


def test_requests_that_are_all_alike_have_no_time_below_0():
    requests = [Request(float(i), i + 0.5, (10,)) for i in range(40)]
    found = measure_engine([Answered(requests, [])], slots=8)
    assert min(found.overhead_s, found.token_s, found.sequence_s) >= 0
    assert found.overhead_s + 10 * found.step_s(1) == pytest.approx(0.5)


def test_a_single_request_is_enough():
    found = measure_engine([Answered([Request(1.0, 2.0, (10, 5))], [])], slots=8)
    assert found.step_s(1) > 0
