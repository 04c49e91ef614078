"""What a run file may tell vLLM's engine by name (`inference.engine`).

The names are those of vLLM's own arguments. None of them names a file, a program or code, and no
value can be a path or a module.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from streamrl.system.text import nearest_or_all

Value = bool | int | float | str

SWITCHES = (
    "async_scheduling",
    "disable_cascade_attn",
    "disable_custom_all_reduce",
    "enable_chunked_prefill",
    "enable_dbo",
    "enable_eplb",
    "enable_expert_parallel",
    "enable_prefix_caching",
    "enable_return_routed_experts",
    "enforce_eager",
    "numa_bind",
)
NUMBERS = (
    "block_size",
    "cpu_offload_gb",
    "data_parallel_size",
    "decode_context_parallel_size",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "kv_offloading_size",
    "long_prefill_token_threshold",
    "max_cudagraph_capture_size",
    "max_num_batched_tokens",
    "num_gpu_blocks_override",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "stream_interval",
)
TOOL_PARSER = "tool_call_parser"
WORDS = (
    "all2all_backend",
    "attention_backend",
    "kv_cache_dtype",
    "linear_backend",
    "moe_backend",
    "optimization_level",
    "performance_mode",
    "quantization",
    "reasoning_parser",
    "safetensors_load_strategy",
    "scheduling_policy",
    TOOL_PARSER,
)
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
"""A name that vLLM has a meaning for: no path, no module, no address."""


def problems(engine: Mapping[str, Value]) -> Iterator[str]:
    """The problems of these settings, each as a sentence that begins with the setting's name."""
    for name, value in engine.items():
        if name in SWITCHES:
            if not isinstance(value, bool):
                yield f"{name}: {value!r} is neither true nor false"
        elif name in NUMBERS:
            if isinstance(value, bool | str):
                yield f"{name}: {value!r} is not a number"
        elif name in WORDS:
            if not WORD.fullmatch(str(value)):
                yield f"{name}: {value!r} is not a name"
        else:
            known = (*SWITCHES, *NUMBERS, *WORDS)
            yield f"{name}: not a setting that a run file passes on; {nearest_or_all(name, known)}"


def arguments(engine: Mapping[str, Value]) -> list[str]:
    """The settings as arguments of vLLM's command line."""
    line = ["--enable-auto-tool-choice"] if TOOL_PARSER in engine else []
    for name, value in engine.items():
        flag = name.replace("_", "-")
        if value is False:
            line.append(f"--no-{flag}")
        elif value is True:
            line.append(f"--{flag}")
        else:
            line += [f"--{flag}", str(value)]
    return line
