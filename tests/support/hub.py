"""A Hugging Face hub on loopback: the endpoints that huggingface_hub needs to list, download and
upload. Repositories are dicts in memory.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from huggingface_hub import constants, file_download
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from streamrl.system.http_server import HttpServerThread, open_listener, url_of

MAIN = "main"
TOKEN = "hf_fits"
Files = dict[str, bytes]


@dataclass
class Repository:
    """All commits of a repository, and what its branches and tags name."""

    commits: dict[str, Files] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False

    def commit(self, files: Mapping[str, bytes], revision: str = MAIN) -> str:
        """Make these the files of a branch, and return the commit."""
        named = json.dumps({name: data.hex() for name, data in sorted(files.items())})
        commit = hashlib.sha1(f"{len(self.commits)} {named}".encode()).hexdigest()
        self.commits[commit] = dict(files)
        self.revisions[revision] = commit
        return commit

    def find(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.revisions.get(revision)


@dataclass
class Hub:
    """The hub's repositories, and what clients have asked it for."""

    url: str = ""
    models: dict[str, Repository] = field(default_factory=dict)
    datasets: dict[str, Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)  # "METHOD path", in order
    outage: int = 0  # HTTP status that all requests get; 0: the answers that they ask for
    uploads: Files = field(default_factory=dict)  # LFS objects by their SHA-256

    def model(self, repo: str, files: Mapping[str, bytes], **options: Any) -> str:
        """Make a model with these files, and return its commit."""
        return self.models.setdefault(repo, Repository(**options)).commit(files)

    def dataset(self, repo: str, files: Mapping[str, bytes]) -> str:
        """Make a data set with these files, and return its commit."""
        return self.datasets.setdefault(repo, Repository()).commit(files)

    def app(self) -> Starlette:
        kinds = {"models": ("", self.models), "datasets": ("/datasets", self.datasets)}
        routes = list[Route]()
        for kind, (prefix, repositories) in kinds.items():
            handlers = _Handlers(self, repositories)
            api = f"/api/{kind}/{{owner}}/{{name}}"
            page = f"{prefix}/{{owner}}/{{name}}"
            routes += [
                Route(api, handlers.info),
                Route(f"{api}/revision/{{revision:path}}", handlers.info),
                Route(f"{api}/tree/{{revision:path}}", handlers.tree),
                Route(f"{api}/preupload/{{revision:path}}", handlers.preupload, methods=["POST"]),
                Route(f"{api}/commit/{{revision:path}}", handlers.commit, methods=["POST"]),
                Route(f"{page}/resolve/{{revision}}/{{path:path}}", handlers.resolve),
                Route(f"{page}.git/info/lfs/objects/batch", handlers.batch, methods=["POST"]),
            ]
        creation = _Handlers(self, self.models).create
        upload = _Handlers(self, self.models).upload
        return Starlette(
            routes=[
                Route("/api/repos/create", creation, methods=["POST"]),
                Route("/upload/{oid}", upload, methods=["PUT"]),
                *routes,
            ]
        )


class _Handlers:
    def __init__(self, hub: Hub, repositories: dict[str, Repository]) -> None:
        self.hub = hub
        self.repositories = repositories

    def _find(self, request: Request) -> tuple[Repository, str] | Response:
        """The repository and the commit that a path names, or the refusal."""
        self.hub.requests.append(f"{request.method} {request.url.path}")
        if self.hub.outage:
            return Response(status_code=self.hub.outage)
        at = request.path_params
        repository = self.repositories.get(f"{at['owner']}/{at['name']}")
        if repository is None or (repository.private and not _may_write(request)):
            return _refusal(401, "RepoNotFound", "Repository Not Found")
        commit = repository.find(at.get("revision", MAIN))
        if commit is None:
            return _refusal(404, "RevisionNotFound", "Invalid rev id")
        return repository, commit

    async def info(self, request: Request) -> Response:
        found = self._find(request)
        if isinstance(found, Response):
            return found
        repository, commit = found
        at = request.path_params
        siblings = [{"rfilename": name} for name in sorted(repository.commits[commit])]
        repo = f"{at['owner']}/{at['name']}"
        return JSONResponse(
            {"id": repo, "sha": commit, "private": repository.private, "siblings": siblings}
        )

    async def tree(self, request: Request) -> Response:
        found = self._find(request)
        if isinstance(found, Response):
            return found
        repository, commit = found
        return JSONResponse(
            [
                {"type": "file", "path": name, "size": len(data), "oid": _git_oid(data)}
                for name, data in sorted(repository.commits[commit].items())
            ]
        )

    async def resolve(self, request: Request) -> Response:
        found = self._find(request)
        if isinstance(found, Response):
            return found
        repository, commit = found
        if repository.gated:
            return _refusal(403, "GatedRepo", "Access to this repository is restricted")
        data = repository.commits[commit].get(request.path_params["path"])
        if data is None:
            return _refusal(404, "EntryNotFound", "Entry not found")
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": commit}
        return Response(data, headers=headers)

    async def create(self, request: Request) -> Response:
        self.hub.requests.append(f"{request.method} {request.url.path}")
        if not _may_write(request):
            return JSONResponse({"error": "Invalid credentials"}, 401)
        asked = await request.json()
        repo = f"{asked['organization']}/{asked['name']}"
        self.repositories[repo] = Repository(private=asked.get("private", False))
        self.repositories[repo].commit({})
        return JSONResponse({"url": f"{self.hub.url}/{repo}"})

    async def preupload(self, request: Request) -> Response:
        found = self._find(request)
        if isinstance(found, Response):
            return found
        files = (await request.json())["files"]
        kinds = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
            }
            for file in files
        ]
        return JSONResponse({"files": kinds})

    async def batch(self, request: Request) -> Response:
        self.hub.requests.append(f"{request.method} {request.url.path}")
        objects = [
            {**file, "actions": {"upload": {"href": f"{self.hub.url}/upload/{file['oid']}"}}}
            for file in (await request.json())["objects"]
        ]
        return JSONResponse({"transfer": "basic", "objects": objects})

    async def upload(self, request: Request) -> Response:
        data = await request.body()
        assert hashlib.sha256(data).hexdigest() == request.path_params["oid"]
        self.hub.uploads[request.path_params["oid"]] = data
        return Response()

    async def commit(self, request: Request) -> Response:
        found = self._find(request)
        if isinstance(found, Response):
            return found
        if not _may_write(request):
            return JSONResponse({"error": "Forbidden"}, 403)
        repository, before = found
        files = dict(repository.commits[before])
        for line in (await request.body()).splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                files[value["path"]] = self.hub.uploads[value["oid"]]
            elif item["key"] == "deletedFile":
                del files[value["path"]]
        commit = repository.commit(files)
        at = request.path_params
        url = f"{self.hub.url}/{at['owner']}/{at['name']}/commit/{commit}"
        return JSONResponse({"commitUrl": url, "commitOid": commit, "success": True})


def _may_write(request: Request) -> bool:
    return request.headers.get("authorization") == f"Bearer {TOKEN}"


def _refusal(status: int, code: str, message: str) -> Response:
    headers = {"X-Error-Code": code, "X-Error-Message": message}
    return JSONResponse({"error": message}, status, headers=headers)


def _git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def serving_hub() -> Iterator[Hub]:
    """A hub that answers for as long as the block lasts. `HF_ENDPOINT=hub.url` of another process
    names it.
    """
    hub = Hub()
    listener = open_listener("127.0.0.1", 0, "the hub", "its address", "")
    hub.url = url_of(listener)
    with HttpServerThread(hub.app(), listener, stop_timeout_s=1):
        yield hub


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str, cache: str) -> None:
    """Let this process use the hub at `url`, with a cache of its own, and no token."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    files = "/{repo_id}/resolve/{revision}/{filename}"
    # file_download has a name of its own for the constant
    monkeypatch.setattr(file_download, "HUGGINGFACE_CO_URL_TEMPLATE", url + files)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", cache)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", f"{cache}/token")
    monkeypatch.delenv("HF_TOKEN", raising=False)
