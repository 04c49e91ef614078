"""Attacks by the run file of somebody else: on an administrator, on an importer, on another run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from streamrl.config.run_file import RunFile, parse
from streamrl.extensions.recordings.archive import run_file_for_import
from streamrl.stream.log.kafka import acls
from streamrl.stream.log.parquet import ExportManifest, FileLog, write_manifest
from streamrl.system.errors import ConfigError
from tests.attacks.table import Attack

MINE: dict[str, Any] = {"run": "nice", "envs": {"copy-digits": {}}}


def accepted(**settings: Any) -> RunFile | None:
    try:
        return parse({**MINE, **settings})
    except ConfigError:
        return None


def variable_as_client_id(directory: Path) -> str:
    run = accepted(kafka={"bootstrap.servers": "evil:9092", "client.id": "env:AWS_SECRET"})
    return "a variable is sent as client.id" if run else ""


def password_in_clear(directory: Path) -> str:
    run = accepted(
        kafka={
            "bootstrap.servers": "evil:9092",
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.username": "env:STREAMRL_KAFKA_USER",
            "sasl.password": "env:STREAMRL_KAFKA_PASSWORD",
        }
    )
    return "a password would be sent in clear" if run else ""


def program_of_an_export(directory: Path) -> str:
    export = directory / "export"
    export.mkdir()
    hostile: dict[str, Any] = {
        "run": "nice",
        "envs": {
            "a": {"kind": "export/task.py", "python": "/bin/sh", "variables": ["HOME"]},
            "j": {
                "kind": "copy-digits",
                "rewards": {"q": {"kind": "judge", "params": {"base_url": "http://evil.example"}}},
            },
        },
        "weights": {"store": "s3://evil"},
        "learner": {"checkpoint_copies": "http://evil.example"},
    }
    write_manifest(export, ExportManifest("nice", hostile, {}))
    text = run_file_for_import(FileLog(export), "mine").to_json()
    found = [word for word in ("task.py", "/bin/sh", "HOME", "evil") if word in text]
    return f"{found} are kept" if found else ""


def rights_over_another_run(directory: Path) -> str:
    run = accepted(learner={"lora": {}}, inference={"also_serves": {"team-b": {}}})
    if run is None:
        return "a host of guests is refused"
    lines = [line for line in acls.in_words(run) if "team-b" in line]
    return lines[0] if lines else ""


def secret_under_another_name(directory: Path) -> str:
    secret = "sk-" + "a1b2c3d4" * 5
    for settings in (
        {"envs": {"copy-digits": {"params": {"note": secret}}}},
        {"envs": {"copy-digits": {"params": {"headers": {"Authorization": "Bearer x"}}}}},
        {"inference": {"extra_args": ["--config", f'{{"key": "{secret}"}}']}},
    ):
        if accepted(**settings):
            return f"a secret is kept in {sorted(settings)[0]}"
    return ""


ATTACKS = [
    Attack("F9", "a variable as client.id", "config/secrets.py", variable_as_client_id),
    Attack("F9", "a password in clear", "config/addresses.py", password_in_clear),
    Attack(
        "F3",
        "a program of an export",
        "extensions/recordings/foreign_settings.py",
        program_of_an_export,
    ),
    Attack("F8", "rights over another run", "stream/log/kafka/acls.py", rights_over_another_run),
    Attack("F19", "a secret by another name", "config/secrets.py", secret_under_another_name),
]
