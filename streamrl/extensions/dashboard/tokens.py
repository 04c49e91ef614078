"""The text of each token, by the run's tokenizer if it has one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from streamrl.config.run_file import RunFile
from streamrl.system import hub
from streamrl.system.text import one_line

logger = logging.getLogger(__name__)

FILE = "tokenizer.json"
BROKEN = "�"  # A decoder writes this for a part of a character.
MOST_PIECES = 8  # The largest number of tokens that are tried as one character.
# SentencePiece writes this for the space before a word. A decoder drops it before the first token.
SPACE = "▁"


def texts_of(run: RunFile) -> Callable[[Sequence[int]], list[str]] | None:
    """A function from token ids to the text of each token, or None if this machine does not have
    the run's tokenizer.
    """
    place = hub.local_directory(run.model.path or str(run.directory / "model"))
    if place is None or not (place / FILE).is_file():
        return None
    path = place / FILE
    try:
        from tokenizers import Tokenizer

        return partial(texts, Tokenizer.from_file(str(path)))
    except Exception as error:  # The library raises nothing more specific.
        logger.warning("%s cannot be used, tokens are shown as ids: %s", path, one_line(error, 200))
        return None


def texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each token. Where several tokens make one character, the first has the character
    and the others have an empty text.
    """
    texts: list[str] = []
    while len(texts) < len(ids):
        at = len(texts)
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
        texts += [text, *[""] * (size - 1)]
    return texts


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    piece = tokenizer.id_to_token(ids[0])
    if piece is None:
        return f"[{ids[0]}]"  # It is not in the vocabulary.
    text = tokenizer.decode(list(ids), skip_special_tokens=False)
    return f" {text}" if piece.startswith(SPACE) and not text.startswith(" ") else text
