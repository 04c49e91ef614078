"""Policy versions, and the servers that serve them."""

from __future__ import annotations

import math
from typing import Literal

from streamrl.stream.records.fields import (
    Array,
    Name,
    Record,
    check_floats,
    check_token_ids,
    check_version,
)


class Probe(Record, frozen=True, kw_only=True):
    """A short text and the learner's own logprobs of it: what a server must answer too, or it does
    not serve this version.
    """

    tokens: Array  # (n,) unsigned
    logprobs: Array  # (n - 1,) float32: of tokens[1:], each given those before it

    def __post_init__(self) -> None:
        check_token_ids("probe: tokens", self.tokens)
        if len(self.tokens) < 2:
            raise ValueError(f"probe: it takes two tokens or more, not {len(self.tokens)}")
        check_floats("probe: logprobs", self.logprobs, len(self.tokens) - 1)


class AdapterCheck(Record, frozen=True, kw_only=True):
    """A random adapter of a base. A server that has loaded it and answers its probe applies
    adapters.
    """

    uri: str  # a directory in PEFT's layout
    size_bytes: int
    sha256: str  # of the manifest
    probe: Probe


class AdapterBase(Record, frozen=True, kw_only=True):
    """The base model of an adapter. It is the same for all versions of a learner."""

    uri: str  # a directory in Hugging Face layout
    size_bytes: int
    sha256: str  # of the manifest
    check: AdapterCheck


class PolicyVersion(Record, frozen=True, kw_only=True):
    """Version `version` exists: where its weights are and how to tell that they are whole. Version
    0 is the initial model (`batch` None).

    A learner that computes an announced version again may get other bits (another device, a changed
    setting). It announces the version again under the next `lineage`; of several records of one
    version, the one with the highest lineage is valid.
    """

    learner: Name
    version: int
    # a directory in Hugging Face layout, or of an adapter in PEFT's
    uri: str
    size_bytes: int
    sha256: str  # of the manifest (weights/manifest.py), which lists the hash of every file
    batch: int | None = None  # the batch it was trained on
    probe: Probe | None = None
    time_s: float = 0.0
    vocab_size: int = 0  # token ids are below it; 0: not stated
    # nothing was trained on the batch (its loss or gradient was not finite): the weights are those
    # of the version before
    skipped: bool = False
    lineage: int = 0  # how often this version has been computed again with another result
    replaces: str = ""  # sha256 of the version's lineage before this one
    base: AdapterBase | None = None  # of a version that is an adapter

    def __post_init__(self) -> None:
        check_version("policy version", self.version)
        check_version(f"policy version {self.version}: lineage", self.lineage)
        if not math.isfinite(self.time_s):
            raise ValueError(f"policy version {self.version}: its time is not finite")


class Server(Record, frozen=True, kw_only=True):
    """One inference server, as it is now; a null record removes it."""

    server_id: Name
    url: str
    pool: str = "generation"
    model: str = "policy"
    version: int = -1  # -1: serves nothing yet, or, in state `ready`, a model of its pool's own
    state: Literal["starting", "ready", "error"] = "starting"
    error: str = ""
    in_flight: int = 0  # requests
    heartbeat_s: float = 0.0  # time of the last sign of life
    max_model_len: int = 0  # tokens
    mismatch_max_abs: float = 0.0  # of the last probe
    mismatch_tokens: int = 0  # compared by the last probe
    # in state `error` because of its probe: asked only where no other server of the pool is ready
    doubted: bool = False
    seed: int = -1  # of its random numbers, drawn at each start; -1: none has been drawn yet

    def __post_init__(self) -> None:
        if self.version != -1:
            check_version(f"server {self.server_id!r}: version", self.version)
        if not math.isfinite(self.heartbeat_s):
            raise ValueError(f"server {self.server_id!r}: its heartbeat is not finite")
