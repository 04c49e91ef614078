from pathlib import Path

from bench.learner import a_batch, measure, real_tokens, run_file
from streamrl.stream.log.memory import MemoryLog


def test_both_train_the_same_and_take_turns(tmp_path: Path):
    run = run_file(tmp_path, rows=4, row=256, tiny=(1, 32))
    found = measure(
        run, MemoryLog({"batches": 1, "policy-versions": 1, "metrics": 1}), pairs=3, turn=2
    )
    assert (
        found["loss_off_max"] < 1e-5
        and found["weights_off_max"] < 1e-5 < 1e-4 < found["weights_moved_max"]
    )
    assert found["ratio"]["min"] <= found["ratio"]["median"] <= found["ratio"]["max"]
    assert found["ms"]["step_s"]["median"] < found["ms"]["learner_s"]["median"]
    assert found["ratio_of_turns"]["min"] > 0
    assert found["ms"]["publish_wait_s"]["max"] <= found["ms"]["publish_s"]["max"]


def test_a_batch_is_nearly_full(tmp_path: Path):
    run = run_file(tmp_path, rows=8, row=256, tiny=(1, 32))
    batch = a_batch(run, 3)
    assert batch.number == 3 and 0.6 * 8 * 256 < real_tokens(batch) <= 8 * 256
    assert (batch.advantages > 0).any() and (batch.advantages < 0).any()
