"""The runs whose steps/s are measured and predicted."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from streamrl.config.run_file import RunFile, parse
from tests.advise.stub_loop import HEARTBEAT_S, HOST, MAX_TOKENS, SLOTS, Speeds

BATCH_TOKENS = 3_200  # about 56 rollouts


@dataclass(frozen=True)
class Setting:
    """A run, and the run from whose records it is predicted as well."""

    name: str
    base: str
    speeds: Speeds
    servers: int = 1
    max_age: int = 1
    group_size: int = 8
    envs: dict[str, float] = field(default_factory=lambda: {"copy-digits": 1.0})

    def run(self) -> RunFile:
        settings = {
            "run": self.name,
            "envs": {
                env: {
                    "host": HOST,
                    "fraction": fraction,
                    "max_tokens": MAX_TOKENS,
                    "params": {"digits" if env == "copy-digits" else "numbers": 12},
                }
                for env, fraction in self.envs.items()
            },
            "buffer": {"group_size": self.group_size, "max_age": self.max_age},
            "batcher": {
                "total_token_budget": BATCH_TOKENS,
                "max_seq_len": 512,
                "lookahead": 1,
            },
            "model": {"max_seq_len": 512},
            "inference": {
                "replicas": self.servers,
                "max_num_seqs": SLOTS,
                "heartbeat_s": HEARTBEAT_S,
            },
        }
        return parse(settings)

    @property
    def overrides(self) -> list[str]:
        """What makes this run of its base."""
        return [
            f"inference.replicas={self.servers}",
            f"buffer.max_age={self.max_age}",
            f"buffer.group_size={self.group_size}",
        ]


def settings() -> list[Setting]:
    """All runs. Those of a base have its lengths and differ in servers, age, groups or learner."""
    sampling = Setting("even", "even", Speeds(train_s=1.2, spread=0.25))
    learning = Setting("wide", "wide", Speeds(train_s=3.2, spread=0.7), servers=2, max_age=2)
    mixed = Setting(
        "two-envs",
        "two-envs",
        Speeds(train_s=1.6, spread=0.5),
        servers=2,
        max_age=2,
        envs={"copy-digits": 0.5, "add-digits": 0.5},
    )

    def of(base: Setting, name: str, **changes: Any) -> Setting:
        return replace(base, name=f"{base.name}-{name}", **changes)

    faster = replace(learning.speeds, train_s=learning.speeds.train_s / 2)
    return [
        sampling,
        of(sampling, "servers-2", servers=2),
        of(sampling, "servers-3", servers=3),
        of(sampling, "age-4", max_age=4),
        of(sampling, "group-4", group_size=4),
        of(sampling, "group-16", group_size=16),
        of(sampling, "servers-3-age-4", servers=3, max_age=4),
        learning,
        of(learning, "servers-1", servers=1),
        of(learning, "age-4", max_age=4),
        of(learning, "group-16", group_size=16),
        of(learning, "learner-2x", speeds=faster),
        mixed,
        of(mixed, "servers-1", servers=1),
        of(mixed, "age-1-group-4", max_age=1, group_size=4),
    ]
