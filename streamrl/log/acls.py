"""Who may do what on the broker: each role of a run, as a user of its own, what its parts read and
write, and nothing else.

All of it follows from `config/topology.py`. A user is named `<run>.<role>`: `env-<name>` (each env
has its own), buffer, batcher, scorer, learner, inference, evaluator, orchestrator. Besides, the
user `auditor` reads everything (status, audit, replay, export), and `operator` does everything
within the run, such as `streamrl topics apply` and `streamrl up`. Writing idempotently needs no rule
of its own: since Kafka 2.8 whoever may write to a topic may do it idempotently.
"""

# pyright: reportPrivateImportUsage=false
# confluent_kafka.admin passes its names on without saying so

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import yaml
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
)

from streamrl.config import topology
from streamrl.config.run_file import RunFile
from streamrl.config.topology import Role
from streamrl.errors import AccessDenied, ConfigError
from streamrl.log import topics
from streamrl.log.kafka import READER
from streamrl.log.kafka_admin import Admin, access_denied, call_with_retries
from streamrl.log.topics import Topic

CALL_TIMEOUT_S = 10.0

# Of an env's user on each broker: it may be taken over, or written by somebody else, and is to
# leave room for the others. The byte rates are far above what rollouts need (docs/operations.md,
# Sizing); the percentage is of one thread of the broker.
QUOTAS = {"producerByteRate": 20_000_000, "consumerByteRate": 20_000_000, "requestPercentage": 50}


class User(NamedTuple):
    """All parts of a role; of a role that has parts for each env, those of one env."""

    name: str  # on the broker: after the run
    role: Role
    identities: tuple[str, ...]  # under which it writes transactions
    env: str = ""  # the only one that it has to do with


class Rule(NamedTuple):
    """A user may do these things with what has that name, or a name that begins so."""

    resource: Literal["topic", "group", "transactional-id"]
    name: str  # on the broker: with the run
    # Kafka's: READ, WRITE, DESCRIBE, ALL; the first two include the third
    operations: tuple[str, ...]
    prefixed: bool = False

    def __str__(self) -> str:
        return (
            f"{','.join(self.operations):10} {self.resource}"
            f" {self.name}{'*' if self.prefixed else ''}"
        )


def user_name(run: RunFile, name: str) -> str:
    """The name a user goes by on the broker."""
    return f"{run.run}.{name}"


def users(run: RunFile) -> list[User]:
    """The users of the run's parts, in the order of the loop."""
    found = list[User]()
    for role in topology.ROLES:
        parts = role.parts(run) if role.is_transactional else ()
        if not role.is_per_env:
            found.append(User(role.name, role, tuple(part.identity for part in parts)))
            continue
        for env in run.envs:
            own = tuple(part.identity for part in parts if part.env == env)
            outside = (topology.outside_identity(env),)  # of an env that the run does not start
            found.append(User(f"{role.name}-{env}", role, own or outside, env))
    return found


def rules(run: RunFile) -> dict[str, list[Rule]]:
    """What each user is to be allowed, by its name."""
    whole = f"{run.run}."  # a run's name has no dot, so no other run's begins like that
    reading = [Rule("topic", whole, ("READ",), True), Rule("group", whole, ("DESCRIBE",), True)]
    everything = [
        Rule(resource, whole, ("ALL",), True) for resource in ("topic", "group", "transactional-id")
    ]
    found = {user.name: list(_rules_of(user, run)) for user in users(run)}
    # The report that an orchestrator ends with is made of all topics.
    found[topology.ORCHESTRATOR.name] += reading
    return {**found, "auditor": reading, "operator": everything}


def apply(run: RunFile, settings: Mapping[str, Any]) -> list[str]:
    """Have the cluster allow all of it, and say what; what was allowed before stays. Raises
    AccessDenied, and ConfigError where nobody is checked.
    """
    admin = Admin(settings)
    wanted = [
        binding
        for name, allowed in rules(run).items()
        for rule in allowed
        for binding in _bindings(user_name(run, name), rule)
    ]

    def order() -> None:
        for future in admin.create_acls(wanted, request_timeout=CALL_TIMEOUT_S).values():
            try:
                future.result()
            except KafkaException as exception:
                if exception.args[0].code() == KafkaError.SECURITY_DISABLED:
                    raise ConfigError(
                        f"the broker at {admin.address} has no authorizer: everybody may do"
                        " everything; see SECURITY.md"
                    ) from None
                raise

    admin.visible_topics()  # says why where nobody answers
    try:
        call_with_retries(order, admin.address)
    except AccessDenied:
        raise access_denied(settings, "change access rules") from None
    return in_words(run)


def in_words(run: RunFile) -> list[str]:
    return [
        f"User:{user_name(run, name)}  {rule}"
        for name, allowed in rules(run).items()
        for rule in allowed
    ]


def manifests(run: RunFile, cluster: str = "streamrl") -> list[dict[str, Any]]:
    """A KafkaUser for each role, as Strimzi's user operator takes them: it makes up a password,
    which lies in a Secret of the user's name.
    """
    return [
        {
            "apiVersion": "kafka.strimzi.io/v1",
            "kind": "KafkaUser",
            "metadata": {
                "name": user_name(run, name),
                "labels": {"strimzi.io/cluster": cluster, "streamrl/run": run.run},
            },
            "spec": {
                "authentication": {"type": "scram-sha-512"},
                "authorization": {"type": "simple", "acls": [_acl(rule) for rule in allowed]},
                **({"quotas": dict(QUOTAS)} if name.startswith(f"{topology.ENV.name}-") else {}),
            },
        }
        for name, allowed in rules(run).items()
    ]


def render(run: RunFile, cluster: str = "streamrl") -> str:
    """The same for `kubectl apply -f -`. Raises ConfigError, as `topics.check_for_kubernetes`."""
    topics.check_for_kubernetes(run)
    return yaml.safe_dump_all(manifests(run, cluster), sort_keys=False, explicit_start=True)


def _acl(rule: Rule) -> dict[str, Any]:
    kind = "transactionalId" if rule.resource == "transactional-id" else rule.resource
    resource = {
        "type": kind,
        "name": rule.name,
        "patternType": "prefix" if rule.prefixed else "literal",
    }
    return {
        "resource": resource,
        "operations": [operation.capitalize() for operation in rule.operations],
    }


def _rules_of(user: User, run: RunFile) -> Iterator[Rule]:
    role = user.role
    whole = f"{run.run}."
    for topic in topics.plan(run):
        if _concerns(topic, user, run):
            kind = topic.kind.name
            operations = ("READ",) * role.reads(kind) + ("WRITE",) * (kind in role.produces)
            if operations:
                yield Rule("topic", topic.name, operations)
    yield Rule("group", f"{whole}{READER}", ("DESCRIBE",))
    # A role that others may join has any identity that begins with its name.
    identities = (f"{role.name}-",) if role.is_open else user.identities
    for identity in identities:
        yield Rule("transactional-id", f"{whole}{identity}", ("WRITE",), role.is_open)
        if role.has_offsets:
            yield Rule("group", f"{whole}{identity}", ("READ",), role.is_open)
    if role is topology.SCORER:  # it scores what the lead learner has not dealt with
        (lead,) = topology.LEARNER.parts(run)
        yield Rule("group", f"{whole}{lead.identity}", ("DESCRIBE",))


def _concerns(topic: Topic, user: User, run: RunFile) -> bool:
    """Of the topics of a kind: an env has its own, a journal belongs to one part, and dead letters
    are written by whoever reads their source.
    """
    of = topic.name.removeprefix(f"{run.run}.{topic.kind.name}").removeprefix(".")
    match topic.kind.per:
        case "run":
            return True
        case "env":
            return user.env in ("", of)
        case "part":
            return of in user.identities
        case "topic":
            return user.role.reads(topology.kind_of(of))


def _bindings(name: str, rule: Rule) -> Iterator[AclBinding]:
    kind = {
        "topic": ResourceType.TOPIC,
        "group": ResourceType.GROUP,
        "transactional-id": ResourceType.TRANSACTIONAL_ID,
    }[rule.resource]
    pattern = ResourcePatternType.PREFIXED if rule.prefixed else ResourcePatternType.LITERAL
    for operation in rule.operations:
        yield AclBinding(
            kind,
            rule.name,
            pattern,
            f"User:{name}",
            "*",
            AclOperation[operation],
            AclPermissionType.ALLOW,
        )
