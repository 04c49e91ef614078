"""Pulls an announced version from the store: a verified copy of it, or a WeightError.

No name is trusted. What is pulled must come from the configured store, have nothing but weights in
it, and have the announced hash.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from streamrl.stream.records import AdapterCheck, PolicyVersion
from streamrl.system.errors import WeightError, describe_error
from streamrl.weights.files import open_version, read_manifest, verify
from streamrl.weights.manifest import CONFIG, MANIFEST, StoredWeights, to_bytes


def pull(version: StoredWeights, store_root: str, destination: Path, link: bool = False) -> Path:
    """Copy an announced version, or its base, to `destination`, and verify it on the way.
    If it is not what was announced, raises WeightError and leaves nothing.

    `store_root`: the configured store. A URI outside it is refused. `link`: for callers that only
    read; files of this user on the same file system are hard-linked instead of copied, and stay
    when the store deletes its own name.
    """
    where = f"{_described(version)} at {version.uri}"
    fs, path = open_version(version.uri, store_root)
    manifest = read_manifest(fs, path)
    if (manifest.size_bytes, manifest.sha256) != (version.size_bytes, version.sha256):
        actual = f"{manifest.size_bytes} bytes with sha256 {manifest.sha256}"
        raise WeightError(
            f"{where}: its {MANIFEST} describes {actual}, announced are {version.size_bytes} bytes"
            f" with sha256 {version.sha256}"
        )
    shutil.rmtree(destination, ignore_errors=True)
    try:
        destination.mkdir(parents=True)
        verify(fs, path, manifest, where, destination, link)
        (destination / MANIFEST).write_bytes(to_bytes(manifest))
        _check_settings(destination, where)
    except WeightError:
        shutil.rmtree(destination, ignore_errors=True)
        raise
    except Exception as error:  # of this disk, or of the store: each kind has its own errors
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


def _check_settings(directory: Path, where: str) -> None:
    """Refuse a config.json that makes transformers load Python code. Raises WeightError."""
    try:
        settings = json.loads((directory / CONFIG).read_bytes())
    except (OSError, ValueError, RecursionError):  # then no part can load it
        return
    if isinstance(settings, dict) and "auto_map" in settings:
        raise WeightError(
            f"{where}: {CONFIG} has an auto_map, which loads Python code; it is refused"
        )
