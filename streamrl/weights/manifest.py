"""The manifest of a version: every file with its size and SHA-256. The hash of the manifest
identifies the version.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from streamrl.stream.records import AdapterBase, AdapterCheck, PolicyVersion
from streamrl.system.errors import WeightError

MANIFEST = "manifest.json"
CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
TOKENIZER_FILES = (  # of the model that training begins with, as they are
    GENERATION_CONFIG,
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
# Where transformers keeps further chat templates of a tokenizer, each in a file of its name.
CHAT_TEMPLATES = "additional_chat_templates"
ALLOWED_FILE_NAMES = (
    CONFIG,
    INDEX,
    ADAPTER_CONFIG,
    *TOKENIZER_FILES,
)  # of a version's files, besides *.safetensors


class WeightFile(NamedTuple):
    name: str  # a plain file name; a named chat template has the name of its directory before it
    size_bytes: int
    sha256: str


class Manifest(NamedTuple):
    files: tuple[WeightFile, ...]  # by name

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(to_bytes(self)).hexdigest()


class WeightRef(NamedTuple):
    """The claim check: where a version is, and what it must be."""

    uri: str
    size_bytes: int
    sha256: str


StoredWeights = PolicyVersion | AdapterBase | AdapterCheck | WeightRef


def to_bytes(manifest: Manifest) -> bytes:
    """The manifest as JSON. The same files give the same bytes."""
    return (
        json.dumps({"files": [file._asdict() for file in manifest.files]}, sort_keys=True, indent=1)
        + "\n"
    ).encode()


def from_bytes(data: bytes, where: str) -> Manifest:
    """Read a manifest. Raises WeightError for anything but a list of plain file names with sizes
    and hashes, and for a file that is no safetensors, config or tokenizer file: vLLM would load a
    pickle, and transformers would run a module, that is next to them.
    """
    try:
        files = tuple(
            WeightFile(str(f["name"]), int(f["size_bytes"]), str(f["sha256"]))
            for f in json.loads(data)["files"]
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise WeightError(f"{where} is not a manifest ({type(error).__name__}: {error})") from None
    for file in files:
        if not is_plain_filename(file.name.removeprefix(f"{CHAT_TEMPLATES}/")):
            raise WeightError(f"{where} names {file.name!r}, which is not a plain file name")
        if not is_allowed(file.name):
            raise WeightError(
                f"{where} names {file.name!r}, and weights have no file of that name; it is refused"
            )
    return Manifest(files)


def is_allowed(name: str) -> bool:
    """Whether weights may have a file of this name: a config, a tokenizer's file, or tensors."""
    directory, _, template = name.rpartition("/")
    if directory:
        return directory == CHAT_TEMPLATES and template.endswith(".jinja")
    return name in ALLOWED_FILE_NAMES or name.endswith(".safetensors")


def tokenizer_files(directory: Path) -> list[str]:
    """The names of the tokenizer's files that a model directory has. Raises OSError."""
    named = sorted(path.name for path in (directory / CHAT_TEMPLATES).glob("*.jinja"))
    names = [*TOKENIZER_FILES, *(f"{CHAT_TEMPLATES}/{name}" for name in named)]
    return [name for name in names if (directory / name).is_file()]


def is_plain_filename(name: str) -> bool:
    """Whether the name is a file name that stays in its directory."""
    return name not in ("", ".", "..", MANIFEST) and not set(name) & set("/\\\0")


def differences(expected: Iterable[WeightFile], found: Iterable[WeightFile]) -> list[str]:
    """The differences between a copy and what is expected, by file. Empty if there are none."""
    copies = {file.name: file for file in found}
    problems: list[str] = []
    for file in expected:
        copy = copies.get(file.name)
        if copy is None:
            problems.append(f"{file.name} is missing")
        elif copy != file:
            announced = f"{file.size_bytes} bytes with sha256 {file.sha256}"
            problems.append(
                f"{file.name} has {copy.size_bytes} bytes with sha256 {copy.sha256}, announced are"
                f" {announced}"
            )
    return problems
