"""Token ids to the text of each token, with the run's tokenizer where there is one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from streamrl.config.run_file import RunFile
from streamrl.errors import one_line

logger = logging.getLogger(__name__)

FILE = "tokenizer.json"
BROKEN = "�"  # what a decoder writes for a part of a character
MOST_PIECES = 8  # tokens that may make one character
SPACE = "▁"  # a word's beginning, in SentencePiece's alphabet; a decoder leaves it out at the start


def texts_of(run: RunFile) -> Callable[[Sequence[int]], list[str]] | None:
    """What turns ids into texts; None where the run's tokenizer is not here, and ids have to do."""
    places = [Path(run.model.path)] if run.model.path else [run.directory / "model"]
    path = next((place / FILE for place in places if (place / FILE).is_file()), None)
    if path is None:
        return None
    try:
        from tokenizers import Tokenizer

        return partial(texts, Tokenizer.from_file(str(path)))
    except Exception as error:  # the library's own are bare ones
        logger.warning(
            "%s cannot be used, tokens are shown as ids: %s",
            path,
            one_line(error, 200),
        )
        return None


def texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each token. One character made of several tokens stands at the first of them, the
    others are empty.
    """
    found: list[str] = []
    while len(found) < len(ids):
        at = len(found)
        text = _text(tokenizer, ids[at : at + 1])
        size = 1
        while BROKEN in text and size < MOST_PIECES and at + size < len(ids):
            longer = _text(tokenizer, ids[at : at + size + 1])
            size += 1
            if BROKEN not in longer:
                text = longer
                break
        else:
            size = 1
        found += [text, *[""] * (size - 1)]
    return found


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    piece = tokenizer.id_to_token(ids[0])
    if piece is None:
        return f"[{ids[0]}]"  # not in the vocabulary
    text = tokenizer.decode(list(ids), skip_special_tokens=False)
    return f" {text}" if piece.startswith(SPACE) and not text.startswith(" ") else text
