"""Settings that cannot work together. A problem is a sentence that names the key and says what to
change.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from streamrl.config import engine_settings, topology
from streamrl.config.choices import (
    NAME,
    NORMALIZED_ADVANTAGES,
    RATIO_LOSSES,
    RELATIVE_ADVANTAGES,
    SERVERS,
    meant,
    template_problem,
)
from streamrl.config.secrets import exposed, is_secret
from streamrl.config.topology import GENERATION

if TYPE_CHECKING:
    from streamrl.config.run_file import RunFile
    from streamrl.config.sections.batches import Buffer, Stage
    from streamrl.config.sections.envs import Env

# Settings of librdkafka that a run file may have: how a cluster is reached, by whom, in what sizes.
# None of them loads a library or starts a program.
_KAFKA = re.compile(
    r"(bootstrap|socket|broker|reconnect|retry|retries|metadata|topic\.metadata|api\.version|client|security|connections|request|fetch|queued|queue|queuing"
    r"|linger|batch|compression|message|receive|delivery|statistics|max|session|heartbeat|transaction|check|isolation|enable\.ssl)(\.[a-z_.0-9]+)?"
    r"|metadata\.broker\.list|log_level|debug|sasl\.(mechanisms?|username|password|oauthbearer\.[a-z._]+)"
    r"|sasl\.kerberos\.(service\.name|principal|keytab)|ssl\.(?!engine|providers)[a-z_.0-9]+"
)


def problems(run: RunFile, recorded: bool) -> Iterator[str]:
    """Every problem of this run file.

    `recorded`: the run exists already. Sizes and losses that are refused today must not keep its
    records from being read, so they are not checked.
    """
    yield from _env_problems(run)
    yield from _pool_problems(run)
    yield from _eval_problems(run)
    yield from _curriculum_problems(run)
    yield from _secret_problems(run)
    yield from _placement_problems(run)
    if not recorded:
        yield from _size_problems(run)
        yield from _loss_problems(run)
        yield from _schedule_problems(run)


def _env_problems(run: RunFile) -> Iterator[str]:
    if not run.envs:
        yield "envs: a run needs at least one env"
    for name, env in run.envs.items():
        if not NAME.fullmatch(name):
            yield f"envs.{name}: not a name of lowercase letters, digits and '-'"
        if env.top_p < 1 or env.top_k > 0:
            yield (
                f"envs.{name}: the learner reproduces temperature only; leave top_p at 1 and top_k"
                " at -1"
            )
        if problem := template_problem(env.chat_template_kwargs):
            yield f"envs.{name}.chat_template_kwargs: {problem}"
        reads_tools = env.sessions or env.kind.startswith("verifiers:")
        if env.tool_syntax != "json" and not reads_tools:
            yield (
                f"envs.{name}.tool_syntax is for envs of kind verifiers:... and for sessions;"
                " others read what the policy says themselves"
            )
        if env.python:
            yield from _server_problems(run, name, env)
        elif env.variables:
            yield f"envs.{name}.variables are for an env with a Python of its own (python)"
        elif env.sessions and env.replicas:
            yield (
                f"envs.{name}: agents make its rollouts (sessions), so no process may pose its"
                " problems; set replicas: 0"
            )
        if env.record_turns and not env.replicas:
            yield (
                f"envs.{name}.record_turns is for replicas of the run's own; with replicas: 0 it is"
                " the gateway that records model calls (sessions)"
            )
        if env.pass_rate and env.pass_rate.low > env.pass_rate.high:
            yield (
                f"envs.{name}.pass_rate: low {env.pass_rate.low} is above high {env.pass_rate.high}"
            )
    total = sum(env.fraction for env in run.envs.values())
    if total > 1 + 1e-9:
        yield f"envs: the fractions add up to {total:.4g}; at most 1 is possible"
    target = run.orchestrator.target
    if target is not None and target.env not in run.envs:
        yield (
            f"orchestrator.target.env {target.env!r} is not one of the envs: {', '.join(run.envs)}"
        )


def _server_problems(run: RunFile, name: str, env: Env) -> Iterator[str]:
    """Problems of an env whose processes run in an environment of their own."""
    if env.kind.partition(":")[0] not in SERVERS and not env.kind.endswith(".py"):
        yield (
            f"envs.{name}.kind: an env with a Python of its own is {' or '.join(SERVERS)}:NAME, or"
            f" FILE.py; {env.kind!r} is neither"
        )
    if not run.gateway.port:
        yield (
            f"envs.{name}.python: its processes have to know where the gateway is; give"
            " gateway.port a number"
        )
    if env.record_turns:
        yield f"envs.{name}.record_turns: the gateway records its model calls; leave it out"
    if env.pass_rate or env.rewards:
        yield (
            f"envs.{name}: its server chooses problems and gives rewards itself, so pass_rate and"
            " rewards do not apply; leave them out"
        )
    for evaluation, own in run.eval.envs.items():
        if (own.env or evaluation) == name:
            yield f"eval.envs.{evaluation}: {name} has a Python of its own, so it cannot be asked"


def _pool_problems(run: RunFile) -> Iterator[str]:
    for pool in run.inference.pools:
        if pool == GENERATION:
            yield f"inference.pools.{pool}: the servers of pool {GENERATION} are inference.replicas"
        if not NAME.fullmatch(pool):
            yield f"inference.pools.{pool}: not a name of lowercase letters, digits and '-'"
    for name, env in run.envs.items():
        if env.pool not in run.inference.sizes:
            yield (
                f"envs.{name}.pool: inference.pools has no {env.pool!r};"
                f" {meant(env.pool, run.inference.sizes)}"
            )
        if run.inference.own_model(env.pool):
            yield (
                f"envs.{name}.pool: {env.pool} serves a model of its own"
                f" (inference.engines.{env.pool}.model), and the policy is not trained on what"
                " another model says; choose another pool"
            )
        for reward, judge in env.rewards.items():
            pool = judge.params.get("pool", "") if judge.kind == "judge" else ""
            if pool and pool not in run.inference.sizes:
                yield (
                    f"envs.{name}.rewards.{reward}.params.pool: inference.pools has no {pool!r};"
                    f" {meant(pool, run.inference.sizes)}"
                )
    for problem in engine_settings.problems(run.inference.engine):
        yield f"inference.engine.{problem}"
    for pool, own in run.inference.engines.items():
        if pool not in run.inference.sizes:
            yield (
                f"inference.engines.{pool}: inference.pools has no {pool!r};"
                f" {meant(pool, run.inference.sizes)}"
            )
        for problem in engine_settings.problems(own.engine):
            yield f"inference.engines.{pool}.engine.{problem}"


def _eval_problems(run: RunFile) -> Iterator[str]:
    for name, own in run.eval.envs.items():
        if not NAME.fullmatch(name):
            yield f"eval.envs.{name}: not a name of lowercase letters, digits and '-'"
        if (own.env or name) not in run.envs:
            yield (
                f"eval.envs.{name}: {own.env or name!r} is not one of the envs:"
                f" {', '.join(run.envs)}; say which with `env`"
            )
        if not own.k or max(own.k) > own.samples:
            yield (
                f"eval.envs.{name}: k is {own.k}, each at most samples, {own.samples}, and one at"
                " least"
            )


def _curriculum_problems(run: RunFile) -> Iterator[str]:
    chosen = run.batcher.curriculum
    where = "batcher.curriculum"
    if chosen.kind == "stages" and not chosen.stages:
        yield f"{where}: kind is stages and there are none"
    if chosen.kind in ("none", "learnability") and chosen.stages:
        yield f"{where}: there are stages and kind is {chosen.kind}; set kind: stages"
    fixed = [name for name, env in run.envs.items() if env.fraction]
    if chosen.kind != "none" and fixed:
        yield f"envs.{fixed[0]}.fraction: {where} says the fractions; leave it out"
    if chosen.kind == "learnability" and chosen.least * len(run.envs) > 1:
        yield f"{where}.least {chosen.least} of each of {len(run.envs)} envs is more than a batch"
    for index, stage in enumerate(chosen.stages):
        yield from (
            f"{where}.stages.{index}{problem}"
            for problem in _stage_problems(run, stage, index == len(chosen.stages) - 1)
        )
    ends = [stage.until_batch for stage in chosen.stages if stage.until_batch]
    if ends != sorted(set(ends)):
        yield f"{where}.stages: until_batch has to grow from stage to stage, not {ends}"


def _stage_problems(run: RunFile, stage: Stage, last: bool) -> Iterator[str]:
    total = sum(stage.fractions.values())
    ends = bool(stage.until_batch or stage.until)
    for name in stage.fractions:
        if name not in run.envs:
            yield f".fractions: no env {name!r}; {meant(name, run.envs)}"
    if not 0 < total <= 1 + 1e-9:
        yield f".fractions add up to {total:.4g}; above 0 and at most 1 is possible"
    if ends == last:
        yield (
            ": nothing follows the last stage; leave its end out"
            if last
            else ": until_batch or until has to say when the next one begins"
        )
    if stage.until and not (
        stage.fractions.get(stage.until.env) or (stage.until.env in run.envs and total < 1 - 1e-9)
    ):
        yield (
            f".until: {stage.until.env!r} has no share of the batches of this stage, so its reward"
            " would not change"
        )


def _size_problems(run: RunFile) -> Iterator[str]:
    batcher = run.batcher
    budget = batcher.total_token_budget
    yield from _group_problems(run, "buffer", run.buffer)
    for name, env in run.envs.items():
        if env.buffer.model_dump(exclude_none=True):
            compares = bool(env.loss.policy_gradient)
            yield from _group_problems(run, f"envs.{name}.buffer", run.buffer_of(name), compares)
    compared = {
        run.buffer_of(name).advantage in NORMALIZED_ADVANTAGES
        for name, env in run.envs.items()
        if env.loss.policy_gradient
    }
    if len(compared) > 1 and not batcher.advantage:
        yield (
            "batcher.advantage: of the envs' advantages some need normalize and some none"
            f" ({', '.join(NORMALIZED_ADVANTAGES)} do); say which"
        )
    if batcher.eta >= 0 and batcher.admission == "demand":
        yield (
            "batcher.eta is set, but batcher.admission is demand, which does not use it; set"
            " admission: capacity"
        )
    if batcher.rows * batcher.max_seq_len < budget:
        yield (
            f"batcher.row_count {batcher.rows} x max_seq_len {batcher.max_seq_len} is less than"
            f" total_token_budget {budget}"
        )
    mesh = run.learner.mesh
    if mesh.data > 0 and batcher.processes % (mesh.data * mesh.replica):
        yield (
            f"batcher.processes {batcher.processes}: learner.mesh divides the rows among"
            f" {mesh.data * mesh.replica} devices (data times replica); give that number"
        )
    yield from _row_problems(run)
    if batcher.rows % batcher.processes:
        yield (
            f"batcher.row_count {batcher.rows} cannot be divided among batcher.processes"
            f" {batcher.processes}; give a multiple of it"
        )
    if batcher.balance == "flops" and not run.model.hidden_size:
        yield (
            f"batcher.balance flops needs model.hidden: hidden_size in {run.model.path}/config.json"
        )
    if run.model.max_seq_len > batcher.max_seq_len:
        yield (
            f"model.max_seq_len {run.model.max_seq_len} is larger than batcher.max_seq_len"
            f" {batcher.max_seq_len}: rollouts could not be packed"
        )


def _row_problems(run: RunFile) -> Iterator[str]:
    """Rows that the kernel of attention refuses, or that devices cannot divide."""
    batcher = run.batcher
    context = run.learner.mesh.context
    chosen = run.learner.attention
    block = 128 if chosen == "pallas" else 1024
    for length in batcher.row_lengths:
        if length >= batcher.max_seq_len:
            yield (
                f"batcher.row_lengths: {length} is not below max_seq_len {batcher.max_seq_len},"
                " which the longest rows have; leave it out"
            )
    if len(set(batcher.row_lengths)) < len(batcher.row_lengths):
        yield f"batcher.row_lengths {batcher.row_lengths}: each length once"
    for length in (batcher.max_seq_len, *batcher.row_lengths):
        where = "max_seq_len" if length == batcher.max_seq_len else "row_lengths:"
        if length % context:
            yield (
                f"batcher.{where} {length} cannot be divided among learner.mesh.context"
                f" {context} devices; give a multiple of it"
            )
        by_blocks = chosen == "pallas" or length > block
        if by_blocks and length % block:
            yield (
                f"batcher.{where} {length}: attention by {chosen} is computed in blocks of {block}"
                f" tokens; give a multiple of it, such as {-(-length // block) * block}"
            )
    if chosen in ("cudnn", "pallas") and context > 1:
        yield (
            f"learner.attention {chosen} needs whole rows, and learner.mesh.context divides them;"
            " set context: 1, or attention: reference"
        )


def _group_problems(
    run: RunFile, where: str, buffer: Buffer, compares: bool = True
) -> Iterator[str]:
    """Problems of the buffer's rules, those for all envs or for one, with the batcher's sizes.

    `compares`: advantages train, so the rollouts of a group are compared.
    """
    batcher = run.batcher
    budget = batcher.total_token_budget
    if batcher.lookahead > buffer.max_age:
        yield (
            f"batcher.lookahead is {batcher.lookahead} but {where}.max_age is {buffer.max_age}:"
            " need 0 <= lookahead <= max_age"
        )
    if batcher.eta > buffer.max_age:
        yield (
            f"batcher.eta is {batcher.eta} but {where}.max_age is {buffer.max_age}: what is begun"
            " for so late a batch would be too old for it"
        )
    if buffer.min_group_size > buffer.group_size:
        yield (
            f"{where}.min_group_size {buffer.min_group_size} is larger than {where}.group_size"
            f" {buffer.group_size}"
        )
    if compares and buffer.min_group_size == 1 and buffer.advantage in RELATIVE_ADVANTAGES:
        alone = (
            f"{buffer.advantage} compares the rollouts of a group, so one alone has advantage 0 and"
            " only fills the batch"
        )
        yield (
            f"{where}.min_group_size is 1, and {alone}; set it to 2 or more, or advantage:"
            " reinforce++"
        )
    if buffer.remember_versions <= buffer.max_age:
        yield (
            f"buffer.remember_versions {buffer.remember_versions} must exceed {where}.max_age"
            f" {buffer.max_age}"
        )
    group = f"{buffer.group_size} rollouts of model.max_seq_len {run.model.max_seq_len} tokens"
    if run.buffer.shards > run.topics.partitions:
        yield (
            f"buffer.shards {run.buffer.shards} is larger than topics.partitions"
            f" {run.topics.partitions}: a shard would have nothing to read"
        )
    window = buffer.max_window_tokens // buffer.shards
    if window < buffer.group_size * run.model.max_seq_len:
        yield (
            f"buffer.max_window_tokens {buffer.max_window_tokens} does not hold a group of {group}:"
            " it would never be complete"
        )
    if budget < buffer.min_group_size * 2:
        yield (
            f"batcher.total_token_budget {budget} holds no group of {buffer.min_group_size}"
            " rollouts"
        )
    half_row = batcher.max_seq_len // 2 + 1  # Two sequences of this length do not share a row.
    large = (
        buffer.group_size > batcher.rows
        and buffer.group_size * half_row <= budget <= batcher.rows * batcher.max_seq_len
    )
    if large and half_row <= run.model.max_seq_len <= batcher.max_seq_len:
        fits = (
            f"{buffer.group_size} rollouts of {half_row} tokens need a row of {batcher.max_seq_len}"
            f" each, and there are {batcher.rows}"
        )
        yield (
            f"batcher.row_count: {fits}: such groups could not be trained on; set it to"
            f" {buffer.group_size}"
        )
    # With fewer tokens a process might get no rollout.
    longest = (batcher.processes + buffer.group_size - 1) * run.model.max_seq_len
    if batcher.processes > 1 and budget < longest:
        one_each = (
            f"{batcher.processes} processes and groups of {buffer.group_size} rollouts of"
            f" {run.model.max_seq_len} tokens need {longest}"
        )
        yield (
            f"batcher.total_token_budget {budget} does not give every process a rollout for"
            f" certain: {one_each}"
        )


def _loss_problems(run: RunFile) -> Iterator[str]:
    for name, env in run.envs.items():
        if not any(env.loss.model_dump().values()):
            yield (
                f"envs.{name}.loss: every weight is 0, so its rollouts would train nothing; give"
                " one of them a weight, or leave the env out"
            )
        if env.loss.teacher_kl and not run.learner.teacher.path:
            yield (
                f"envs.{name}.loss.teacher_kl: learner.teacher.path names no teacher; give it a"
                " model, or set the weight to 0"
            )
    learner = run.learner
    correction = learner.correction
    if learner.loss == "dapo" and learner.clip_epsilon_high <= learner.clip_epsilon:
        yield (
            "learner.loss: dapo is ppo unless clip_epsilon_high is above clip_epsilon"
            f" {learner.clip_epsilon}; its paper has 0.28 and 0.2"
        )
    if (
        correction.weights != "none"
        and correction.old_policy == "bypass"
        and learner.loss in RATIO_LOSSES
    ):
        ratio = f"the ratio of {learner.loss} weighs by the policy that sampled already"
        yield (
            f"learner.correction.weights: {ratio}; set old_policy: decoupled, or learner.loss:"
            " grpo, which has no ratio"
        )
    if correction.weight_min >= correction.weight_max:
        yield (
            f"learner.correction.weight_min {correction.weight_min} must be below weight_max"
            f" {correction.weight_max}"
        )
    max_age = max((run.buffer_of(name).max_age for name in run.envs), default=0)
    if (
        learner.loss == "grpo"
        and correction.weights == "none"
        and correction.reject == "none"
        and max_age
    ):
        how = "set buffer.max_age: 0, or learner.correction.weights: token"
        yield (
            f"learner.loss: grpo has no ratio, and with buffer.max_age {max_age} it would train on"
            f" old rollouts uncorrected; {how}"
        )
    least = 1.0 if correction.reject == "geometric" else 0.0
    if correction.reject != "none" and correction.reject_above <= least:
        yield (
            f"learner.correction.reject is {correction.reject}: set reject_above, the limit, above"
            f" {least:g}"
        )
    reference = learner.reference
    if reference.path and reference.every:
        yield (
            f"learner.reference: path {reference.path} is a fixed reference, every"
            f" {reference.every} one that follows; leave one of them out"
        )
    if learner.lora and reference.every:
        yield (
            f"learner.reference.every is {reference.every}, and with learner.lora the reference is"
            " the base, which stays the same; leave every out"
        )
    if reference.by == "none" and (reference.path or reference.every):
        yield (
            "learner.reference.by is none: nobody would ask the reference that path or every names;"
            " set by to learner or pool"
        )
    if reference.by == "pool" and not learner.kl_coefficient:
        yield (
            "learner.kl_coefficient is 0: nobody would read what the pool scores; raise it, or set"
            " learner.reference.by: none"
        )
    named = reference.path or reference.every
    if reference.by == "learner" and named and not learner.kl_coefficient:
        yield (
            "learner.kl_coefficient is 0: the reference that learner.reference names would not be"
            " asked; raise it, or leave path and every out"
        )


def _schedule_problems(run: RunFile) -> Iterator[str]:
    learner = run.learner
    which = "warmup_fraction" if learner.warmup_fraction else f"schedule: {learner.schedule}"
    if (learner.warmup_fraction or learner.schedule != "constant") and not learner.schedule_steps:
        yield (
            f"learner.{which} needs a number of steps: set learner.schedule_steps, or"
            " orchestrator.max_steps"
        )
    elif learner.schedule != "constant" and learner.schedule_steps <= learner.warmup:
        yield (
            f"learner.schedule_steps {learner.schedule_steps} leaves nothing after the"
            f" {learner.warmup} steps of warm-up; raise it, or lower warmup_steps"
        )
    if learner.min_learning_rate > learner.learning_rate:
        yield (
            f"learner.min_learning_rate {learner.min_learning_rate:g} is above learning_rate"
            f" {learner.learning_rate:g}; the rate only falls"
        )


def _placement_problems(run: RunFile) -> Iterator[str]:
    by_role: dict[str, list[str]] = {}
    for part in topology.parts(run):
        by_role.setdefault(part.role, []).append(part.name)
    names = [*by_role, *(name for members in by_role.values() for name in members)]
    for role in ("learner", "scorer", "inference", "evaluator") if run.placement else ():
        missing = sorted({*by_role.get(role, ())} - {*run.placement})
        if missing and role not in run.placement:
            yield (
                f"placement: {missing[0]} is not named and would see no GPU; add {role}: {{devices:"
                " [...]}, with none if that is meant"
            )
    for name, placement in run.placement.items():
        if name not in names:
            yield f"placement.{name}: no role or part of this run; {meant(name, names)}"
            continue
        if len(set(placement.devices)) != len(placement.devices):
            yield f"placement.{name}.devices: {placement.devices} has a device twice"
        sharing = topology.sharing_parts(run, name)
        if sharing and len(placement.devices) % len(sharing):
            yield (
                f"placement.{name}.devices: {len(placement.devices)} devices cannot be divided"
                f" among {', '.join(sharing)}; give a multiple of {len(sharing)}, or name the parts"
            )
    yield from _division_problems(run)


def _division_problems(run: RunFile) -> Iterator[str]:
    """Servers that have fewer devices than their model is divided over."""
    for part in topology.parts(run):
        named = run.placement.get(part.name)
        placement = named or run.placement.get(part.role)
        if part.role not in (topology.INFERENCE.name, topology.EVALUATOR.name) or not placement:
            continue
        sharing = 1 if named else len(topology.sharing_parts(run, part.role))
        devices = len(placement.devices) // sharing
        pool = topology.pool_of(part)
        wanted = run.inference.of_pool(pool).tensor_parallel
        if 0 < devices < wanted:
            yield (
                f"placement: {part.name} has {devices} devices, and tensor_parallel of its pool is"
                f" {wanted}; give it more, or name it"
            )


def _secret_problems(run: RunFile) -> Iterator[str]:
    yield from exposed(run.model_dump(mode="json"))
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

    if not is_loopback(run.gateway.host) and not run.gateway.api_key:
        yield (
            f"gateway.host {run.gateway.host} can be reached from other machines: set"
            " gateway.api_key"
        )


def is_loopback(host: str) -> bool:
    """Can nobody outside this machine reach it? A name, or a reference, may be any address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
