"""Settings of where a run is, who reaches it and which devices it has, that cannot work."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from streamrl.config import topology
from streamrl.config.addresses import cleartext_problem, is_loopback
from streamrl.config.secrets import is_secret, misplaced_references, plaintext_secrets
from streamrl.system.text import nearest_or_all

if TYPE_CHECKING:
    from streamrl.config.run_file import RunFile

# Settings of librdkafka that a run file may have: how a cluster is reached, by whom, in what sizes.
# None of them loads a library or starts a program.
_KAFKA = re.compile(
    r"(bootstrap|socket|broker|reconnect|retry|retries|metadata|topic\.metadata|api\.version|client|security|connections|request|fetch|queued|queue|queuing"
    r"|linger|batch|compression|message|receive|delivery|statistics|max|session|heartbeat|transaction|check|isolation|enable\.ssl)(\.[a-z_.0-9]+)?"
    r"|metadata\.broker\.list|log_level|debug|sasl\.(mechanisms?|username|password|oauthbearer\.[a-z._]+)"
    r"|sasl\.kerberos\.(service\.name|principal|keytab)|ssl\.(?!engine|providers)[a-z_.0-9]+"
)

# The name of a machine becomes that of a job, in scripts and commands of an engine.
_MACHINE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def placement_problems(run: RunFile) -> Iterator[str]:
    by_role: dict[str, list[str]] = {}
    for part in topology.parts(run):
        by_role.setdefault(part.role, []).append(part.name)
    names = [*by_role, *(name for members in by_role.values() for name in members)]
    for role in topology.started_roles() if run.placement else ():
        if not role.devices:
            continue
        missing = sorted({*by_role.get(role.name, ())} - {*run.placement})
        if missing and role.name not in run.placement:
            yield (
                f"placement: {missing[0]} is not named and would see no GPU; add {role.name}:"
                " {devices: [...]}, with none if that is meant"
            )
    for name, placement in run.placement.items():
        if name not in names:
            yield f"placement.{name}: no role or part of this run; {nearest_or_all(name, names)}"
            continue
        for node in placement.nodes:
            if not _MACHINE.fullmatch(node):
                yield (
                    f"placement.{name}.nodes: {node!r} is not a name of letters, digits, '.', '_'"
                    " and '-'"
                )
        if len(set(placement.devices)) != len(placement.devices):
            yield f"placement.{name}.devices: {placement.devices} has a device twice"
        sharing = topology.sharing_parts(run, name) or [name]
        nodes = len(placement.nodes) or 1
        if len(sharing) % nodes:
            yield (
                f"placement.{name}.nodes: {', '.join(sharing)} cannot be divided among {nodes}"
                " machines; name the parts"
            )
            continue
        on_node = sharing[: len(sharing) // nodes]
        if len(placement.devices) % len(on_node):
            yield (
                f"placement.{name}.devices: {len(placement.devices)} devices cannot be divided"
                f" among {', '.join(on_node)}; give a multiple of {len(on_node)}, or name the parts"
            )
    yield from _division_problems(run)
    yield from _memory_problems(run)


def _memory_problems(run: RunFile) -> Iterator[str]:
    """GPUs of which several parts reserve more memory than there is."""
    for device, parts in topology.reserved_memory(run).items():
        total = sum(parts.values())
        if len(parts) > 1 and total > 1 + 1e-9:
            reserved = ", ".join(f"{name} {share:g}" for name, share in parts.items())
            jax = " or ".join(
                role.name for role in topology.started_roles() if role.devices == "jax"
            )
            yield (
                f"placement: parts reserve {total:g} of the memory of device {device}"
                f" ({reserved}); set memory_fraction in placement.{jax}, and"
                " gpu_memory_utilization in inference.engine, so that the sum is at most 1"
            )


def _division_problems(run: RunFile) -> Iterator[str]:
    """Servers that have fewer devices than their model is divided over."""
    for part in topology.parts(run):
        if not topology.is_server(part):
            continue
        devices = len(topology.devices_of(run, part))
        wanted = run.inference.of_pool(topology.pool_of(part)).tensor_parallel
        if 0 < devices < wanted:
            yield (
                f"placement: {part.name} has {devices} devices, and tensor_parallel of its pool is"
                f" {wanted}; give it more, or name it"
            )


def secret_problems(run: RunFile) -> Iterator[str]:
    settings = run.model_dump(mode="json")
    yield from plaintext_secrets(settings)
    yield from misplaced_references(settings)
    if problem := cleartext_problem(run.kafka):
        yield f"kafka.{problem}"
    for argument in run.inference.extra_args:
        option = argument.partition("=")[0]
        if option.startswith("-") and is_secret(option):
            instead = (
                "set inference.api_key"
                if "api" in option
                else "set the variable that vLLM has for it"
            )
            yield f"inference.extra_args: {option} would show in the process list; {instead}"
    for name in run.kafka:
        if not _KAFKA.fullmatch(name):
            yield (
                f"kafka.{name} is not a setting that a run file may have: it loads programs, or has"
                " nothing to do with reaching a cluster"
            )
    if not is_loopback(run.inference.host) and not run.inference.api_key:
        yield (
            f"inference.host {run.inference.host} can be reached from other machines: set"
            " inference.api_key"
        )
