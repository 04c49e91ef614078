"""RlExamples laid out by hand: a list of rows, each a list of segments. On purpose not by the
batcher's code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from streamrl.learner.model.examples import RlExample


class Segment(NamedTuple):
    tokens: Sequence[int]
    prompt: int  # tokens that nobody sampled
    advantage: float = 0.0
    logprobs: Sequence[float] = ()  # of the sampled tokens, under the policy that sampled them
    temperature: float = 1.0


def example(rows: Sequence[Sequence[Segment]], max_seq_len: int) -> RlExample:
    shape = (len(rows), max_seq_len)
    ints = {
        name: np.zeros(shape, np.int32) for name in ("input_ids", "segment_ids", "position_ids")
    }
    floats = {
        name: np.zeros(shape, np.float32)
        for name in ("loss_mask", "advantages", "policy_logprobs", "reference_logprobs")
    }
    made = RlExample(**ints, **floats, temperatures=np.ones(shape, np.float32))
    for row, segments in enumerate(rows):
        start = 0
        for number, segment in enumerate(segments, 1):
            end = start + len(segment.tokens)
            sampled = slice(start + segment.prompt - 1, start + len(segment.tokens) - 1)
            made.input_ids[row, start:end] = segment.tokens
            made.segment_ids[row, start:end] = number
            made.position_ids[row, start:end] = range(end - start)
            made.temperatures[row, start:end] = segment.temperature
            made.loss_mask[row, sampled] = 1
            made.advantages[row, sampled] = segment.advantage
            made.policy_logprobs[row, sampled] = segment.logprobs or 0
            start = end
    return made
