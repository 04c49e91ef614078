"""The model that a run starts from if it names none: a small Llama and a tokenizer of single
characters, made from a seed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
from haliax import Axis
from levanter.models.llama import LlamaConfig, LlamaLMHeadModel
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig as HfLlamaConfig
from transformers import PreTrainedTokenizerFast

from streamrl.config.run_file import RunFile
from streamrl.config.sections.learner import TinyModel
from streamrl.learner.files.export import save_weights, state_dict
from streamrl.learner.model.model import check_directory
from streamrl.learner.parallel.mesh import use_mesh
from streamrl.system import hub

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
ROLES = ("<system>", "<user>", "<assistant>", "<tool>")
# of the usual initial size of lm_head: the first policy is close to uniform, and explores
HEAD_SCALE = 0.1
TEMPLATES = {
    "plain": "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}",
    "turns": (
        "{{ bos_token }}{% for message in messages %}<{{ message['role'] }}>{{ message['content']"
        " }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    ),
}


def initial_model_dir(run: RunFile) -> Path:
    """The directory of the initial model: the one in the run file, which may name it on the hub, or
    the tiny one, which is made here once. Raises ModelError and HubError.
    """
    if run.model.path:
        directory = hub.model_directory(run.model.path, "model.path")
        check_directory(directory)
        return directory
    directory = run.directory / "model"
    run.directory.mkdir(parents=True, exist_ok=True)
    with _alone(run.directory):  # learner and scorers may all begin with it
        if not directory.exists():
            temporary = directory.with_name("model.tmp")
            shutil.rmtree(temporary, ignore_errors=True)  # of a process that died here
            write_tiny(temporary, run.model.tiny, run.model.max_seq_len).rename(directory)
    return directory


@contextmanager
def _alone(directory: Path) -> Generator[None]:
    """One process at a time."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def tiny_tokenizer(alphabet: str, chat: str = "plain") -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character, after the special tokens.

    The chat template `plain` is `<bos>` and the messages as they are, so that `<bos>47=` is to be
    followed by `47<eos>`. The template `turns` is for conversations:
    `<bos><user>47=<eos><assistant>` is to be followed by `47<eos>`, and messages stay as they are.
    """
    roles = ROLES if chat == "turns" else ()
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *roles, *dict.fromkeys(alphabet)))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
    }
    more = {"additional_special_tokens": list(roles)} if roles else {}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special, **more
    )
    fast.chat_template = TEMPLATES[chat]
    return fast


def write_tiny(directory: Path, tiny: TinyModel, max_seq_len: int) -> Path:
    """Write the model and its tokenizer to `directory`, in Hugging Face layout. The same settings
    give the same bytes.

    The vocabulary is exactly the tokenizer's. With a padded one, the model could sample ids that
    mean nothing.
    """
    return write_llama(directory, tiny_tokenizer(tiny.alphabet, tiny.chat), tiny, max_seq_len)


def write_llama(
    directory: Path, tokenizer: PreTrainedTokenizerFast, tiny: TinyModel, max_seq_len: int
) -> Path:
    """Write a tiny model for an existing tokenizer, as `write_tiny` does."""
    directory.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(
        max_seq_len=max_seq_len,
        hidden_dim=tiny.hidden,
        intermediate_dim=2 * tiny.hidden,
        num_layers=tiny.layers,
        num_heads=max(tiny.hidden // tiny.head_dim, 1),
        num_kv_heads=max(tiny.hidden // tiny.head_dim, 1),
        head_dim=tiny.head_dim,
        gradient_checkpointing=False,
    )
    to_hf_config(config, tokenizer).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    with use_mesh():
        model = LlamaLMHeadModel.init(
            Axis("vocab", len(tokenizer)), config, key=jax.random.PRNGKey(tiny.seed)
        )
        model = eqx.tree_at(
            lambda m: m.lm_head.weight, model, replace_fn=lambda weight: weight * HEAD_SCALE
        )
        save_weights(state_dict(model), directory)
    return directory


def to_hf_config(config: LlamaConfig, tokenizer: Any) -> HfLlamaConfig:
    """The Hugging Face config of a Levanter config. A server stops at the tokenizer's
    end-of-sequence token.
    """
    return HfLlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_dim,
        intermediate_size=config.intermediate_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_seq_len,
        rms_norm_eps=config.layer_norm_epsilon,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
