"""The section of the run file that agents, and the servers of envs, find the gateway by."""

from __future__ import annotations

from pydantic import AwareDatetime, Field

from streamrl.config.sections.section import Section


class Gateway(Section):
    """The servers through which agents sample: `streamrl gateway`."""

    replicas: int = Field(default=1, ge=1)  # Number of processes.
    host: str = "127.0.0.1"  # Address that replicas listen on.
    # Port of replica 0; the others have the next ones. 0: any free port, which is in their logs.
    port: int = Field(default=8700, ge=0, le=65535)
    # Address under which agents reach the gateway, such as https://gateway.example. Empty: the one
    # that they called, which is right without a proxy.
    url: str = ""
    # Signs all keys and opens nothing itself: env:NAME, a variable of at least 32 characters. It is
    # needed where `host` is not loopback. Empty: a secret in the run's directory.
    signing_secret: str = ""
    # Refuses keys of an env that were made before a time, such as {my-agent: 2026-01-31T12:00:00Z}.
    revoked_before: dict[str, AwareDatetime] = Field(default={})
