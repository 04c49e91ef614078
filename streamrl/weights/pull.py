"""Pulls an announced version from the store: a verified copy of it, or a WeightError.

No name is trusted. What is pulled must come from the configured store, have nothing but weights in
it, and have the announced hash.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from streamrl.errors import WeightError, describe_error
from streamrl.records import AdapterCheck, PolicyVersion
from streamrl.weights.files import files_in, is_local, open_store, raise_if_different, read_manifest
from streamrl.weights.manifest import (
    ALLOWED_FILE_NAMES,
    CONFIG,
    MANIFEST,
    Manifest,
    StoredWeights,
    differences,
    is_plain_filename,
    to_bytes,
)


def pull(version: StoredWeights, store_root: str, destination: Path, link: bool = False) -> Path:
    """Copy an announced version, or what it stands on, to `destination`, and verify it on the way.
    If it is not what was announced, raises WeightError and leaves nothing.

    `store_root`: the configured store. A URI outside it is refused. `link`: for callers that only
    read; files of this user on the same file system are hard-linked instead of copied, and stay
    when the store deletes its own name.
    """
    where = f"{_described(version)} at {version.uri}"
    fs, path = open_store(check_inside_store(version.uri, store_root))
    if is_local(fs):
        _refuse_links(Path(path), Path(open_store(store_root)[1]), where)
    manifest = read_manifest(fs, path)
    if (manifest.size_bytes, manifest.sha256) != (version.size_bytes, version.sha256):
        actual = f"{manifest.size_bytes} bytes with sha256 {manifest.sha256}"
        raise WeightError(
            f"{where}: its {MANIFEST} stands for {actual}, announced are {version.size_bytes} bytes"
            f" with sha256 {version.sha256}"
        )
    check_names(manifest, where)
    shutil.rmtree(destination, ignore_errors=True)
    try:
        destination.mkdir(parents=True)
        raise_if_different(
            differences(manifest.files, files_in(fs, path, manifest, destination, link)), where
        )
        check_settings(destination, where)
        (destination / MANIFEST).write_bytes(to_bytes(manifest))
    except WeightError:
        shutil.rmtree(destination, ignore_errors=True)
        raise
    except Exception as error:  # of this disk, or of the store: each kind has errors of its own
        shutil.rmtree(destination, ignore_errors=True)
        cause = getattr(error, "strerror", None) or describe_error(error)
        raise WeightError(
            f"{where} ({version.size_bytes} bytes) cannot be copied to {destination}: {cause}"
        ) from None
    return destination


def _described(stored: StoredWeights) -> str:
    if isinstance(stored, PolicyVersion):
        return f"version {stored.version}"
    if isinstance(stored, AdapterCheck):
        return "the check of adapters"
    return "the base of adapters"


def check_inside_store(uri: str, store_root: str) -> str:
    """Return the URI if it lies in the store and has only plain names. Raises WeightError
    otherwise.
    """
    root = store_root.rstrip("/") + "/"
    child = uri.removeprefix(root).rstrip("/")
    if (
        not uri.startswith(root)
        or "%" in child
        or not all(is_plain_filename(name) for name in child.split("/"))
    ):
        raise WeightError(
            f"{uri} is not a version in the configured store {store_root}; it is refused"
        )
    return root + child


def _refuse_links(path: Path, root: Path, where: str) -> None:
    """Refuse symbolic links below the root, as the version or as one of its files. A link may lead
    anywhere, and change after the check.
    """
    steps = (*path.relative_to(root).parents, path.relative_to(root))
    links = [
        entry
        for entry in (
            *(root / step for step in steps if step.name),
            *(path.iterdir() if path.is_dir() else ()),
        )
        if entry.is_symlink()
    ]
    if links:
        raise WeightError(f"{where}: {links[0]} is a symbolic link; it is refused")


def check_names(manifest: Manifest, where: str) -> None:
    """Check that a version consists of safetensors, config and tokenizer files only. Raises
    WeightError.

    vLLM would load a pickle, and transformers would run a module, that lies next to them.
    """
    for file in manifest.files:
        if file.name not in ALLOWED_FILE_NAMES and not file.name.endswith(".safetensors"):
            raise WeightError(
                f"{where} has a file {file.name!r}, and weights have none of that name; it is"
                " refused"
            )


def check_settings(directory: Path, where: str) -> None:
    """Refuse a config.json that makes transformers load Python code. Raises WeightError."""
    try:
        settings = json.loads((directory / CONFIG).read_bytes())
    except (OSError, ValueError, RecursionError):  # then nobody can load it
        return
    if isinstance(settings, dict) and "auto_map" in settings:
        raise WeightError(
            f"{where}: {CONFIG} has an auto_map, which loads Python code; it is refused"
        )
