"""Access rules of the broker. Each role of a run has a user, which may read and write what its
parts read and write, and nothing else.

The rules follow from `config/topology.py`. A user is named `<run>.<role>`, and each env has a user
`<run>.env-<name>`. Three more users belong to people: `rescorer` gives recorded rollouts rewards
(`streamrl rescore`), `auditor` reads everything (status, audit, replay, export), and `operator` may
do everything within the run, which `streamrl topics apply` and `streamrl up` need. Idempotent
writes need no rule, as Kafka 2.8 and later allow them to writers.
"""

# pyright: reportPrivateImportUsage=false
# confluent_kafka.admin does not list in __all__ the names that it re-exports.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
)

from streamrl.config import topology
from streamrl.config.run_file import RunFile, load
from streamrl.config.sections.envs import ServerEnv
from streamrl.config.topology import Role
from streamrl.stream.log import topics
from streamrl.stream.log.kafka.admin import Admin, access_denied, call_with_retries
from streamrl.stream.log.kafka.reader import READER
from streamrl.stream.log.topics import Topic
from streamrl.system.errors import AccessDenied, ConfigError
from streamrl.system.manifests import to_yaml

CALL_TIMEOUT_S = 10.0


class User(NamedTuple):
    """The user of a role's parts. A role that has parts for each env has a user for each env."""

    name: str  # the name without the run, which precedes it on the broker
    role: Role
    identities: tuple[str, ...]  # the transactional ids of its parts
    env: str = ""  # the env whose topics it uses; empty for those of all envs


class Rule(NamedTuple):
    """The operations that a user may carry out on one resource, or on all with a prefix."""

    resource: Literal["topic", "group", "transactional-id"]
    name: str  # the name on the broker, which begins with the run's
    # Kafka's names: READ, WRITE, CREATE, DESCRIBE and ALL. READ and WRITE include DESCRIBE.
    operations: tuple[str, ...]
    prefixed: bool = False  # whether `name` is a prefix

    def __str__(self) -> str:
        name = f"{self.name}*" if self.prefixed else self.name
        return f"{','.join(self.operations):10} {self.resource} {name}"


def user_name(run: RunFile, name: str) -> str:
    """The name of a user on the broker."""
    return f"{run.run}.{name}"


def users(run: RunFile) -> list[User]:
    """The users of the run's parts, in the order of the loop."""
    users = list[User]()
    for role in topology.roles():
        if not role.envs(run):
            continue  # The run has no topics of such envs, so there is nothing to be allowed.
        parts = role.parts(run) if role.is_transactional else ()
        if not role.is_per_env:
            users.append(User(role.name, role, tuple(part.identity for part in parts)))
            continue
        for env in role.envs(run):
            settings = run.envs[env]
            if settings.sessions:
                # Agents and env servers go through the gateway. A server has metrics of its part.
                if isinstance(settings, ServerEnv):
                    users.append(User(f"{role.name}-{env}", role, (), env))
                continue
            own = tuple(part.identity for part in parts if part.env == env)
            # An env that the run does not start has no parts.
            outside = (topology.outside_identity(env),)
            users.append(User(f"{role.name}-{env}", role, own or outside, env))
    return users


def rules(run: RunFile, guests: Sequence[RunFile] = ()) -> dict[str, list[Rule]]:
    """The rules of each user, by the user's name without the run. `guests`: runs that the servers
    serve, too. Raises ConfigError for one that has not agreed to it.
    """
    prefix = f"{run.run}."  # A run's name has no dot, so no other run's names begin like this.
    reading = [Rule("topic", prefix, ("READ",), True), Rule("group", prefix, ("DESCRIBE",), True)]
    everything = [
        Rule(resource, prefix, ("ALL",), True)
        for resource in ("topic", "group", "transactional-id")
    ]
    by_user = {user.name: list(_rules_of(user, run)) for user in users(run)}
    # An orchestrator reads all topics for the report that it writes at the end.
    by_user[topology.ORCHESTRATOR.name] += reading
    for guest in guests:
        by_user[topology.INFERENCE.name] += _rules_of_guest(run, guest)
    people = {"rescorer": rescoring(run), "auditor": reading, "operator": everything}
    return {**by_user, **people}


def rules_of_hosts(run: RunFile) -> dict[str, list[Rule]]:
    """The rules on this run's topics that it gives the servers of other runs, by the whole name of
    their user.
    """
    return {
        f"{host}.{topology.INFERENCE.name}": list(_serving_guest(f"{run.run}."))
        for host in run.inference.served_by
    }


def load_guests(run: RunFile, directory: Path) -> list[RunFile]:
    """The runs that the servers serve, too, by their run files `<run>.yaml` in a directory. Raises
    ConfigError as `load` does.
    """
    return [load(directory / f"{name}.yaml") for name in run.inference.also_serves]


def _rules_of_guest(run: RunFile, guest: RunFile) -> Iterator[Rule]:
    if guest.run not in run.inference.also_serves:
        raise ConfigError(
            f"inference.also_serves: run {run.run} does not serve {guest.run}; name it there"
        )
    if run.run not in guest.inference.served_by:
        raise ConfigError(
            f"inference.served_by: run {guest.run} has not agreed to be served by {run.run}; it has"
            " to name it there"
        )
    yield from _serving_guest(f"{guest.run}.")


def rescoring(run: RunFile) -> list[Rule]:
    """The rules of the user who gives the rollouts of any env new rewards, and makes the topic for
    them if the run does not plan it.
    """
    prefix = f"{run.run}."
    rules = list[Rule]()
    for family in topology.families(run.envs):
        rules.append(Rule("topic", f"{prefix}{topology.rollouts(family)}", ("READ",)))
    for env in run.envs:
        rules.append(Rule("topic", f"{prefix}{topology.rewards(env)}", ("READ", "WRITE", "CREATE")))
    rules.append(Rule("topic", f"{prefix}{topology.SERVERS}", ("READ",)))  # for judges in pools
    rules.append(Rule("group", f"{prefix}{READER}", ("DESCRIBE",)))
    rules.append(Rule("transactional-id", f"{prefix}{topology.RESCORER}", ("WRITE",)))
    return rules


def apply(run: RunFile, settings: Mapping[str, Any]) -> list[str]:
    """Add the rules of the run to the cluster's. Returns them as lines of text.

    Rules that the cluster has already are kept. Raises AccessDenied for a user who may not change
    rules, and ConfigError for a cluster without an authorizer.
    """
    admin = Admin(settings)
    wanted: list[AclBinding] = []
    for name, allowed in _by_whole_name(run).items():
        for rule in allowed:
            wanted += bindings(name, rule)

    def create() -> None:
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

    admin.visible_topics()  # It raises an error with the reason if the broker cannot be reached.
    try:
        call_with_retries(create, admin.address)
    except AccessDenied:
        raise access_denied(settings, "change access rules") from None
    return in_words(run)


def missing(run: RunFile, admin: Admin) -> list[str]:
    """Those lines of `in_words` that the rules of the cluster do not include.

    These are all lines where librdkafka lists no rules, which it reports as no error: of a cluster
    without an authorizer, or to a user who may not list them.
    """
    anything: Any = None
    everything = AclBindingFilter(
        ResourceType.ANY,
        anything,
        ResourcePatternType.ANY,
        anything,
        anything,
        AclOperation.ANY,
        AclPermissionType.ANY,
    )

    def describe() -> list[AclBinding]:
        return admin.describe_acls(everything, request_timeout=CALL_TIMEOUT_S).result()

    existing = call_with_retries(describe, admin.address)
    lacking: list[str] = []
    for name, allowed in _by_whole_name(run).items():
        for rule in allowed:
            wanted = bindings(name, rule)
            if not all(any(_includes(given, binding) for given in existing) for binding in wanted):
                lacking.append(f"User:{name}  {rule}")
    return lacking


def in_words(run: RunFile) -> list[str]:
    """A line for each rule, with its user."""
    lines: list[str] = []
    for name, allowed in _by_whole_name(run).items():
        lines += [f"User:{name}  {rule}" for rule in allowed]
    return lines


def _by_whole_name(run: RunFile) -> dict[str, list[Rule]]:
    """The rules of the run's users and of those that it is served by."""
    own = {user_name(run, name): allowed for name, allowed in rules(run).items()}
    return {**own, **rules_of_hosts(run)}


def manifests(
    run: RunFile, cluster: str = "streamrl", guests: Sequence[RunFile] = ()
) -> list[dict[str, Any]]:
    """The run's KafkaUsers. Strimzi's user operator makes up a password for each, and keeps it in
    a Secret of the user's name.
    """
    quotas = {user.name: user.role.quotas for user in users(run)}
    made: list[dict[str, Any]] = []
    for name, allowed in rules(run, guests).items():
        spec: dict[str, Any] = {
            "authentication": {"type": "scram-sha-512"},
            "authorization": {"type": "simple", "acls": [_acl(rule) for rule in allowed]},
        }
        if limits := quotas.get(name):
            spec["quotas"] = {
                "producerByteRate": limits.write_bytes_per_s,
                "consumerByteRate": limits.read_bytes_per_s,
                "requestPercentage": limits.thread_percent,
            }
        metadata = {
            "name": user_name(run, name),
            "labels": {"strimzi.io/cluster": cluster, "streamrl/run": run.run},
        }
        made.append(
            {
                "apiVersion": "kafka.strimzi.io/v1",
                "kind": "KafkaUser",
                "metadata": metadata,
                "spec": spec,
            }
        )
    return made


def render(run: RunFile, cluster: str = "streamrl", guests: Sequence[RunFile] = ()) -> str:
    """The run's KafkaUsers as YAML for `kubectl apply -f -`. A user's rules are in one resource, so
    those on topics of `guests` are here.

    Raises ConfigError as `rules` does.
    """
    return to_yaml(manifests(run, cluster, guests))


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
    prefix = f"{run.run}."
    if user.env in run.session_envs:
        yield Rule("topic", f"{prefix}{topology.METRICS}", ("WRITE",))
        return
    for topic in topics.plan(run):
        if _concerns(topic, user, run):
            kind = topic.kind.name
            operations = ("READ",) * role.reads(kind) + ("WRITE",) * (kind in role.produces)
            if operations:
                yield Rule("topic", topic.name, operations)
    yield Rule("group", f"{prefix}{READER}", ("DESCRIBE",))
    # Others may add parts to an open role. Their identities begin with the role's name.
    identities = (f"{role.name}-",) if role.is_open else user.identities
    for identity in identities:
        yield Rule("transactional-id", f"{prefix}{identity}", ("WRITE",), role.is_open)
        if role.has_offsets:
            yield Rule("group", f"{prefix}{identity}", ("READ",), role.is_open)
    for other in role.journals_of:
        for part in other.parts(run):
            yield Rule("topic", f"{prefix}{topology.journal(part.identity)}", ("READ",))
    for other in role.offsets_of:
        for part in other.parts(run):
            if not part.process:  # the one of a gang that commits
                yield Rule("group", f"{prefix}{part.identity}", ("DESCRIBE",))


def _serving_guest(prefix: str) -> Iterator[Rule]:
    """The rules on another run's topics that servers need to serve its adapters."""
    yield Rule("topic", f"{prefix}{topology.POLICY_VERSIONS}", ("READ",))
    for topic in topology.INFERENCE.produces:
        yield Rule("topic", f"{prefix}{topic}", ("WRITE",))
    yield Rule("group", f"{prefix}{READER}", ("DESCRIBE",))


def _concerns(topic: Topic, user: User, run: RunFile) -> bool:
    """Whether a user, whose role uses this kind of topics, uses this one.

    An env uses its own topics, and a part its own journal. Dead letters are written by the readers
    of the topic that they come from.
    """
    of = topic.name.removeprefix(f"{run.run}.{topic.kind.name}").removeprefix(".")
    match topic.kind.per:
        case "run":
            return True
        case "env":
            if topic.kind.name in (topology.ROLLOUTS, topology.GROUPS):
                envs = [user.env] if user.env else user.role.envs(run)
                return of in topology.families(envs)
            if of not in user.role.envs(run):
                return False
            samples = user.role in (topology.ENV, topology.HOST)
            if samples and topic.kind.name == topology.TURNS and not run.records_turns(of):
                return False
            return user.env in ("", of)
        case "part":
            return of in user.identities
        case "topic":
            subject = topology.subject_of(of)
            kind = topology.kind_of(of)
            known = list(run.envs)
            envs = list(user.role.envs(run))
            if kind in (topology.ROLLOUTS, topology.GROUPS):
                known = topology.families(known)
                envs = topology.families(envs)
            if subject in known and subject not in envs:
                return False
            return kind in user.role.consumes


def _includes(rule: AclBinding, wanted: AclBinding) -> bool:
    """Whether a rule of the cluster allows what is wanted, perhaps from some hosts only."""
    if rule.resource_pattern_type == ResourcePatternType.PREFIXED:
        named = wanted.name.startswith(rule.name)
    else:
        named = rule.name in (wanted.name, "*") and (
            rule.name == "*" or wanted.resource_pattern_type == ResourcePatternType.LITERAL
        )
    return (
        named
        and rule.permission_type == AclPermissionType.ALLOW
        and rule.restype == wanted.restype
        and rule.principal in (wanted.principal, "User:*")
        and rule.operation in (wanted.operation, AclOperation.ALL)
    )


def bindings(name: str, rule: Rule) -> Iterator[AclBinding]:
    """The rule as Kafka's, one for each operation. `name`: the user's on the broker."""
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
