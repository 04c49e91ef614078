"""What a run will do, told from its run file alone: `streamrl check`. Nothing is started, nothing
is downloaded, and no broker is asked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.config.topology import Part
from streamrl.run.orchestrator.gpus import installed_gpus
from streamrl.run.orchestrator.memory import learner_gib
from streamrl.run.orchestrator.requests import machine_request, obstacles
from streamrl.stream.log import topics
from streamrl.system import hub
from streamrl.system.errors import ModelError

WEIGHT_BYTES = 4  # a parameter, and a gradient, in float32
MOMENTS = 2  # that AdamW keeps of each parameter, in float32
SERVED_BYTES = {"float32": 4, "auto": 2, "bfloat16": 2, "float16": 2, "half": 2}
CACHE_BYTES = 2  # a value of the KV cache, unless `kv_cache_dtype` is one of FP8
GIB = 1 << 30


class Fact(NamedTuple):
    """One line of a preview."""

    subject: str
    text: str


def preview(run: RunFile, with_memory: bool = False) -> list[Fact]:
    """Facts about what the run consists of, in the order in which a reader asks for it.

    `with_memory`: the learner's programs are compiled for what its devices will hold, which takes
    up to minutes.

    Raises ModelError for a model directory that does not exist or has no usable config.json.
    """
    return [
        Fact("run", f"{run.run}, in {run.directory}"),
        Fact("model", _model(run)),
        *(Fact("env", _env(run, name)) for name in run.envs),
        Fact("batch", _batch(run)),
        Fact("age", _age(run)),
        Fact("parts", ", ".join(part.name for part in topology.parts(run))),
        *(Fact("memory", text) for text in _memory(run, with_memory)),
        *(Fact("device", text) for text in _devices(run)),
        *(Fact("machine", text) for text in _machines(run)),
        *(Fact("sharing", text) for text in _sharing(run)),
        Fact("kafka", _kafka(run)),
        Fact("topics", _topics(run)),
        Fact("weights", run.store),
        Fact("ends", _end(run)),
    ]


def parameter_count(config: Mapping[str, Any]) -> int:
    """Parameters of a decoder of the Llama family, by the fields of its config.json: embeddings,
    and of each layer the attention's projections and the gated MLPs. Norms and biases, less than a
    thousandth of them, are left out.
    """
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    key_value_heads = config.get("num_key_value_heads") or heads
    head_size = config.get("head_dim") or hidden // heads
    attention = 2 * hidden * head_size * (heads + key_value_heads)
    experts = config.get("num_experts") or 1
    width = config["intermediate_size"]
    if experts > 1:
        width = config.get("moe_intermediate_size") or width
    mlp = 3 * hidden * width * experts
    embeddings = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return config["num_hidden_layers"] * (attention + mlp) + embeddings


def _config(run: RunFile) -> dict[str, Any] | None:
    """The model's config.json, or None if the model is not on this machine."""
    directory = hub.local_directory(run.model.path)
    if directory is None:
        if hub.parse(run.model.path) is None:
            raise ModelError(
                f"model.path: directory {run.model.path} does not exist; give a Hugging Face"
                " directory, or the name of a model on the hub as OWNER/NAME"
            )
        return None
    file = directory / "config.json"
    try:
        config = json.loads(file.read_bytes())
        parameter_count(config)
    except OSError as error:
        raise ModelError(f"model.path: {file} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise ModelError(f"model.path: {file} is no config of a language model ({error})") from None
    return config


def _model(run: RunFile) -> str:
    if not run.model.path:
        tiny = run.model.tiny
        return f"a tiny Llama, made at the start: {tiny.layers} layers of {tiny.hidden}"
    config = _config(run)
    if config is None:
        return f"{run.model.path}, which `up` downloads from the hub first"
    billions = parameter_count(config) / 1e9
    kind = config.get("model_type", "unknown type")
    return f"{run.model.path}: {kind}, {billions:.2f} billion parameters"


def _env(run: RunFile, name: str) -> str:
    env = run.envs[name]
    buffer = run.buffer_of(name)
    share = f"{env.fraction:.0%} of a batch" if env.fraction else "a share of what is left"
    if env.sessions:
        source = "agents, through the gateway"
    elif env.replicas:
        source = f"{env.kind or name}, {_count(env.replicas, 'process', 'processes')}"
    else:
        source = "a program outside the run"
    return (
        f"{name}: {source}; {share}, groups of {buffer.group_size},"
        f" up to {env.max_tokens:,} tokens an answer"
    )


def _batch(run: RunFile) -> str:
    batcher = run.batcher
    return (
        f"up to {batcher.total_token_budget:,} tokens in {batcher.rows:,} rows of"
        f" {batcher.max_seq_len:,}, {padding(run):.0%} of them padding"
    )


def _age(run: RunFile) -> str:
    limit = run.buffer.max_age
    needed = age_of_longest(run)
    text = (
        f"the oldest token is at most {limit} versions old; that of the longest answer is"
        f" {needed} when all servers are busy"
    )
    return text if needed <= limit else f"{text}: long answers expire; raise buffer.max_age"


def padding(run: RunFile) -> float:
    """Share of a full batch's positions that no token fills."""
    batcher = run.batcher
    return 1 - batcher.total_token_budget / (batcher.rows * batcher.max_seq_len)


def age_of_longest(run: RunFile) -> int:
    """Versions by which the first token of the longest answer is old when its batch trains.

    While an answer of n tokens is sampled, each sequence of the servers samples about n, and every
    `batcher.total_token_budget` of them are a version. `batcher.lookahead` comes on top.
    """
    longest = max((env.max_tokens for env in run.envs.values()), default=0)
    together = run.inference.replicas * run.inference.max_num_seqs
    return math.ceil(longest * together / run.batcher.total_token_budget) + run.batcher.lookahead


def _memory(run: RunFile, with_memory: bool) -> Iterator[str]:
    """What the learner and a server hold on each of their devices."""
    config = _config(run) if run.model.path else None
    if config is None:
        return
    parameters = parameter_count(config)
    learners = _of(run, "learner")
    devices = [device for part in learners for device in topology.devices_of(run, part)]
    if run.learner.mesh.nodes == "copy":  # each machine has a copy of the parameters
        devices = [device for device in devices if device.node == devices[0].node]
    count = max(1, len(devices))
    if with_memory:
        held = learner_gib(run, config, count)
        share = topology.memory_fraction(run, learners[0])
        what = f"a step; it reserves {share:.0%} of a GPU, which needs {held / share:.0f} GiB"
    else:
        copies = 1 if run.learner.lora else 2 + MOMENTS
        held = parameters * WEIGHT_BYTES * copies / GIB / count
        state = "weights" if run.learner.lora else "weights, gradients and AdamW's moments"
        what = f"{state}; activations come on top (--memory)"
    each = "" if count == 1 else f" on each of {count} devices"
    yield f"learner: {held:.1f} GiB{each} of {what}"
    split = run.inference.tensor_parallel
    served = parameters * SERVED_BYTES.get(run.inference.dtype, WEIGHT_BYTES) / GIB / split
    cached = cache_bytes(config, str(run.inference.engine.get("kv_cache_dtype", ""))) / split
    longest = run.inference.max_num_seqs * run.inference.max_model_len
    each = "" if split == 1 else f" on each of {split} devices"
    yield (
        f"each server: {served:.1f} GiB of weights{each}; the rest of what it reserves is the KV"
        f" cache, {GIB / cached:,.0f} tokens in a GiB ({longest * cached / GIB:.1f} GiB for"
        f" {run.inference.max_num_seqs} sequences of full length)"
    )


def cache_bytes(config: Mapping[str, Any], dtype: str = "") -> int:
    """Bytes of a token in a server's KV cache: a key and a value of each key-value head."""
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    values = 2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * size
    return values * (1 if dtype.startswith("fp8") else CACHE_BYTES)


def _of(run: RunFile, role: str) -> list[Part]:
    return [part for part in topology.parts(run) if part.role == role]


def _devices(run: RunFile) -> Iterator[str]:
    """The parts on each GPU, with the share of its memory that each reserves. GPUs of a machine
    with the same parts are in one line.
    """
    here = installed_gpus()
    alike: dict[tuple[str, str], list[str]] = {}
    for device, parts in topology.reserved_memory(run).items():
        gib = here[device.number].memory_gib if device.number < len(here) else 0.0
        reserved = [
            f"{name} reserves {share:.0%}" + (f" ({share * gib:.1f} GiB)" if gib else "")
            for name, share in parts.items()
        ]
        alike.setdefault((device.node, ", ".join(reserved)), []).append(str(device.number))
    for (node, reserved_by), numbers in alike.items():
        where = f" of {node}" if node else ""
        yield f"{', '.join(numbers)}{where}: {reserved_by}"
    if not run.placement:
        yield "no placement: the parts share the GPU of the machine, if it has one"


def _machines(run: RunFile) -> Iterator[str]:
    """The parts of each of several machines, and what the machines must share."""
    machines = topology.machines(run)
    if len(machines) == 1:
        return
    for machine, parts in machines.items():
        yield f"{machine}: {', '.join(p.name for p in parts)}; {machine_request(run, parts)}"
    yield f"they must share {run.directory} and {run.store}, by these names"
    yield from (f"warning: {obstacle}" for obstacle in obstacles(run))


def _sharing(run: RunFile) -> Iterator[str]:
    """Other runs that this run's servers serve, and runs whose servers serve this one."""
    inference = run.inference
    for guest, own in inference.also_serves.items():
        key = f"with its own key, {own.api_key}" if own.api_key else "without a key"
        yield f"the servers also serve run {guest}, which samples {key}"
    for host in inference.served_by:
        key = f"with {inference.api_key}" if inference.api_key else "without a key"
        yield (
            f"servers of run {host} also serve this one, which samples there {key}; user"
            f" {host}.{topology.INFERENCE.name} may read policy-versions and write servers and"
            " metrics"
        )


def _kafka(run: RunFile) -> str:
    if run.kafka:
        return str(run.kafka.get("bootstrap.servers", "as STREAMRL_KAFKA names it"))
    return f"a local broker, with its data in {Path(run.directory, 'kafka')}"


def _topics(run: RunFile) -> str:
    planned = topics.plan(run)
    partitions = sum(topic.partitions for topic in planned)
    replicas = run.topics.replicas
    copies = _count(replicas, "copy", "copies") if replicas else "1 copy (3 on a cluster)"
    return (
        f"{len(planned)} with {_count(partitions, 'partition')},"
        f" {copies} of each;"
        f" records are kept {run.topics.retention_hours:g} hours"
    )


def _end(run: RunFile) -> str:
    limits = run.orchestrator
    ends: list[str] = []
    if limits.target:
        ends.append(f"{limits.target.env} earns {limits.target.reward:g}")
    if limits.max_steps:
        ends.append(f"{limits.max_steps:,} steps are done")
    if limits.max_wall_s:
        ends.append(f"{limits.max_wall_s:,.0f} s have passed")
    return f"when {', or '.join(ends)}" if ends else "when it is stopped"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
