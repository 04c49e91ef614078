"""The order of a swap, and what is made of vLLM's answers."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from streamrl.inference.servers.engine import Engine, Load
from streamrl.inference.servers.inside_vllm.streamrl_probing import probe_name
from streamrl.system.errors import InferenceError
from tests.inference.stub import Stub


@pytest.fixture
def stub() -> Iterator[Stub]:
    with Stub("a") as server:
        yield server


def test_a_swap_empties_the_cache_between_the_new_weights_and_the_next_token(stub: Stub):
    timing = Engine(stub.url).swap(Path("/weights/7"), 7)
    assert stub.asked == [
        ("/streamrl/pause", None),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/weights/7"}}),
        ("/update_weight_version", {"new_version": "7"}),
        ("/reset_prefix_cache?reset_running_requests=true", None),
        ("/resume", None),
    ]
    assert 0 < timing.pause_s + timing.reload_s <= timing.total_s


def test_a_probe_is_answered_before_vllm_resumes(stub: Stub):
    swap = Engine(stub.url).swap(Path("/weights/7"), 7, probe=np.array([1, 4, 8]))
    assert [path for path, _ in stub.asked[-3:]] == [
        "/streamrl/admit-probes",
        "/inference/v1/generate",
        "/resume",
    ]
    np.testing.assert_array_equal(swap.probed, [-0.5, -1.0])


def test_a_vllm_that_computes_nothing_while_it_is_paused_resumes_without_a_probe(stub: Stub):
    stub.admits_probes = False
    swap = Engine(stub.url).swap(Path("/weights/7"), 7, probe=np.array([1, 4, 8]))
    assert [path for path, _ in stub.asked[-2:]] == ["/streamrl/admit-probes", "/resume"]
    assert swap.probed is None


def test_the_ids_of_probes_are_made_from_the_key_of_the_agent(stub: Stub):
    stub.key = "the agent's"
    Engine(stub.url, "the agent's").probe(np.array([1, 4]))
    Engine(stub.url, "the agent's").probe(np.array([1, 4]))
    first, second = (body["request_id"] for _, body in stub.asked)
    name = probe_name("the agent's")
    assert first.startswith(name) and second.startswith(name) and first != second
    assert "the agent" not in name and name != probe_name("another")


def test_a_cache_that_is_not_given_up_is_an_error_and_nothing_resumes(stub: Stub):
    stub.reset_succeeds = False
    with pytest.raises(InferenceError, match="did not give up the KV cache"):
        Engine(stub.url).swap(Path("/weights/7"), 7)
    assert "/resume" not in [path for path, _ in stub.asked]


def test_a_refused_reload_ends_the_swap(stub: Stub):
    stub.mode = "broken"
    with pytest.raises(
        InferenceError, match="refuses /streamrl/pause.*500.*EngineCore encountered an issue"
    ):
        Engine(stub.url).swap(Path("/weights/7"), 7)
    assert len(stub.asked) == 1


def test_answers(stub: Stub):
    engine = Engine(stub.url)
    assert engine.read_load() == Load(
        in_flight=7,
        generated_tokens=77,
        spent={"asked_s": 4.5, "paused_s": 0.5, "idle_s": 1.0},
        requests={"own": 3, "second": 1},
        answers={"own": 24, "second": 8},
    )
    assert engine.version() == 3
    stub.version = "default"
    assert engine.version() == -1
    probed = engine.probe(np.array([1, 4, 8], np.uint16))
    assert probed.dtype == np.float32
    np.testing.assert_array_equal(probed, [-0.5, -1.0])
    assert stub.asked[-1][1]["sampling_params"]["skip_reading_prefix_cache"] is True


def test_a_server_that_is_gone_is_an_error():
    with Stub("a") as gone:
        url = gone.url
    with pytest.raises(InferenceError, match="does not answer /weight_info"):
        Engine(url).version()


def test_a_server_with_a_key_obeys_an_engine_that_has_it():
    with Stub("a", key="a-key-of-the-run") as stub:
        Engine(stub.url, "a-key-of-the-run").swap(Path("/weights/7"), 7)
        assert len(stub.asked) == 5
        with pytest.raises(
            InferenceError, match="refuses /streamrl/pause.*: 401 .*API key"
        ) as caught:
            Engine(stub.url, "hunter2").swap(Path("/weights/8"), 8)
        assert len(stub.asked) == 5 and "hunter2" not in str(caught.value)


def test_vllms_own_metrics_are_handed_on_as_they_are(stub: Stub):
    assert Engine(stub.url).metrics().startswith(b'vllm:num_requests_running{engine="0"} 5.0')
