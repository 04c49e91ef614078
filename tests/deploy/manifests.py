"""`python -m tests.deploy.manifests`: writes topics, users and envs of the Kubernetes overlays
again, from their run files, as `streamrl topics render`, `streamrl topics acls --render` and
`streamrl render --on kubernetes` print them.
"""

from __future__ import annotations

from pathlib import Path

from streamrl.config import run_file
from streamrl.run.engines import kubernetes
from streamrl.stream.log import topics
from streamrl.stream.log.kafka import acls

OVERLAYS = Path(__file__).parents[2] / "deploy" / "kubernetes" / "overlays"


def main() -> None:
    for file in sorted(OVERLAYS.glob("*/run.yaml")):
        run = run_file.load(file)
        (file.parent / "topics.yaml").write_text(topics.render(run))
        (file.parent / "users.yaml").write_text(acls.render(run))
        (file.parent / "envs.yaml").write_text(kubernetes.render(run))


if __name__ == "__main__":
    main()
