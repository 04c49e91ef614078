"""What a part answers over HTTP, as Prometheus asks for it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from streamrl.config.run_file import RunFile
from tests.support.waiting import patience, until

TOPICS = {"in": 1, "metrics": 1}


def get(url: str | urllib.request.Request) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=patience(30)) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def metrics_urls(run: RunFile, part: str, paths: int = 1) -> list[str]:
    """The URLs that Prometheus is told of."""
    file = run.directory.parent / ".targets" / f"small.{part}.json"
    until(lambda: file.exists() and len(json.loads(file.read_text())) >= paths)
    entries = json.loads(file.read_text())
    assert all(
        entry["labels"]["run"] == "small" and entry["labels"]["part"] == part for entry in entries
    )
    return [
        f"http://{entry['targets'][0]}{entry['labels'].get('__metrics_path__', '/metrics')}"
        for entry in entries
    ]


def samples(page: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(page)
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in families
        for s in family.samples
    }
