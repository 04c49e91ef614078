"""The command line: `streamrl ROLE RUN.yaml`. Each command imports its room when it runs, so that
`--help` and completion are instant.

A StreamrlError is one line on stderr and its exit code; `--debug` adds the traceback. SIGTERM and
Ctrl-C let a part finish its batch; a second Ctrl-C does not.
"""


def main() -> None:
    from streamrl.system.tuning import collect_seldom

    collect_seldom()  # from the start on, as a command mostly imports and reads
    from streamrl.cli.command import cli

    cli(prog_name="streamrl")
