"""What the batcher reports once a second: what it holds, and which share is short."""

from __future__ import annotations

from streamrl.batcher.selection import REMAINDER
from streamrl.batcher.state import SHORTAGE_AFTER_S, BatcherConfig, BatcherState
from streamrl.stream.processor.definition import ProcessorReport


def report(config: BatcherConfig, state: BatcherState, time_s: float) -> ProcessorReport:
    """The gauges, and a warning for each share that the next batch has lacked for
    SHORTAGE_AFTER_S: by how many tokens, and for how long.
    """
    waited_s = state.clock.awake_s - state.short_since_s if state.short else 0.0
    values = {
        "batcher/blocked_s": waited_s,
        "batcher/next_batch": float(state.next_batch),
        "batcher/version": float(state.version),
    }
    for share, tokens in state.short.items():
        values[f"batcher/missing_tokens/{share or 'rest'}"] = float(tokens)
    for env, queue in state.queues.items():
        values[f"batcher/held_tokens/{env}"] = float(queue.tokens)
    warnings = list[str]()
    if waited_s >= SHORTAGE_AFTER_S:
        for share, tokens in state.short.items():
            who = "the envs together" if share == REMAINDER else share
            waits = f"batch {state.next_batch} has waited {waited_s:.0f} s for {who}"
            warnings.append(f"{waits}, {tokens} tokens short")
    return ProcessorReport(values, tuple(warnings))
