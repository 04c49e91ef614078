"""The policy of `make clients`: a tiny Llama in the Hugging Face layout, with a real tokenizer and
a chat template that has tools. `python -m tests.clients.model DIRECTORY` writes it.
"""

from __future__ import annotations

import pydoc_data.topics
import sys
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

from streamrl.config.sections.learner import TinyModel
from streamrl.learner.files.export import WEIGHTS
from streamrl.learner.initial import write_llama
from tests.clients.programs import ROOT
from tests.support.bpe import bpe

CONTEXT = 40_960  # tokens; the longest session, of qwen-code or Claude Code, has 24,000
VOCABULARY = 8_192
SPECIAL = ("<pad>", "<|im_end|>", "<|im_start|>")
# As Qwen's: what ends an answer is followed by a new line that the policy does not sample.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools, to be called as"
    ' <tool_call>{"name": ..., "arguments": ...}</tool_call>:\n'
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL_TURN = "<|im_start|>tool\n"
# Of the head's initial weights. Without it the policy is close to uniform, and a wrong logprob
# would hardly differ from the right one.
HEAD_SCALE = 100.0


def write_model(directory: Path) -> None:
    tokenizer = bpe(TEMPLATE, corpus(), SPECIAL, VOCABULARY)
    write_llama(directory, tokenizer, TinyModel(hidden=64), CONTEXT)
    tensors = load_file(directory / WEIGHTS)
    tensors["lm_head.weight"] *= HEAD_SCALE
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


def corpus() -> list[str]:
    """A megabyte of English and code that is on every machine: Python's reference, and our own."""
    pages: Any = pydoc_data.topics.topics
    return [*pages.values(), *(path.read_text() for path in sorted(ROOT.glob("docs/**/*.md")))]


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
