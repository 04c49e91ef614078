"""Plain transformers and plain vLLM, for tests to hold the learner to: run by the Python that has
them, as the learner's own has no torch.

`make DIR`: a tiny directory of each family below DIR, for the tokenizer that lies in DIR/tokenizer.
`fill DIR...`: random weights for each config.json. `logits OUT DIR...`: what each directory's model
says to TOKENS, as OUT/<name>.npy, (len(TOKENS), vocabulary) float32; loaded as anybody would,
without a word about types. `float32 OUT DIR...`: the same in float32, whatever the config has.
`vllm OUT DIR...`: the same of vLLM, as OUT/vllm-<name>.npy, logprobs; then it is given the weights
in <DIR>-next, if there are any, as a live server is, for OUT/vllm-<name>-next.npy.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

TOKENS = [1, 8, 11, 15, 4, 5, 6, 7, 9, 10, 12, 13, 14, 2, 3, 1, 8, 8, 11, 4]
CONTEXT = 32
# heads together wider than what is hidden
WIDE = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
SHAPE = {
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "max_position_embeddings": 64,
    **WIDE,
}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
THREE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
VARIANTS = {  # name: class of the settings, settings
    "llama": (
        "LlamaConfig",
        {"rope_parameters": {"rope_theta": 1000.0, **THREE}, "dtype": "bfloat16"},
    ),
    "qwen2": (
        "Qwen2Config",
        {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "qwen3": (
        "Qwen3Config",
        {
            "rope_parameters": {
                "rope_theta": 1e6,
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            # vLLM on a CPU pads it to a multiple of 64, and cannot reload what it has padded
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
        },
    ),
    "gemma": ("GemmaConfig", {}),
    "gemma2": (
        "Gemma2Config",
        {
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "sliding_window": CONTEXT,
        },
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        {
            "query_pre_attn_scalar": 24,
            "sliding_window": CONTEXT,
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": 5000.0}
                for kind in ("sliding_attention", "full_attention")
            },
        },
    ),
}


def make(directory: Path) -> None:
    import torch
    import transformers

    for name, (kind, settings) in VARIANTS.items():
        torch.manual_seed(0)
        config = getattr(transformers, kind)(**{**SHAPE, **ENDS, **settings})
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            # norms and biases start as ones and zeros: nobody would miss them
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)
        model.save_pretrained(directory / name)
        for path in (directory / "tokenizer").iterdir():
            shutil.copyfile(path, directory / name / path.name)


def fill(directories: list[Path]) -> None:
    """Give each directory with a config.json random weights, in shards with an index if it is a
    mixture of experts. <DIR>-v5 has the same with the config as transformers 5 writes it.
    """
    import torch
    import transformers

    for directory in directories:
        torch.manual_seed(0)
        config = transformers.AutoConfig.from_pretrained(directory)
        config.dtype = "float32"
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
        published = (directory / "config.json").read_bytes()
        shard_size = "100KB" if "moe" in config.model_type else "1GB"
        model.save_pretrained(directory, max_shard_size=shard_size)
        shutil.copytree(directory, directory.with_name(f"{directory.name}-v5"))
        (directory / "config.json").write_bytes(published)


def logits(out: Path, directories: list[Path], **options: str) -> None:
    import numpy as np
    import torch
    import transformers

    for directory in directories:
        # its default leaves out caps on attention
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, attn_implementation="eager", **options
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        assert len(tokenizer) == 16 and tokenizer.chat_template, (
            "the tokenizer, or its chat template, did not come along"
        )
        with torch.no_grad():
            np.save(
                out / f"{directory.name}.npy",
                model(torch.tensor([TOKENS])).logits[0].float().numpy(),
            )


def vllm(out: Path, directories: list[Path]) -> None:
    import os

    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    import numpy as np
    from vllm import LLM, SamplingParams

    def say(llm: LLM, name: str) -> None:
        asked = SamplingParams(
            max_tokens=1, temperature=1.0, prompt_logprobs=16, skip_reading_prefix_cache=True
        )
        (answer,) = llm.generate([{"prompt_token_ids": TOKENS}], asked)
        rows = [
            [entry[token].logprob for token in range(16)] for entry in answer.prompt_logprobs[1:]
        ]
        np.save(out / f"vllm-{name}.npy", np.array(rows, np.float32))

    for directory in directories:
        llm = LLM(
            str(directory),
            dtype="float32",
            enforce_eager=True,
            max_model_len=CONTEXT,
            max_logprobs=16,
            disable_log_stats=True,
        )
        say(llm, directory.name)
        if Path(f"{directory}-next").is_dir():
            llm.collective_rpc("reload_weights", kwargs={"weights_path": f"{directory}-next"})
            llm.reset_prefix_cache()
            say(llm, f"{directory.name}-next")
        del llm


if __name__ == "__main__":
    what, first, *rest = sys.argv[1:]
    if what == "make":
        make(Path(first))
    elif what == "fill":
        fill([Path(name) for name in [first, *rest]])
    elif what == "float32":
        logits(Path(first), [Path(name) for name in rest], dtype="float32")
    else:
        {"logits": logits, "vllm": vllm}[what](Path(first), [Path(name) for name in rest])
