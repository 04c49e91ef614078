"""`python -m tests.deploy.manifests`: writes topics, users and parts of the Kubernetes overlays
again, from their run files, as `streamrl topics render`, `streamrl topics acls --render` and
`streamrl render --on kubernetes` print them.
"""

from __future__ import annotations

from pathlib import Path

from streamrl.config import run_file
from streamrl.run.engines import kubernetes

OVERLAYS = Path(__file__).parents[2] / "deploy" / "kubernetes" / "overlays"


def main() -> None:
    for file in sorted(OVERLAYS.glob("*/run.yaml")):
        for name, text in kubernetes.files(run_file.load(file)).items():
            (file.parent / name).write_text(text)


if __name__ == "__main__":
    main()
