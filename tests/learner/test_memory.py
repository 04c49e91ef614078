"""The learner's memory, from programs that are compiled and never run."""

from __future__ import annotations

from typing import Any

from bench.budgets import MODELS
from streamrl.config.run_file import RunFile, parse
from streamrl.learner.memory import learner_memory

EMBEDDING_GIB = 151_936 * 64 * 4 / (1 << 30)  # of words by width, in float32
LOGITS_GIB = 128 * 151_936 * 4 / (1 << 30)  # of a chunk


def run_of(**learner: Any) -> RunFile:
    return parse(
        {
            "run": "r",
            "envs": {"copy-digits": {}},
            "batcher": {"total_token_budget": 2_048, "max_seq_len": 1_024, "row_count": 2},
            "model": {"path": "me/tiny", "max_seq_len": 1_024},
            "learner": {"logprob_chunk": 128, "micro_batch_rows": 1, **learner},
        }
    )


def test_the_learner_holds_its_state_its_gradients_and_the_logits_of_a_chunk():
    """Weights, two moments, gradients and their sum, which are nearly all the embedding. The logits
    of a whole row would be eight times those of a chunk.
    """
    held = learner_memory(run_of(), MODELS["tiny"])
    assert 4 * EMBEDDING_GIB < held < 8 * EMBEDDING_GIB + 5 * LOGITS_GIB
