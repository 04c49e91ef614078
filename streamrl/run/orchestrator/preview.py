"""What a run will do, told from its run file alone: `streamrl check`. Nothing is started, nothing
is downloaded, and no broker is asked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.config.topology import Part
from streamrl.stream.log import topics
from streamrl.system import hub
from streamrl.system.errors import ModelError

WEIGHT_BYTES = 4  # a parameter, and a gradient, in float32
MOMENTS = 2  # that AdamW keeps of each parameter, in float32
SERVED_BYTES = {"float32": 4, "auto": 2, "bfloat16": 2, "float16": 2, "half": 2}
GB = 1e9


class Fact(NamedTuple):
    """One line of a preview."""

    subject: str
    text: str


def preview(run: RunFile) -> list[Fact]:
    """Facts about what the run consists of, in the order in which a reader asks for it.

    Raises ModelError for a model directory that does not exist or has no usable config.json.
    """
    return [
        Fact("run", f"{run.run}, in {run.directory}"),
        Fact("model", _model(run)),
        *(Fact("env", _env(run, name)) for name in run.envs),
        Fact("batch", _batch(run)),
        Fact("parts", ", ".join(part.name for part in topology.parts(run))),
        *(Fact("memory", text) for text in _memory(run)),
        *(Fact("device", text) for text in _devices(run)),
        *(Fact("sharing", text) for text in _sharing(run)),
        Fact("kafka", _kafka(run)),
        Fact("topics", _topics(run)),
        Fact("weights", run.store),
        Fact("ends", _end(run)),
    ]


def parameter_count(config: dict[str, int]) -> int:
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


def _config(run: RunFile) -> dict[str, int] | None:
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
        f" {batcher.max_seq_len:,}; the oldest token is at most {run.buffer.max_age} versions old"
    )


def _memory(run: RunFile) -> Iterator[str]:
    """What weights take. Activations and the KV cache come on top."""
    config = _config(run) if run.model.path else None
    if config is None:
        return
    parameters = parameter_count(config)
    copies = 1 if run.learner.lora else 2 + MOMENTS
    learner = parameters * WEIGHT_BYTES * copies / GB
    what = "weights" if run.learner.lora else "weights, gradients and AdamW's moments"
    devices = max(1, sum(len(topology.devices_of(run, part)) for part in _of(run, "learner")))
    each = "" if devices == 1 else f", {learner / devices:.1f} GB on each of {devices} devices"
    yield f"learner: {learner:.1f} GB of {what}{each}; activations come on top"
    served = parameters * SERVED_BYTES.get(run.inference.dtype, WEIGHT_BYTES) / GB
    split = run.inference.tensor_parallel
    each = "" if split == 1 else f", {served / split:.1f} GB on each of {split} devices"
    yield f"each server: {served:.1f} GB of weights{each}; the KV cache comes on top"


def _of(run: RunFile, role: str) -> list[Part]:
    return [part for part in topology.parts(run) if part.role == role]


def _devices(run: RunFile) -> Iterator[str]:
    """The parts on each GPU, with the share of its memory that each reserves."""
    held: dict[int, list[str]] = {}
    for part in topology.parts(run):
        for device in topology.devices_of(run, part):
            share = topology.memory_fraction(run, part)
            held.setdefault(device, []).append(f"{part.name} reserves {share:.0%}")
    for device, parts in sorted(held.items()):
        yield f"{device}: {', '.join(parts)}"
    if not run.placement:
        yield "no placement: every part sees all GPUs of the machine, if it has some"


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
    return (
        f"{len(planned)} with {_count(partitions, 'partition')},"
        f" {_count(run.topics.replicas, 'copy', 'copies')} of each;"
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
