"""A server in a simulation, against queues whose answer is known in closed form."""

from functools import partial
from random import Random
from statistics import fmean

import pytest

from streamrl.extensions.advisor.facts import Engine, Load
from streamrl.extensions.advisor.simulated_server import Answer, SimulatedServer
from streamrl.extensions.advisor.timeline import Timeline

SLOW_LOAD = Load(delay_s=1.0, pause_s=2.0)


def server_of(
    timeline: Timeline, engine: Engine, slots: int = 64, load: Load = SLOW_LOAD
) -> SimulatedServer:
    return SimulatedServer(timeline, engine, slots, lambda: load)


def answered(
    requests: list[tuple[float, list[int]]], engine: Engine, slots: int = 64
) -> list[float]:
    """When each of the requests, of which the time and the lengths are given, is answered."""
    timeline = Timeline()
    server = server_of(timeline, engine, slots)
    times = dict[int, float]()
    for index, (at_s, tokens) in enumerate(requests):

        def done(_: list[Answer], index: int = index) -> None:
            times[index] = timeline.now_s

        timeline.after(at_s, partial(server.ask, tokens, done))
    timeline.run(lambda: False)
    return [times[index] for index in range(len(requests))]


def test_a_request_takes_its_overhead_and_a_step_for_each_token_of_its_longest_answer():
    # 10 steps of two sequences, then 20 of one
    times = answered([(1.0, [10, 30])], Engine(0.5, 0.1, 0.01))
    assert times == pytest.approx([1.0 + 0.5 + 10 * 0.12 + 20 * 0.11])


def test_sequences_beyond_the_slots_wait_in_the_order_in_which_they_came():
    times = answered([(0.0, [10]), (0.0, [10]), (0.0, [5])], Engine(0.0, 0.1, 0.0), slots=1)
    assert times == pytest.approx([1.0, 2.0, 2.5])


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_a_shared_server_has_the_mean_time_of_a_processor_sharing_queue(load: float):
    """M/G/1-PS: service / (1 - load), whatever the lengths are."""
    random = Random(1)
    requests = list[tuple[float, list[int]]]()
    at_s = 0.0
    for _ in range(20_000):
        at_s += random.expovariate(load)  # a mean service of 1 s
        requests.append((at_s, [random.choice([50, 150])]))
    times = answered(requests, Engine(0.0, 0.0, 0.01), slots=10_000)
    mean_s = fmean(end - begin for end, (begin, _) in zip(times, requests, strict=True))
    assert mean_s == pytest.approx(1 / (1 - load), rel=0.06)


def test_a_server_of_one_slot_has_the_mean_wait_of_a_queue_with_fixed_service():
    """M/D/1: load / (2 (1 - load)) of the service."""
    random = Random(2)
    load = 0.7
    requests = list[tuple[float, list[int]]]()
    at_s = 0.0
    for _ in range(20_000):
        at_s += random.expovariate(load)
        requests.append((at_s, [100]))
    times = answered(requests, Engine(0.0, 0.01, 0.0), slots=1)
    wait_s = fmean(end - begin - 1 for end, (begin, _) in zip(times, requests, strict=True))
    assert wait_s == pytest.approx(load / (2 * (1 - load)), rel=0.06)


def test_a_load_pauses_what_runs_and_its_tokens_are_of_the_new_version():
    timeline = Timeline()
    server = server_of(timeline, Engine(0.0, 0.1, 0.0))
    seen = list[tuple[float, int, int]]()

    def done(answers: list[Answer]) -> None:
        seen.extend((timeline.now_s, answer.oldest, answer.newest) for answer in answers)

    server.ask([20], done)  # 1 s of version 0, a pause of 2 s, 1 s of version 1
    timeline.after(1.5, partial(server.ask, [5], done))  # it begins after the pause
    server.on_version(1)
    timeline.run(lambda: False)
    assert seen == [(3.5, 1, 1), (4.0, 0, 1)]
    assert server.asked_s == pytest.approx(2.0)


def test_a_version_that_is_announced_during_a_load_is_loaded_next():
    timeline = Timeline()
    server = server_of(timeline, Engine(0.0, 0.1, 0.0))
    server.on_version(1)
    for version, at_s in ((2, 2.0), (3, 2.5)):
        timeline.after(at_s, partial(server.on_version, version))
    timeline.run(lambda: False)
    assert (server.version, timeline.now_s) == (3, 6.0)
