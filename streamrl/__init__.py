"""streamrl: asynchronous RL of language models over a log.

A token travels envs -> buffer -> batcher -> learner -> weights -> inference -> envs. Imports have
another order: no room imports from one further down this list (`tests/test_layers.py`).

1. `system/`: processes, files, errors and text of this machine. `config/`: what a run is.
2. `stream/`: `records/`, the `log/` that holds them, the `processor/` that reads and writes it
   exactly once, and a `local_kafka/` without Docker.
3. The loop, a room a station: `weights/`, `inference/` (its clients and servers), `envs/` (with
   `sessions/`, the model calls of an agent as a tree), `buffer/`, `batcher/`, `learner/`.
4. `run/`: the `orchestrator/` starts and watches the parts, `monitoring/` shows how they are doing.
5. `cli/` is the command.
6. `extensions/`, which nothing above knows: `gateway/` and `assembler/` (agents that sample over
   HTTP), `evaluator/`, `scorer/`, `recordings/` (runs a recorded run again), `advisor/`
   (simulates a run under other settings), `dashboard/`.
"""

__version__ = "0.1.0"
