"""The topology of a run on one page: its topics, its roles, and the parts that each role has.

    env ── rollouts ──▶ buffer ── groups ──▶ batcher ── batches ──▶ learner
     ▲ ▲                                        │                      │
     │ └───────────────── demand ───────────────┘                      │
     └── servers ── inference ◀────────── policy-versions ─────────────┘

A role is a command. A part is one process of a role: it has a name and an
identity, which is its transactional id, its consumer group and the source of its metrics. Whatever
lists topics, roles or parts follows from this page: what is started and watched, which topics there
are, who may touch them, what is folded again. Extensions add roles (`config/extensions.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from streamrl.config.extensions import extensions
from streamrl.system.errors import ConfigError
from streamrl.system.text import nearest_or_all

if TYPE_CHECKING:
    from streamrl.config.run_file import RunFile
    from streamrl.config.sections.operation import Placement

# ---- topics --------------------------------------------------------------------------------------
# Kinds of topics, each with its template in topics/. Their names here are without the run.

TURNS = "turns"  # turns.<env>: sessions and their model calls
REWARDS = "rewards"  # rewards.<env>: what `streamrl rescore` gave
ROLLOUTS = "rollouts"  # rollouts.<env>, or of a family of envs
GROUPS = "groups"  # groups.<env>, or of a family of envs
BATCHES = "batches"
SCORES = "scores"
POLICY_VERSIONS = "policy-versions"
DEMAND = "demand"
SERVERS = "servers"
VISITS = "visits"  # visits.<env>
FATES = "fates"
JOURNAL = "journal"  # journal.<identity of a part>
CONFIG = "config"
METRICS = "metrics"
EVALS = "evals"
DEAD_LETTERS = "dead-letters"  # dead-letters.<topic>

RECORD_BYTES = 128_000_000  # the most that a writer takes
# The same of batches, scores and journals. Half a gigabyte is what a transaction takes, and a batch
# of 40 million tokens.
LARGE_RECORD_BYTES = 512_000_000

PARTITIONED = (TURNS, REWARDS, ROLLOUTS, GROUPS)
"""Kinds whose topics have `topics.partitions` partitions. All others are an order, or are read as a
whole, and have one partition by design.
"""


def turns(env: str) -> str:
    return f"{TURNS}.{env}"


def rewards(env: str) -> str:
    return f"{REWARDS}.{env}"


def rollouts(env: str) -> str:
    return f"{ROLLOUTS}.{family_of(env)}"


def groups(env: str) -> str:
    return f"{GROUPS}.{family_of(env)}"


def family_of(env: str) -> str:
    """The name in the topics of an env's rollouts and groups: `sums` for the env `sums--easy`, and
    otherwise the env's own. So the envs of a family share these topics. It follows from the name
    alone, so the place of a recorded rollout does not depend on the settings of its run.
    """
    return env.partition("--")[0]


def families(envs: Iterable[str]) -> list[str]:
    """The families of these envs, each once."""
    return list(dict.fromkeys(map(family_of, envs)))


def env_of(topic: str, named: str, envs: Collection[str]) -> str:
    """The env that a record in a topic of rollouts or groups belongs to: the one of `envs` that it
    names, if the topic is that env's, and otherwise what the topic is named after.
    """
    family = subject_of(topic)
    return named if named in envs and family_of(named) == family else family


def visits(env: str) -> str:
    return f"{VISITS}.{env}"


def journal(identity: str) -> str:
    return f"{JOURNAL}.{identity}"


def dead_letters(topic: str) -> str:
    return f"{DEAD_LETTERS}.{topic}"


def kind_of(topic: str) -> str:
    """The kind of a topic: `rollouts` of `rollouts.copy-digits`."""
    return topic.partition(".")[0]


def subject_of(topic: str) -> str:
    """The env or other subject that a topic is named after: `copy-digits` of
    `rollouts.copy-digits`.
    """
    return topic.partition(".")[2]


def sole_partition(topic: str) -> tuple[str, int]:
    """The one partition of a topic that has one by design. Raises ValueError for another."""
    if kind_of(topic) in PARTITIONED:
        raise ValueError(f"topic {topic} has as many partitions as topics.partitions sets")
    return topic, 0


BATCHES_PARTITION = sole_partition(BATCHES)
SCORES_PARTITION = sole_partition(SCORES)
POLICY_VERSIONS_PARTITION = sole_partition(POLICY_VERSIONS)


# ---- names of parts ------------------------------------------------------------------------------

JAX_MEMORY_FRACTION = 0.75  # of a GPU, that JAX reserves where it is not told otherwise
VLLM_MEMORY_FRACTION = 0.9  # the same of vLLM's `gpu_memory_utilization`
# Of a GPU that a learner shares with others, and what these divide. The rest is what CUDA keeps for
# each process, and what kernels allocate besides.
LEARNER_SHARE = 0.5
OTHERS_SHARE = 0.35
GENERATION = "generation"  # the pool of inference servers that a run has without naming one
# The identity of `streamrl rescore`. A second call fences the first.
RESCORER = "rescore"


def producer(env: str, index: int) -> str:
    """The `producer` of the rollouts that replica `index` of an env makes."""
    return f"{env}-{index}"


def env_part(env: str, index: int) -> str:
    return f"env-{producer(env, index)}"


def host_part(name: str) -> str:
    """The name and identity of the process that runs all envs with `host: NAME`."""
    return f"host-{name}"


def outside_identity(env: str) -> str:
    """The identity under which an env that the run does not start (`replicas: 0`) writes
    transactions.
    """
    return f"{env}-outside"


def buffer_part(shard: int, shards: int) -> str:
    return "buffer" if shards == 1 else f"buffer-{shard}"


def inference_part(pool: str, index: int) -> str:
    """The name of server `index` of a pool, which is also its id on `servers`."""
    return f"inference-{index}" if pool == GENERATION else f"inference-{pool}-{index}"


def learner_identity(name: str) -> str:
    return f"learner-{name}"


def learner_process(identity: str, rank: int) -> str:
    """The identity of one of a learner's processes. The one that writes has the learner's own."""
    return f"{identity}-process-{rank}" if rank else identity


# ---- roles ---------------------------------------------------------------------------------------


class Part(NamedTuple):
    """One process of a role."""

    role: str  # the command that starts it
    name: str  # of its log, and of its line in `streamrl status`
    identity: str  # its transactional id, its consumer group, the source of its metrics
    options: tuple[str, ...] = ()  # of its command, after the run file
    env: str = ""  # the one that it samples from
    shard: int = 0  # its number among `shards`
    shards: int = 1  # parts among which the partitions of its inputs are divided
    process: int = 0  # its rank among `processes`; only that of rank 0 writes
    processes: int = 1  # parts that are one gang: they start and end together

    def takes(self, topic: str, partition: int) -> bool:
        """Whether the part reads this partition of an input. Of a topic that is divided among n
        parts it reads every n-th partition.
        """
        return kind_of(topic) not in PARTITIONED or partition % self.shards == self.shard


class Quotas(NamedTuple):
    """What a user may use of each broker."""

    write_bytes_per_s: int
    read_bytes_per_s: int
    thread_percent: int  # of one thread of the broker


@dataclass(frozen=True, kw_only=True)
class Role:
    """What all parts of a kind have in common. Topics are given by their kinds."""

    name: str  # of its command, and the beginning of its parts' identities
    consumes: tuple[str, ...]  # what its loop reads
    # what else it reads: what its inputs refer to, or when it starts what was done before
    reads_back: tuple[str, ...] = ()
    produces: tuple[str, ...]  # what it writes; with JOURNAL, each part has a journal
    parts: Callable[[RunFile], tuple[Part, ...]]  # that the settings give it, by index
    is_needed: Callable[[RunFile], bool] = lambda run: True  # are its parts to run?
    envs: Callable[[RunFile], Collection[str]] = lambda run: run.envs  # whose topics it uses
    journals_of: tuple[Role, ...] = ()  # others whose journals it reads
    offsets_of: tuple[Role, ...] = ()  # others whose committed offsets it reads
    quotas: Quotas | None = None  # of its user; None: no limit
    devices: Literal["", "jax", "vllm"] = ""  # what computes on its GPUs; empty: it has none
    is_per_env: bool = False  # each env has its own parts, and its own user on the broker
    is_transactional: bool = True  # its parts write transactions under their identities
    has_offsets: bool = False  # its parts commit the offsets that they have dealt with
    is_open: bool = False  # others may join under identities that begin with the role's name
    is_slow: bool = False  # its loop runs once a batch, and compiles at first

    @property
    def has_journal(self) -> bool:
        return JOURNAL in self.produces

    @property
    def is_processor(self) -> bool:
        """Whether what its parts do follows from their journals, so that it can be replayed."""
        return self.has_journal and self.has_offsets

    def reads(self, kind: str) -> bool:
        """Whether a part reads topics of this kind. Of the journals it reads its own."""
        return kind in (*self.consumes, *self.reads_back) or (kind == JOURNAL and self.has_journal)


def env_parts(run: RunFile) -> tuple[Part, ...]:
    parts: list[Part] = []
    for env in envs_without_host(run):
        for index in range(run.envs[env].replicas):
            name = env_part(env, index)
            parts.append(Part("env", name, name, options=(env, *_index(index)), env=env))
    return tuple(parts)


def envs_without_host(run: RunFile) -> list[str]:
    """The envs whose replicas are processes, or whose rollouts come from outside."""
    return [env for env, settings in run.envs.items() if not settings.host]


def hosted_envs(run: RunFile) -> list[str]:
    return [env for env, settings in run.envs.items() if settings.host]


def env_journal(run: RunFile, env: str, index: int) -> str:
    """The journal with the progress of replica `index` of an env: that of its process."""
    host = run.envs[env].host
    return journal(host_part(host) if host else env_part(env, index))


def is_source(identity: str) -> bool:
    """Whether this is the identity of a process of envs. Their journals have no entries."""
    return identity.partition("-")[0] in (ENV.name, HOST.name)


def host_parts(run: RunFile) -> tuple[Part, ...]:
    hosts = dict.fromkeys(run.envs[env].host for env in hosted_envs(run))
    return tuple(Part("host", host_part(name), host_part(name), (name,)) for name in hosts)


def buffer_parts(run: RunFile) -> tuple[Part, ...]:
    return tuple(buffer_shard(i, run.buffer.shards) for i in range(run.buffer.shards))


def buffer_shard(shard: int, shards: int) -> Part:
    name = buffer_part(shard, shards)
    options = () if shards == 1 else _index(shard)
    return Part("buffer", name, name, options, shard=shard, shards=shards)


def learner_parts(run: RunFile) -> tuple[Part, ...]:
    count = run.learner.processes
    identity = learner_identity(run.learner.name)
    if count == 1:
        return (Part("learner", "learner", identity),)
    return tuple(
        Part(
            role="learner",
            name=f"learner-{rank}",
            identity=learner_process(identity, rank),
            options=("--processes", str(count), *_index(rank)),
            process=rank,
            processes=count,
        )
        for rank in range(count)
    )


def inference_parts(run: RunFile) -> tuple[Part, ...]:
    parts: list[Part] = []
    for pool, size in run.inference.sizes.items():
        pool_option = () if pool == GENERATION else ("--pool", pool)
        for index in range(size):
            name = inference_part(pool, index)
            parts.append(Part("inference", name, name, options=(*_index(index), *pool_option)))
    return tuple(parts)


def pool_of(part: Part) -> str:
    """The pool whose settings a server's part has."""
    return part.options[-1] if "--pool" in part.options else GENERATION


class Device(NamedTuple):
    """A GPU."""

    node: str  # name of its machine; empty where `placement` names none
    number: int  # on that machine

    def __str__(self) -> str:
        return f"{self.number} of {self.node}" if self.node else str(self.number)


def is_server(part: Part) -> bool:
    """Whether the part has a vLLM."""
    return role_of(part).devices == "vllm"


def uses_gpu(part: Part) -> bool:
    """Whether the part computes with a model, on GPUs where there are some."""
    return bool(role_of(part).devices)


def placement_of(run: RunFile, part: Part) -> Placement | None:
    """What `placement` has for a part or else for its role; None: it names neither."""
    return run.placement.get(part.name) or run.placement.get(part.role)


def node_of(run: RunFile, part: Part) -> str:
    """Name of the machine that `placement` names for a part; empty: none."""
    placement = placement_of(run, part)
    nodes = placement.nodes if placement else []
    if not nodes:
        return ""
    sharing = _sharing(run, part)
    return nodes[min(sharing.index(part.name) // _parts_a_node(nodes, sharing), len(nodes) - 1)]


def devices_of(run: RunFile, part: Part) -> tuple[Device, ...]:
    """The GPUs that `placement` gives a part. Parts that share the devices of their role get an
    equal stretch each; there are none where `placement` does not name the part.
    """
    placement = placement_of(run, part)
    if placement is None:
        return ()
    sharing = _sharing(run, part)
    parts_a_node = _parts_a_node(placement.nodes, sharing)
    each = len(placement.devices) // parts_a_node
    first = sharing.index(part.name) % parts_a_node * each
    node = node_of(run, part)
    return tuple(Device(node, number) for number in placement.devices[first : first + each])


def _sharing(run: RunFile, part: Part) -> list[str]:
    """The parts that share what `placement` has for this one."""
    return [part.name] if part.name in run.placement else sharing_parts(run, part.role)


def _parts_a_node(nodes: Sequence[str], sharing: Sequence[str]) -> int:
    return max(1, len(sharing) // max(1, len(nodes)))


def machines(run: RunFile) -> dict[str, tuple[Part, ...]]:
    """The parts of each machine of a run, by the name that `placement` gives it. The first machine
    is the learner's, and has all parts for which none is named. A run that names no machine has
    one, whose name is empty.
    """
    every = parts(run)
    lead = next((node for part in every if (node := node_of(run, part))), "")
    on: dict[str, list[Part]] = {lead: []}
    for part in every:
        on.setdefault(node_of(run, part) or lead, []).append(part)
    return {name: tuple(members) for name, members in on.items()}


def reserved_memory(run: RunFile) -> dict[Device, dict[str, float]]:
    """The parts on each GPU, with the share of its memory that each reserves."""
    shares: dict[Device, dict[str, float]] = {}
    for part in parts(run):
        for device in devices_of(run, part):
            shares.setdefault(device, {})[part.name] = memory_fraction(run, part)
    return dict(sorted(shares.items()))


def memory_fraction(run: RunFile, part: Part) -> float:
    """Share of the memory of each of its GPUs that a part reserves: what the run file gives, or
    what JAX and vLLM reserve by default.
    """
    if is_server(part):
        engine = run.inference.of_pool(pool_of(part)).engine
        return float(engine.get("gpu_memory_utilization", VLLM_MEMORY_FRACTION))
    placement = placement_of(run, part)
    return (placement.memory_fraction if placement else 0.0) or JAX_MEMORY_FRACTION


def default_shares(run: RunFile) -> dict[str, float]:
    """The share of a GPU's memory that is fair for each part which meets others on a GPU, by the
    part's name. It is the least of those on all of its GPUs.
    """
    shares: dict[str, float] = {}
    learners = {part.name for part in LEARNER.parts(run)}
    for on_device in reserved_memory(run).values():
        others = len(on_device.keys() - learners)
        for name in on_device if len(on_device) > 1 else ():
            fair = LEARNER_SHARE if name in learners else OTHERS_SHARE / others
            shares[name] = min(fair, shares.get(name, fair))
    return shares


def _index(index: int) -> tuple[str, str]:
    return "--index", str(index)


def one_part(role: str) -> Callable[[RunFile], tuple[Part, ...]]:
    """The `parts` of a role that has one part in every run."""
    return lambda run: (Part(role, role, role),)


def numbered_parts(
    role: str, count: Callable[[RunFile], int]
) -> Callable[[RunFile], tuple[Part, ...]]:
    """The `parts` of a role that has as many as `count` gives, by their numbers."""
    return lambda run: tuple(
        Part(role, numbered(role, index), numbered(role, index), _index(index))
        for index in range(count(run))
    )


def numbered(role: str, index: int) -> str:
    """The name and identity of one of a role's `numbered_parts`."""
    return f"{role}-{index}"


ENV = Role(
    name="env",
    consumes=(DEMAND, SERVERS, VISITS),
    reads_back=(TURNS,),  # where its model calls are recorded
    produces=(TURNS, ROLLOUTS, VISITS, JOURNAL, METRICS),
    parts=env_parts,
    envs=envs_without_host,
    is_per_env=True,
    # An env may be compromised, or written by others, and must leave capacity for the other
    # users. The rates are far above what rollouts need (docs/operations.md, Sizing).
    quotas=Quotas(write_bytes_per_s=20_000_000, read_bytes_per_s=20_000_000, thread_percent=50),
)
HOST = Role(
    name="host",
    consumes=ENV.consumes,
    reads_back=ENV.reads_back,
    produces=ENV.produces,
    parts=host_parts,
    is_needed=lambda run: bool(hosted_envs(run)),
    envs=hosted_envs,
)
BUFFER = Role(
    name="buffer",
    consumes=(ROLLOUTS, POLICY_VERSIONS),
    produces=(GROUPS, FATES, DEAD_LETTERS, METRICS, JOURNAL),
    parts=buffer_parts,
    has_offsets=True,
)
BATCHER = Role(
    name="batcher",
    consumes=(GROUPS, POLICY_VERSIONS),
    reads_back=(ROLLOUTS,),  # those of its groups
    produces=(BATCHES, DEMAND, FATES, DEAD_LETTERS, METRICS, JOURNAL),
    parts=one_part("batcher"),
    has_offsets=True,
)
LEARNER = Role(
    name="learner",
    consumes=(BATCHES, SCORES),
    reads_back=(POLICY_VERSIONS,),
    produces=(POLICY_VERSIONS, METRICS),
    parts=learner_parts,
    devices="jax",
    has_offsets=True,
    is_open=True,
    is_slow=True,
)
INFERENCE = Role(
    name="inference",
    consumes=(POLICY_VERSIONS,),
    produces=(SERVERS, METRICS),
    parts=inference_parts,
    devices="vllm",
    is_transactional=False,
)
ORCHESTRATOR = Role(
    name="orchestrator",
    consumes=(METRICS, SERVERS, POLICY_VERSIONS, DEMAND, FATES, EVALS, BATCHES),
    produces=(CONFIG, METRICS),
    parts=one_part("orchestrator"),
    is_needed=lambda run: False,  # it starts the others, and is started by hand
    is_transactional=False,
)

CORE = (ENV, HOST, BUFFER, BATCHER, LEARNER, INFERENCE, ORCHESTRATOR)
"""In the order of the loop, then the one that watches it."""
CORE_STARTED = (LEARNER, INFERENCE, BUFFER, BATCHER, ENV, HOST)
"""In the order in which their parts are started: the learner first, as everybody waits for policy
version 0.
"""


def roles() -> tuple[Role, ...]:
    """All roles: those of the core, then those of extensions."""
    return (*CORE, *_added())


def started_roles() -> tuple[Role, ...]:
    """The roles whose parts `streamrl up` starts, in that order."""
    return (*CORE_STARTED, *_added())


def _added() -> tuple[Role, ...]:
    return tuple(role for extension in extensions().values() for role in extension.roles)


def parts(run: RunFile) -> tuple[Part, ...]:
    """The parts of a run, in the order in which they are started."""
    return tuple(
        part for role in started_roles() if role.is_needed(run) for part in role.parts(run)
    )


def chosen_parts(
    run: RunFile, only: Collection[str] = (), excluded: Collection[str] = ()
) -> tuple[Part, ...]:
    """The parts of a run that `only` names, by role or by part, or all but those that `excluded`
    names. Raises ConfigError for a name that is neither, and for some of the processes of a learner
    without the others, because they start together.
    """
    every = parts(run)
    names = {part.name: None for part in every} | {part.role: None for part in every}
    for name in (*only, *excluded):
        if name not in names:
            raise ConfigError(f"{name}: no role or part of this run; {nearest_or_all(name, names)}")

    def named(part: Part, among: Collection[str]) -> bool:
        return part.name in among or part.role in among

    chosen = tuple(
        part for part in every if not named(part, excluded) and (not only or named(part, only))
    )
    gang = [part.name for part in chosen if part.processes > 1]
    if gang and len(gang) < run.learner.processes:
        raise ConfigError(
            f"{', '.join(gang)}: of the {run.learner.processes} processes of the learner, which"
            " start together; on several machines start each by hand, with `streamrl learner"
            " --coordinator`"
        )
    return chosen


def sharing_parts(run: RunFile, role: str) -> list[str]:
    """The parts of a role that share the devices of `placement.<role>`."""
    return [
        part.name for part in parts(run) if part.role == role and part.name not in run.placement
    ]


def identities(run: RunFile) -> dict[str, str]:
    """The identity of each part of a run, by the part's name."""
    return {part.name: part.identity for part in parts(run)}


def processors(run: RunFile) -> tuple[Part, ...]:
    """The parts whose journals are the schedule of a run."""
    return tuple(part for part in parts(run) if role_of(part).is_processor)


def role_of(part: Part) -> Role:
    return next(role for role in roles() if role.name == part.role)


def writers(kind: str) -> list[Role]:
    return [role for role in roles() if kind in role.produces]


def readers(kind: str) -> list[Role]:
    return [role for role in roles() if role.reads(kind)]
