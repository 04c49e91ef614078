"""streamrl: asynchronous RL of language models over a log.

A token travels envs -> buffer -> batcher -> learner -> weights -> inference -> envs. The rooms
stand on four floors, and no room imports from one that stands after it:

1. `records/`, `text.py`, `errors.py`: what lies in the log, and how a command ends. `system/`:
   processes, signals, memory and files of this machine.
2. `config/` (what a run is), `log/` (bytes in order), `processor/` (exactly once), `local_kafka/`
   (a Kafka without Docker), `monitoring/` (what a run says of itself).
3. The loop, a room a role: `weights/`, `inference/`, `sessions/` (the model calls of an agent as a
   tree), `envs/`, `gateway/` and `assembler/` (agents that sample over HTTP), `buffer/`,
   `batcher/`, `learner/`, `scorer/`, `evaluator/`.
4. `orchestrator/` starts and watches them, `recordings/` runs a recorded run again, `dashboard/`
   shows one in a browser, `cli/` is the command.
"""

__version__ = "0.1.0"
