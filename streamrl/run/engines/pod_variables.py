"""The environment variables of a pod, and which Secret each of those that the run file refers to
comes from. A part has those that it needs and no others.
"""

from __future__ import annotations

from typing import Any

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.config.secrets import references
from streamrl.config.sections.envs import ServerEnv
from streamrl.config.topology import EVALS, INFERENCE, LEARNER, ORCHESTRATOR, SERVERS, Part
from streamrl.envs.sessions.settings import Gateway
from streamrl.run.orchestrator.placement import memory_variables
from streamrl.stream.log.kafka import acls

Source = dict[str, Any]
RUNS = "/var/lib/streamrl/runs"
GATEWAY = "gateway"  # the role that agents call, by a Service of its name
# The Secret of whatever has no Secret of its own. Its keys are the names of the variables.
VARIABLES = "streamrl-variables"
INDEX = {"fieldRef": {"fieldPath": "metadata.labels['apps.kubernetes.io/pod-index']"}}
ADDRESS = {"fieldRef": {"fieldPath": "status.podIP"}}


def variables(run: RunFile, part: Part) -> list[dict[str, Any]]:
    """The variables of the pod of a part, and of its numbered peers."""
    found: dict[str, Source] = {}
    if "--index" in part.options:
        found["POD_INDEX"] = {"valueFrom": INDEX}
    if part.role == LEARNER.name:
        # A version on its way to the store is larger than /tmp.
        found["TMPDIR"] = {"value": RUNS}
    for name, value in memory_variables(run, part).items():
        found[name] = {"value": value}
    if server := _server_env(run, part):
        url = f"http://{GATEWAY}:{run.settings_of(Gateway).port}"
        found["STREAMRL_GATEWAY_URL"] = {"value": url}
        for name in server.variables:
            # The image may have it instead.
            found[name] = _secret(VARIABLES, name, optional=True)
    for path, name in references(run.model_dump(mode="json")):
        if source := _source(run, part, path, name):
            found[name] = source
    return [{"name": name, **source} for name, source in found.items()]


def _source(run: RunFile, part: Part, path: tuple[str, ...], name: str) -> Source | None:
    """Where a part has the variable of a setting from; None: it does not read that setting."""
    role = topology.role_of(part)
    user = acls.user_name(run, f"{role.name}-{part.env}" if role.is_per_env else role.name)
    of_run = _secret(VARIABLES, name)
    match path:
        case ("kafka", "sasl.username"):
            return {"value": user}
        case ("kafka", "sasl.password"):
            return _secret(user, "password")  # Strimzi makes it.
        case ("kafka", *_):
            return of_run
        case ("inference", "host"):
            return {"valueFrom": ADDRESS} if topology.is_server(part) else None
        case ("inference", "api_key"):
            samples = SERVERS in role.consumes and role is not ORCHESTRATOR
            is_needed = topology.is_server(part) or (samples and not _server_env(run, part))
            return _secret("streamrl-inference", "key") if is_needed else None
        case ("inference", *_):  # keys of guests
            return of_run if role is INFERENCE else None
        case ("gateway", "signing_secret"):
            return _secret(f"streamrl-{GATEWAY}", "secret") if role.name == GATEWAY else None
        case ("envs", env, "api_key"):
            return _secret(f"streamrl-{GATEWAY}-{env}", "key") if part.env == env else None
        case ("envs", env, *_):
            return of_run if env in _envs(run, part) else None
        case ("eval", *_):
            return of_run if EVALS in role.produces else None
        case _:
            return of_run if role.name == path[0] else None


def _envs(run: RunFile, part: Part) -> list[str]:
    """The envs whose code and rewards a part runs."""
    if EVALS in topology.role_of(part).produces:
        return [own.env or name for name, own in run.eval.envs.items()]
    hosted = [env for env in topology.hosted_envs(run) if part.options[:1] == (run.envs[env].host,)]
    return hosted if part.role == topology.HOST.name else [part.env]


def _server_env(run: RunFile, part: Part) -> ServerEnv | None:
    """The env of a part whose processes are in another Python."""
    env = run.envs.get(part.env)
    return env if isinstance(env, ServerEnv) else None


def _secret(name: str, key: str, optional: bool = False) -> Source:
    reference = {"name": name, "key": key, **({"optional": True} if optional else {})}
    return {"valueFrom": {"secretKeyRef": reference}}
