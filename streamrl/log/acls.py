"""Who may do what on the broker: each role of a run, as a user of its own, what its part reads and
writes, and nothing else.

A part's topics are those that the templates in topics/ give its room (tests/test_topology.py holds
CONSUMES and PRODUCES to them). A user is named `<run>.<role>`. Roles are `env-<name>` (each env its
own), buffer, batcher, scorer, learner, inference, evaluator, orchestrator; `auditor` reads all
(status, audit, replay, export), `operator` does everything within the run, such as `streamrl topics
apply` and `streamrl up`. Idempotent writing needs no rule of its own: since Kafka 2.8 whoever may
write to a topic may do it idempotently.
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
from streamrl.errors import AccessDenied, ConfigError
from streamrl.log import topics
from streamrl.log.kafka import READER, Admin, again, denied
from streamrl.log.topics import Topic

CALL_TIMEOUT_S = 10.0
READS_BACK = {  # what it has done, when it starts again
    "learner": (topology.POLICY_VERSIONS,),
    "evaluator": (topology.EVALS, topology.ROLLOUTS),  # what was posed in training is not held out
}


# Of an env's user on each broker: it may be taken over, or written by somebody else, and is to
# leave room for the others. The byte rates are far above what rollouts need (docs/operations.md,
# Sizing); the percentage is of one thread of the broker.
QUOTAS = {"producerByteRate": 20_000_000, "consumerByteRate": 20_000_000, "requestPercentage": 50}


class Role(NamedTuple):
    """A kind of process with a user of its own."""

    name: str
    room: str  # of streamrl/, as the templates call it
    identities: tuple[str, ...] = ()  # under which it writes transactions and commits positions
    env: str = ""  # the only one it has to do with


class Rule(NamedTuple):
    """A user may do these things with what has that name, or a name that begins so."""

    resource: Literal["topic", "group", "transactional-id"]
    name: str  # on the broker: with the run
    # Kafka's: READ, WRITE, DESCRIBE, ALL; the first two include the third
    operations: tuple[str, ...]
    prefixed: bool = False

    def __str__(self) -> str:
        return f"{','.join(self.operations):10} {self.resource} {self.name}{'*' if self.prefixed else ''}"


def user(run: RunFile, role: str) -> str:
    """The name a role goes by on the broker."""
    return f"{run.run}.{role}"


def roles(run: RunFile) -> list[Role]:
    """The parts' roles, in the order of the loop. An env from outside (`replicas: 0`) writes
    transactions as `<env>-outside`.
    """
    envs = [
        Role(
            f"env-{name}",
            "envs",
            tuple(topology.env_part(name, i) for i in range(env.replicas)) or (f"{name}-outside",),
            name,
        )
        for name, env in run.envs.items()
    ]
    return [
        *envs,
        Role("buffer", "buffer", ("buffer",)),
        Role("batcher", "batcher", ("batcher",)),
        Role(
            "scorer", "scorer", tuple(topology.scorer_part(i) for i in range(run.scorer.replicas))
        ),
        Role("learner", "learner"),
        Role("inference", "inference"),
        Role("evaluator", "evaluator", ("evaluator",)),
        Role("orchestrator", "orchestrator"),
    ]


def rules(run: RunFile) -> dict[str, list[Rule]]:
    """What each role is to be allowed, by role."""
    whole = f"{run.run}."  # a run's name has no dot, so no other run's begins like that
    reading = [Rule("topic", whole, ("READ",), True), Rule("group", whole, ("DESCRIBE",), True)]
    everything = [
        Rule(resource, whole, ("ALL",), True) for resource in ("topic", "group", "transactional-id")
    ]
    found = {role.name: list(_of(role, run)) for role in roles(run)}
    # Any learner's name: a second one on the same batches is the same role. The report that an
    # orchestrator ends with is made of all topics.
    found["learner"] += [
        Rule("transactional-id", f"{whole}learner-", ("WRITE",), True),
        Rule("group", f"{whole}learner-", ("READ",), True),
    ]
    # how far the lead is: the rest is to be scored
    found["scorer"] += [Rule("group", f"{whole}learner-{run.learner.name}", ("DESCRIBE",))]
    found["orchestrator"] += reading
    return {**found, "auditor": reading, "operator": everything}


def apply(run: RunFile, settings: Mapping[str, Any]) -> list[str]:
    """Have the cluster allow all of it, and say what; what was allowed before stays. Raises
    AccessDenied, and ConfigError where nobody is checked.
    """
    admin = Admin(settings)
    wanted = [
        binding
        for role, allowed in rules(run).items()
        for rule in allowed
        for binding in _bindings(user(run, role), rule)
    ]

    def order() -> None:
        for future in admin.create_acls(wanted, request_timeout=CALL_TIMEOUT_S).values():
            try:
                future.result()
            except KafkaException as exception:
                if exception.args[0].code() == KafkaError.SECURITY_DISABLED:
                    raise ConfigError(
                        f"the broker at {admin.address} has no authorizer: everybody may do everything; see SECURITY.md"
                    ) from None
                raise

    admin.seen()  # says why where nobody answers
    try:
        again(order, admin.address)
    except AccessDenied:
        raise denied(settings, "change access rules") from None
    return in_words(run)


def in_words(run: RunFile) -> list[str]:
    return [
        f"User:{user(run, role)}  {rule}"
        for role, allowed in rules(run).items()
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
                "name": user(run, role),
                "labels": {"strimzi.io/cluster": cluster, "streamrl/run": run.run},
            },
            "spec": {
                "authentication": {"type": "scram-sha-512"},
                "authorization": {"type": "simple", "acls": [_acl(rule) for rule in allowed]},
                **({"quotas": dict(QUOTAS)} if role.startswith("env-") else {}),
            },
        }
        for role, allowed in rules(run).items()
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


def _of(role: Role, run: RunFile) -> Iterator[Rule]:
    for topic in topics.plan(run):
        if _concerns(topic, role, run):
            reads = role.room in topic.kind.readers or topic.kind.name in READS_BACK.get(
                role.room, ()
            )
            operations = ("READ",) * reads + ("WRITE",) * (role.room in topic.kind.writers)
            if operations:
                yield Rule("topic", topic.name, operations)
    yield Rule("group", f"{run.run}.{READER}", ("DESCRIBE",))
    for identity in role.identities:
        yield Rule("transactional-id", f"{run.run}.{identity}", ("WRITE",))
        if not role.env:  # it is a source: it has no positions to commit
            yield Rule("group", f"{run.run}.{identity}", ("READ",))


def _concerns(topic: Topic, role: Role, run: RunFile) -> bool:
    """Of the topics of a kind: an env has its own, a journal belongs to one part, and dead letters
    are written by whoever reads their source.
    """
    of = topic.name.removeprefix(f"{run.run}.{topic.kind.name}").removeprefix(".")
    match topic.kind.per:
        case "run":
            return True
        case "env":
            return role.env in ("", of)
        case "part":
            return of in role.identities
        case "topic":
            return role.room in topics.kinds()[of.partition(".")[0]].readers


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
