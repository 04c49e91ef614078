"""Manifests of Kubernetes as YAML, whose strings kubectl reads as strings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

# What other readers than PyYAML take for a number or a truth value: 1e3 and 0o7 by YAML 1.2, y and
# n by YAML 1.1. It includes more than they do, since quotes do no harm.
_NO_STRING = re.compile(r"[-+.]?[0-9][0-9a-fxo_.,:+-]*|[-+.]?(inf|nan)|[yn]", re.IGNORECASE)


class _Dumper(yaml.SafeDumper):
    """Writes whatever is there twice twice, and no references."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "'" if _NO_STRING.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _string)


def to_yaml(manifests: Iterable[Mapping[str, Any]]) -> str:
    return yaml.dump_all(
        manifests, Dumper=_Dumper, sort_keys=False, explicit_start=True, width=1_000
    )
