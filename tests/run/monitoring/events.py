"""Events of a run as its parts publish them, and the view of a run that has seen them."""

from streamrl.config import topology
from streamrl.config.run_file import RunFile, parse
from streamrl.run.monitoring.frame import Frame, PartLine
from streamrl.run.monitoring.run_view import RunView, deciding_view, new_view, update_view
from streamrl.stream.log.protocol import Event
from streamrl.stream.records import Metric, PolicyVersion, Record, Server
from tests.run.orchestrator.script import batch


def two_envs() -> RunFile:
    """A run with a target, a limit of time and two envs."""
    target = {"env": "copy", "reward": 0.5, "batches": 2}
    return parse(
        {
            "run": "r",
            "envs": {"copy": {"replicas": 2}, "add": {}},
            "orchestrator": {"target": target, "max_wall_s": 60},
        }
    )


def metric(
    values: dict[str, float],
    step: int | None = None,
    time_s: float = 100.0,
    source: str = "batcher",
) -> Event:
    return event("metrics", source, Metric(source=source, time_s=time_s, values=values, step=step))


def event(topic: str, key: str, record: Record | None) -> Event:
    return Event(topic, 0, 0, key, record)


def reward(step: int, value: float) -> Event:
    return event("batches", str(step), batch(step, {"copy": [value]}))


def version(number: int, learner: str = "lead") -> Event:
    return event(
        "policy-versions",
        learner,
        PolicyVersion(
            learner=learner,
            version=number,
            uri="x",
            size_bytes=1,
            sha256="0",
            time_s=100.0 + number,
        ),
    )


def server(
    state: str = "ready",
    number: int = 0,
    heartbeat_s: float = 110.0,
    error: str = "",
    pool: str = "generation",
    in_flight: int = 0,
    index: int = 0,
) -> Event:
    name = topology.inference_part(pool, index)
    record = Server(
        server_id=name,
        url="",
        pool=pool,
        state=state,
        version=number,
        heartbeat_s=heartbeat_s,
        error=error,
        in_flight=in_flight,
    )  # type: ignore[arg-type]
    return event("servers", name, record)


def view_of(run: RunFile, *events: Event, since_s: float = 100.0) -> RunView:
    return update_view(deciding_view(run, since_s), events)


def running_frame() -> Frame:
    """A run of two envs after two batches, in which the buffer is started again."""
    run = parse(
        {
            "run": "r",
            "envs": {"copy": {}, "add": {}},
            "orchestrator": {
                "target": {"env": "copy", "reward": 0.9, "batches": 2},
                "max_wall_s": 600,
            },
        }
    )
    events = [version(7), server(number=7, heartbeat_s=130.0, in_flight=5)]
    for step, (copy, add) in enumerate(((0.2, 0.0), (0.4, 0.1))):
        values = {
            "batches/copy/reward/mean": copy,
            "batches/add/reward/mean": add,
            "batcher/batch_age_mean": 0.75,
            "batcher/mixed_versions_frac": 0.125,
        }
        events.append(metric(values, step, time_s=150.0))
    for source, values in (
        ("env-copy-0", {"env/rollouts_per_s": 12.0}),
        ("buffer", {"buffer/window_tokens/copy": 100.0}),
        ("batcher", {"batcher/held_tokens/copy": 1_000.0}),
    ):
        events.append(metric(values, time_s=159.0, source=source))
    parts = (
        PartLine("learner", "running", 60.0),
        PartLine("buffer", "back-off", 1.0, 2, "no broker"),
    )
    return Frame(run, update_view(new_view(run, 100.0), events), 160.0, parts)


def frame_of_many() -> Frame:
    """A run of a thousand envs and twenty servers: env-i has the reward i / 1,000, and the next
    batch lacks 8 tokens of each env from number 990 on.
    """
    envs = [f"env-{i}" for i in range(1_000)]
    run = parse({"run": "r", "envs": {env: {"fraction": 1 / 1_000} for env in envs}})
    rewards = {f"batches/{env}/reward/mean": i / 1_000 for i, env in enumerate(envs)}
    waits = {f"batcher/missing_tokens/{env}": 8.0 for env in envs[990:]}
    events = [
        version(7),
        *(server(number=7 - (i == 3), heartbeat_s=159.0, index=i) for i in range(20)),
        metric(rewards, 7, time_s=150.0),
        metric({**waits, "batcher/blocked_s": 5.0}, time_s=159.0, source="batcher"),
    ]
    return Frame(run, update_view(new_view(run, 100.0), events), 160.0, ())
