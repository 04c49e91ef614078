"""What an image of deploy/docker/Dockerfile has installed, as an environment of this machine: no
container, and no network.

The build stage's own commands are run by a shell in which `uv` only notes what it was told. What
its list of versions names is then linked out of the environment of the tests, which has the same
versions; nothing else can be imported.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
NOTED = '#!/bin/sh\necho "$@" >> "$NOTES"\n'


def stages() -> dict[str, str]:
    """The text of each stage of the Dockerfile, by its name."""
    return dict(
        re.findall(
            r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM|\Z)",
            DOCKERFILE.read_text(),
            re.MULTILINE | re.DOTALL,
        )
    )


def installed_from(target: str, work: Path, **arguments: str) -> list[str]:
    """The lists that the environment of an image is installed from: what its build stage gives `uv
    pip sync`.
    """
    (stage,) = re.findall(r"COPY --from=(\S+) /opt/streamrl /opt/streamrl", stages()[target])
    text = re.sub(r"\\\n", " ", stages()[stage])
    given = dict(re.findall(r'^ARG (\w+)="?(.*?)"?$', text, re.MULTILINE)) | arguments
    work.mkdir()
    notes = work / "notes"
    notes.touch()
    program = work / "uv"
    program.write_text(NOTED)
    program.chmod(0o755)
    environment = {**given, "PATH": f"{work}{os.pathsep}{os.environ['PATH']}", "NOTES": str(notes)}
    for command in re.findall(r"^RUN (.*)$", text, re.MULTILINE):
        subprocess.run(["/bin/sh", "-euc", command], check=True, env=environment, cwd=ROOT)
    calls = [line.split() for line in notes.read_text().splitlines()]
    assert calls[-1][:3] == ["pip", "install", "--no-deps"] and calls[-1][-1] == ".", (
        "streamrl itself comes last, without what it needs"
    )
    for call in calls[:-1]:
        assert call[:3] == ["pip", "sync", "--require-hashes"], call
    return [call[-1] for call in calls[:-1]]


def pins(path: Path) -> dict[str, str]:
    """Name -> version of a list, where they are for this machine."""
    lines = (
        line.removesuffix("\\").strip()
        for line in path.read_text().splitlines()
        if re.match(r"[\w.-]+==", line)
    )
    found = [Requirement(line) for line in lines]
    return {
        canonicalize_name(r.name): str(r.specifier).removeprefix("==")
        for r in found
        if not r.marker or r.marker.evaluate()
    }


def environment(directory: Path, lists: Iterable[Path]) -> Path:
    """An environment with what these lists name, and streamrl. Returns its Python."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", "--symlinks", directory], check=True
    )
    (site,) = directory.glob("lib/python*/site-packages")
    here = {
        canonicalize_name(distribution.name): distribution
        for distribution in distributions()
        if distribution.files
    }
    tops: dict[str, set[str]] = {name: _tops(distribution) for name, distribution in here.items()}
    owners: dict[str, int] = defaultdict(int)
    for names in tops.values():
        for top in names:
            owners[top] += 1
    for name, version in {
        name: version for file in lists for name, version in pins(file).items()
    }.items():
        distribution = here[name]
        assert distribution.version == version, (
            f"{name} {distribution.version} is installed here, not {version}; run make setup"
        )
        for top in tops[name]:
            if owners[top] == 1:
                (site / top).symlink_to(Path(str(distribution.locate_file(top))))
        for file in distribution.files or ():
            if owners[file.parts[0]] > 1:  # a namespace that several packages share
                link = site / file
                link.parent.mkdir(parents=True, exist_ok=True)
                if not link.exists():
                    link.symlink_to(Path(str(distribution.locate_file(file))))
    for name in ("streamrl", "topics"):
        (site / name).symlink_to(ROOT / name)
    return directory / "bin" / "python"


def _tops(distribution: Distribution) -> set[str]:
    """Names that a distribution has in site-packages."""
    return {
        file.parts[0]
        for file in distribution.files or ()
        if file.parts[0] not in ("..", "__pycache__")
    }
