"""Where the process of each role is, below streamrl/."""

ROOMS = {
    "env": "envs",
    "host": "envs",
    "gateway": "extensions/gateway",
    "assembler": "extensions/assembler",
    "buffer": "buffer",
    "batcher": "batcher",
    "scorer": "extensions/scorer",
    "learner": "learner",
    "inference": "inference/servers",
    "evaluator": "extensions/evaluator",
    "orchestrator": "run/orchestrator",
}
