"""Settings of servers, their pools and evaluations that cannot work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from streamrl.config.choices import NAME
from streamrl.config.topology import GENERATION
from streamrl.system.text import nearest_or_all

if TYPE_CHECKING:
    from streamrl.config.run_file import RunFile
    from streamrl.config.sections.serving import Inference


def pool_problems(run: RunFile) -> Iterator[str]:
    for pool in run.inference.pools:
        if pool == GENERATION:
            yield f"inference.pools.{pool}: the servers of pool {GENERATION} are inference.replicas"
        if not NAME.fullmatch(pool):
            yield f"inference.pools.{pool}: not a name of lowercase letters, digits and '-'"
    for name, env in run.envs.items():
        if env.pool not in run.inference.sizes:
            yield (
                f"envs.{name}.pool: inference.pools has no {env.pool!r};"
                f" {nearest_or_all(env.pool, run.inference.sizes)}"
            )
        if run.inference.own_model(env.pool):
            yield (
                f"envs.{name}.pool: {env.pool} serves its own model"
                f" (inference.pools.{env.pool}.model), and the policy is not trained on what"
                " another model answers; choose another pool"
            )
        for reward, judge in env.rewards.items():
            pool = judge.params.get("pool", "") if judge.kind == "judge" else ""
            if pool and pool not in run.inference.sizes:
                yield (
                    f"envs.{name}.rewards.{reward}.params.pool: inference.pools has no {pool!r};"
                    f" {nearest_or_all(pool, run.inference.sizes)}"
                )


def guest_problems(run: RunFile) -> Iterator[str]:
    guests = run.inference.also_serves
    for host in run.inference.served_by:
        if not NAME.fullmatch(host):
            yield f"inference.served_by: {host!r} is not the name of a run"
        if host == run.run:
            yield f"inference.served_by: {host} is this run, whose servers serve it anyway"
    for guest in guests:
        if not NAME.fullmatch(guest):
            yield f"inference.also_serves: {guest!r} is not the name of a run"
        if guest == run.run:
            yield f"inference.also_serves: {guest} is this run, which its servers serve anyway"
    yield from _key_problems(run.inference)
    if guests and not run.learner.lora:
        yield (
            "inference.also_serves: a server has adapters of several runs, and one whole model; set"
            " learner.lora, or leave also_serves out"
        )


def _key_problems(inference: Inference) -> Iterator[str]:
    """Guests that the servers would not answer, or could not tell from another run."""
    users = {inference.api_key: "inference.api_key"}
    for guest, own in inference.also_serves.items():
        setting = f"inference.also_serves.{guest}.api_key"
        if inference.api_key and not own.api_key:
            yield (
                f"{setting} is not set: servers with a key answer no run without one; give the"
                " guest its own, which is inference.api_key of its run file"
            )
        elif own.api_key and not inference.api_key:
            yield (
                f"{setting} is set, and inference.api_key is not, so the servers answer everybody;"
                " set both"
            )
        elif own.api_key in users and own.api_key:
            yield (
                f"{setting} is {own.api_key}, as is {users[own.api_key]}: servers tell runs apart"
                " by their keys; give each its own"
            )
        users[own.api_key] = setting


def eval_problems(run: RunFile) -> Iterator[str]:
    for name, own in run.eval.envs.items():
        if not NAME.fullmatch(name):
            yield f"eval.envs.{name}: not a name of lowercase letters, digits and '-'"
        if (own.env or name) not in run.envs:
            yield (
                f"eval.envs.{name}: {own.env or name!r} is not one of the envs:"
                f" {', '.join(run.envs)}; name one with `env`"
            )
        if not own.k or max(own.k) > own.samples:
            yield (
                f"eval.envs.{name}: k is {own.k}, each at most samples, {own.samples}, and one at"
                " least"
            )
