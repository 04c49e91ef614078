"""Each image has what its services need: their commands, with nothing else to import than what the
image installs.
"""

from __future__ import annotations

import json
import subprocess
import tomllib
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.composed import resolved
from tests.deploy.images import ROOT, environment, installed_from, pins
from tests.deploy.kubectl import render
from tests.support.rooms import ROOMS

RUN = "/etc/streamrl/run.yaml"
# Each command in turn: how it ends, and whether its room was there. The broker's certificate is
# missing, so that nobody waits for the broker.
START = """
import json, signal, sys
from streamrl.cli.command import cli
ends = []
for words, module in json.load(sys.stdin):
    try:
        cli.main(words)
    except SystemExit as end:
        ends.append([end.code, module in sys.modules])
json.dump(ends, open(sys.argv[1], "w"))
"""
CORE_EXTRAS = {
    "core": {"s3", "gateway"},
    "envs": {"s3", "gateway", "envs"},
    "learner": {"s3", "gateway", "learner"},
    "learner-gpu": {"s3", "gateway", "learner", "gpu"},
}


def services() -> dict[str, dict[str, tuple[str, ...]]]:
    """What is started in each image: the commands of compose and of Kubernetes, by image
    and part.
    """
    found: dict[str, dict[str, tuple[str, ...]]] = defaultdict(dict)
    for name, service in resolved("cpu", "gpu", "scorer", "evaluator")["services"].items():
        if name != "kafka":
            found[service["build"]["target"]][name] = tuple(service["command"])
    for overlay in ("small", "production"):
        for manifest in render(ROOT / "deploy" / "kubernetes" / "overlays" / overlay):
            if (
                manifest["kind"] in ("Deployment", "StatefulSet", "Job")
                and manifest["metadata"]["name"] != "finish"
            ):
                (container,) = manifest["spec"]["template"]["spec"]["containers"]
                image = container["image"].rpartition("/")[2].partition(":")[0]
                command = tuple(word.replace("$(POD_INDEX)", "0") for word in container["command"])
                found[image][f"{overlay}/{manifest['metadata']['name']}"] = command
    return found


@pytest.fixture(scope="module")
def started(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, dict[str, tuple[int, bool, str]]]:
    """By image and service: exit code, whether the room was imported, what was said."""
    work = tmp_path_factory.mktemp("images")
    run = yaml.safe_load((ROOT / "deploy/kubernetes/overlays/production/run.yaml").read_text())
    nobody = {
        "bootstrap.servers": "127.0.0.1:9",
        "security.protocol": "SSL",
        "ssl.ca.location": str(work / "missing.crt"),
    }
    here = {
        "kafka": nobody,
        "runs_dir": str(work),
        "metrics": {"serve": False},
        "weights": {},
        "model": {"max_seq_len": 2048},
    }
    (work / "run.yaml").write_text(yaml.safe_dump({**run, **here}))

    def start(image: str, commands: dict[str, tuple[str, ...]]) -> dict[str, tuple[int, bool, str]]:
        lists = installed_from(image, work / f"{image}-build")
        python = environment(work / image, [ROOT / name for name in lists])
        distinct = list(dict.fromkeys(commands.values()))
        asked = [
            (
                [str(work / "run.yaml") if w == RUN else w for w in c[1:]],
                f"streamrl.{ROOMS.get(c[1], c[1]).replace('/', '.')}.process",
            )
            for c in distinct
        ]
        given = {
            "POD_IP": "127.0.0.1",
            "STREAMRL_INFERENCE_KEY": "key",
            "PATH": f"{python.parent}:/usr/bin:/bin",
            "HOME": str(work),
        }
        noted = work / f"{image}.json"
        program = [python, "-c", START, noted]
        done = subprocess.run(
            program, input=json.dumps(asked), capture_output=True, text=True, env=given, cwd=work
        )
        assert done.returncode == 0, done.stderr
        ends: dict[tuple[str, ...], Any] = dict(
            zip(distinct, json.loads(noted.read_text()), strict=True)
        )
        return {name: (*ends[command], done.stderr) for name, command in commands.items()}

    with ThreadPoolExecutor() as pool:
        return dict(zip(found := services(), pool.map(start, found, found.values()), strict=True))


def test_every_service_starts_with_what_its_image_installs(
    started: dict[str, dict[str, tuple[int, bool, str]]],
):
    assert {"core", "learner", "inference", "env-server"} == set(started)
    for image, services in started.items():
        for name, (exit_code, imported, said) in services.items():
            assert "is not installed" not in said, f"{image}, {name}: {said}"
            assert exit_code == 2 and (imported or name == "topics"), (
                f"{image}, {name} ends with {exit_code}: {said}"
            )


def needed(extras: set[str]) -> set[str]:
    """What pyproject.toml asks for with these extras, and what that needs: by the metadata of what
    is installed here.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    roots = [
        *project["dependencies"],
        *(line for extra in extras for line in project["optional-dependencies"][extra]),
    ]
    found = set[tuple[str, str]]()
    waiting = [
        (canonicalize_name(r.name), e) for r in map(Requirement, roots) for e in ("", *r.extras)
    ]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in found:
            continue
        found.add((name, extra))
        for requirement in map(Requirement, requires(name) or ()):
            if not requirement.marker or requirement.marker.evaluate({"extra": extra}):
                waiting += [
                    (canonicalize_name(requirement.name), of) for of in ("", *requirement.extras)
                ]
    return {name for name, _ in found}


@pytest.mark.parametrize("name", ["core", "envs", "learner"])
def test_a_list_has_what_the_package_asks_for_in_the_versions_of_the_tests(name: str):
    listed = pins(ROOT / "requirements" / f"{name}.txt")
    tested = pins(ROOT / "requirements" / "main.txt")
    assert needed(CORE_EXTRAS[name]) == set(listed), "run make lock"
    assert listed.items() <= tested.items()


# which is an input
LISTS = sorted(
    set((ROOT / "requirements").glob("*.txt")) - {ROOT / "requirements" / "inference-overrides.txt"}
)


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_whatever_is_installed_has_a_hash(path: Path):
    blocks = path.read_text().replace("\\\n", "").splitlines()
    pinned = [line for line in blocks if not line.startswith("#")]
    assert pinned and all("==" in line and "--hash=sha256:" in line for line in pinned)
