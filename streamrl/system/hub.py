"""Models and data sets of the Hugging Face hub, by the names that a run file has for them.

`OWNER/NAME` is the newest commit of a repository; `OWNER/NAME@REVISION` is a branch, a tag or a
commit. Files are kept in the library's own cache (`HF_HOME`), and what is there whole is used
without a network. A resolved run file has the commit, so that a replay reads the same files.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Literal, NamedTuple

from streamrl.system.errors import HubError, ModelError, describe_error

NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?", re.ASCII
)
COMMIT = re.compile(r"[0-9a-f]{40}")
WHOLE = ".streamrl"  # Directory in a repository's cache with a file for each commit that is whole.
# What a model directory needs. Weights in other formats, code and the files of other tools are not
# downloaded.
MODEL_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
NO_MODEL_FILES = [
    "*/*.safetensors",
    "*/*.json",
    "*/*.txt",
    "*/*.model",
    "consolidated*.safetensors",
    "*.bin.index.json",
]
NO_DATASET_FILES = ["*.py"]
# Weights of an earlier upload that were cut into other files.
STALE_FILES = ["*.safetensors", "*.safetensors.index.json"]

ANSWER_LIMIT_S = 30.0
TOO_MANY_REQUESTS = 429

Kind = Literal["model", "dataset"]


class HubName(NamedTuple):
    """The name of a repository on the hub."""

    repo: str  # OWNER/NAME
    revision: str = ""  # A branch, a tag or a commit. Empty: the newest commit of the main branch.

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo


class Snapshot(NamedTuple):
    """The files of a repository at one commit, on this machine."""

    name: HubName  # Its revision is the commit.
    directory: Path


def parse(text: str) -> HubName | None:
    """The repository that the text names, or None if it cannot be the name of one."""
    match = NAME.fullmatch(text)
    if match is None or "--" in match["repo"] or ".." in text:
        return None
    return HubName(match["repo"], match["revision"] or "")


def fetch(name: HubName, kind: Kind) -> Snapshot:
    """The files of a repository. Those that are not in the cache are downloaded, with a progress
    bar on stderr. If the hub cannot be reached, what the cache has of that revision is used.

    Raises HubError if there is no such repository or revision, if the hub refuses access to it, and
    if it can neither be reached nor found in the cache.
    """
    import huggingface_hub
    from huggingface_hub import constants

    if COMMIT.fullmatch(name.revision) and (whole := _whole_snapshot(name, kind)):
        return whole
    revision = name.revision or constants.DEFAULT_REVISION
    try:
        is_reachable = _is_reachable(name.repo, kind, revision)
        directory = huggingface_hub.snapshot_download(
            name.repo,
            repo_type=kind,
            revision=revision,
            local_files_only=not is_reachable,
            allow_patterns=MODEL_FILES if kind == "model" else None,
            ignore_patterns=NO_MODEL_FILES if kind == "model" else NO_DATASET_FILES,
        )
    except Exception as error:
        # The library raises its own errors, those of HTTP libraries, and OSError.
        raise HubError(f"{kind} {name}: {_explanation(error, name, kind)}") from None
    snapshot = Snapshot(name._replace(revision=Path(directory).name), Path(directory))
    if is_reachable:
        _mark_whole(snapshot, kind)
    return snapshot


def _is_reachable(repo: str, kind: Kind, revision: str) -> bool:
    """Whether the hub can be asked for a revision. Without it, `snapshot_download` returns what the
    cache has of a commit, which an interrupted download may have left in part.

    Raises the errors of huggingface_hub for a repository or a revision that the hub does not give.
    """
    import huggingface_hub
    from huggingface_hub import constants
    from requests.exceptions import ConnectionError, Timeout

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        huggingface_hub.HfApi().repo_info(
            repo, repo_type=kind, revision=revision, timeout=ANSWER_LIMIT_S
        )
    except (ConnectionError, Timeout):
        return False
    except huggingface_hub.errors.HfHubHTTPError as error:
        if _status(error) < 500 and _status(error) != TOO_MANY_REQUESTS:
            raise
        return False
    return True


def model_directory(path: str, setting: str) -> Path:
    """The directory of a model that a run file names, by its path or by its name on the hub.

    `setting` is named in the error. Raises ModelError for what is neither, and HubError as `fetch`
    does.
    """
    if Path(path).is_dir():
        return Path(path)
    name = parse(path)
    if name is None:
        raise ModelError(
            f"{setting}: model directory {path} does not exist; give a Hugging Face directory, or"
            " the name of a model on the hub as OWNER/NAME or OWNER/NAME@REVISION"
        )
    return fetch(name, "model").directory


def local_directory(path: str) -> Path | None:
    """The directory of a model as `model_directory` gives it, or None if it is not on this machine.
    Nothing is downloaded.
    """
    if Path(path).is_dir():
        return Path(path)
    name = parse(path)
    whole = _whole_snapshot(name, "model") if name else None
    return whole.directory if whole else None


def check_may_push(repo: str) -> None:
    """Check that a model can be uploaded to this repository, and make it, private, if there is none
    of this name. Raises HubError.
    """
    import huggingface_hub

    name = parse(repo)
    if name is None or name.revision:
        raise HubError(f"{repo} is not the name of a repository on the hub; write it as OWNER/NAME")
    try:
        api = huggingface_hub.HfApi()
        if not api.repo_exists(repo):
            api.create_repo(repo, private=True)
    except Exception as error:
        raise HubError(f"model {repo}: {_explanation(error, name, 'model')}") from None


def push(directory: Path, repo: str, message: str) -> str:
    """Upload the files of a model directory as one commit, and return the commit's URL. Weights of
    an earlier version are replaced. Raises HubError.
    """
    import huggingface_hub

    try:
        done = huggingface_hub.HfApi().upload_folder(
            repo_id=repo,
            folder_path=directory,
            commit_message=message,
            delete_patterns=STALE_FILES,
        )
    except Exception as error:
        raise HubError(f"model {repo}: {_explanation(error, HubName(repo), 'model')}") from None
    return done.commit_url


def _whole_snapshot(name: HubName, kind: Kind) -> Snapshot | None:
    """The files of a commit, if an earlier `fetch` has downloaded all of them."""
    cache = _cache(name, kind)
    directory = cache / "snapshots" / name.revision
    is_whole = (cache / WHOLE / name.revision).is_file() and directory.is_dir()
    return Snapshot(name, directory) if is_whole else None


def _mark_whole(snapshot: Snapshot, kind: Kind) -> None:
    """Note that all files of a commit are there, which the cache itself does not record."""
    mark = _cache(snapshot.name, kind) / WHOLE / snapshot.name.revision
    # A cache that is shared may be read-only. Then the hub is asked the next time too.
    with contextlib.suppress(OSError):
        mark.parent.mkdir(exist_ok=True)
        mark.touch()


def _cache(name: HubName, kind: Kind) -> Path:
    """Directory of a repository in the library's cache."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name.repo, repo_type=kind)


def _explanation(error: Exception, name: HubName, kind: Kind) -> str:
    """What the hub's answer means, and what to do."""
    from huggingface_hub import constants, errors
    from requests.exceptions import ConnectionError, Timeout

    if isinstance(error, ConnectionError | Timeout):
        return f"{constants.ENDPOINT} cannot be reached; try again where there is a network"
    if isinstance(error, errors.GatedRepoError):
        pages = "datasets/" if kind == "dataset" else ""
        return (
            f"access is restricted; accept its terms at {constants.ENDPOINT}/{pages}{name.repo},"
            " and put a token of that account into HF_TOKEN"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"it has no revision {name.revision!r}; give a branch, a tag or a commit of it"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"no such {kind} on {constants.ENDPOINT}, and no such directory here; check the name,"
            " and set HF_TOKEN if the repository is private"
        )
    if isinstance(error, errors.HfHubHTTPError) and _status(error) in (401, 403):
        return (
            f"{constants.ENDPOINT} refuses access ({_status(error)}); set HF_TOKEN to a token that"
            " may read it, and write it for --push"
        )
    if isinstance(error, errors.HfHubHTTPError) and error.response is not None:
        return f"{constants.ENDPOINT} answers {describe_error(error)}; try again later"
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return (
            f"it is not in the cache {constants.HF_HUB_CACHE}, and {constants.ENDPOINT} cannot be"
            " reached; download it where there is a network (`streamrl fetch RUN`), or give a"
            " directory"
        )
    return f"the transfer failed ({describe_error(error)}); try again"


def _status(error: Exception) -> int:
    response = getattr(error, "response", None)
    return getattr(response, "status_code", 0)
