"""Whether servers stop where the chat template ends an answer. vLLM stops at the tokenizer's
end-of-sequence token and at `eos_token_id` of generation_config.json, or of config.json where there
is none. A model that was taught to end its turn with another token runs on to the limit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from streamrl.system.errors import ModelError, describe_error
from streamrl.weights.manifest import CONFIG, GENERATION_CONFIG

QUESTION = "1+1="
ANSWER = "2"  # Nearly every vocabulary has it, and no template writes it by itself.


def end_of_turn_problem(directory: Path) -> str:
    """The problem with the end of an answer of the model in a directory, in one sentence that
    names the token, or "" if nothing is. Raises ModelError for a tokenizer or a
    generation_config.json that cannot be read.
    """
    from transformers import AutoTokenizer

    stops = stop_tokens(directory)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:
        # The tokenizers library raises whatever it makes of a file.
        raise ModelError(
            f"model directory {directory}: its tokenizer cannot be loaded"
            f" ({describe_error(error)}); write it there with save_pretrained of transformers 4"
        ) from None
    if not tokenizer.chat_template:
        return ""
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception as error:
        # A template may raise anything, also on purpose.
        return (
            f"model directory {directory}: its chat template cannot write a question and an answer"
            f" ({describe_error(error)})"
        )
    end = _first_added_token(tokenizer, str(text).rpartition(ANSWER)[2])
    known = stops | {tokenizer.eos_token_id}
    if end is None or end in known:
        return ""
    found = ", ".join(str(token) for token in sorted(known - {None}))
    return (
        f"model directory {directory}: its chat template ends an answer with"
        f" {tokenizer.convert_ids_to_tokens(end)!r} ({end}), and servers stop at {found} alone, so"
        f" answers may run on to max_tokens; add {end} to eos_token_id in {GENERATION_CONFIG}"
    )


def stop_tokens(directory: Path) -> set[int]:
    """The ids that a model directory names as ends of a sequence, besides its tokenizer's. Raises
    ModelError.
    """
    has_own = (directory / GENERATION_CONFIG).is_file()
    name = GENERATION_CONFIG if has_own else CONFIG
    try:
        settings = json.loads((directory / name).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"model directory {directory}: {name} cannot be read ({describe_error(error)})"
        ) from None
    ids = settings.get("eos_token_id") if isinstance(settings, dict) else settings
    if ids is None:
        return set()
    listed = ids if isinstance(ids, list) else [ids]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in listed):
        raise ModelError(
            f"model directory {directory}: eos_token_id in {name} is {json.dumps(ids)[:100]}, and"
            " must be a token id or a list of them"
        )
    return set(listed)


def _first_added_token(tokenizer: Any, text: str) -> int | None:
    """The first token of the text that was added to the vocabulary, or None."""
    added = tokenizer.added_tokens_decoder.keys() | set(tokenizer.all_special_ids)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return next((token for token in ids if token in added - {tokenizer.unk_token_id}), None)
