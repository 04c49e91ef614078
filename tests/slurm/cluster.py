"""A Slurm cluster on this host: a real slurmctld with several slurmd, each of them a node. It runs
as root, without cgroups: a node may use more than it has.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from socket import gethostname

import psutil

from streamrl.stream.local_kafka.ports import free_port
from tests.support.waiting import until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
CPUS = 8  # of a node, whatever this host has
DOWN_S = 20  # that a node has to answer within (SlurmdTimeout)


class Cluster:
    """Nodes node1 to node<count> in a directory. Commands find it by `environment`."""

    def __init__(self, directory: Path, count: int) -> None:
        self._directory = directory
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.nodes = [f"node{number}" for number in range(1, count + 1)]
        self.environment = {**os.environ, "SLURM_CONF": str(directory / "slurm.conf")}
        directory.mkdir(parents=True)
        (directory / "state").mkdir()
        key = directory / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        (directory / "slurm.conf").write_text(self._settings())

    def start(self) -> None:
        at = self._directory
        self._start(
            "munged",
            "munged",
            "--foreground",
            "--force",
            f"--key-file={at / 'munge.key'}",
            f"--socket={at / 'munge.socket'}",
            f"--pid-file={at / 'munged.pid'}",
            f"--log-file={at / 'munged.log'}",
            f"--seed-file={at / 'munged.seed'}",
        )
        until((at / "munge.socket").exists)
        self._start("slurmctld", "slurmctld", "-D")
        for node in self.nodes:
            self.start_node(node)
        until(
            lambda: self.ask("sinfo", "--noheader", "--format=%D %T") == f"{len(self.nodes)} idle"
        )

    def start_node(self, node: str) -> None:
        self._start(node, "slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> int:
        """Kill whatever runs on a node, as its end would. Returns the number of processes."""
        daemons = {self._daemons[node].pid}
        others = set[int]()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SLURMD_NODENAME") == node:
                    others.add(process.pid)
                    others |= {child.pid for child in process.children(recursive=True)}
                    daemons |= {
                        parent.pid
                        for parent in process.parents()
                        if parent.name().startswith("slurmstepd")
                    }
        # Those of Slurm first: they would tell the controller that the job has failed.
        victims = [*daemons, *(others - daemons)]
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        self._daemons[node].wait()
        return len(victims)

    def jobs(self) -> dict[str, str]:
        """State and node of each job, by its name."""
        shown = self.ask("squeue", "--noheader", "--format=%j %T %N")
        return dict(line.strip().split(" ", 1) for line in shown.splitlines())

    def ask(self, *command: str) -> str:
        """What a command of Slurm prints, empty while it has no answer."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    def stop(self) -> None:
        for node in self.nodes:
            if self._daemons[node].poll() is None:
                self.kill_node(node)
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()

    def _start(self, name: str, *command: str) -> None:
        with (self._directory / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                command,
                env=self.environment,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C would end a slurmd before the steps of its jobs
            )

    def _settings(self) -> str:
        at = self._directory
        host = gethostname()
        lines = [
            "ClusterName=streamrl",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={free_port()}",
            "SlurmUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={at / 'munge.socket'}",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "JobAcctGatherType=jobacct_gather/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_Core",
            "SlurmdParameters=config_overrides",
            "CommunicationParameters=NoCtldInAddrAny,NoInAddrAny",
            "MpiDefault=none",
            "ReturnToService=2",
            f"SlurmdTimeout={DOWN_S}",
            "MessageTimeout=5",
            f"StateSaveLocation={at / 'state'}",
            f"SlurmdSpoolDir={at}/spool-%n",
            f"SlurmctldPidFile={at / 'slurmctld.pid'}",
            f"SlurmdPidFile={at}/%n.pid",
            f"SlurmctldLogFile={at / 'slurmctld.log'}",
            f"SlurmdLogFile={at}/%n.log",
        ]
        lines += [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs={CPUS}"
            for node in self.nodes
        ]
        # Jobs are spread over the nodes, as they would be on nodes that a job has for itself.
        lines.append("PartitionName=all Nodes=ALL Default=YES LLN=YES")
        return "\n".join([*lines, ""])


@contextlib.contextmanager
def slurm(directory: Path, count: int) -> Iterator[Cluster]:
    """A cluster that is up while the block lasts. Nothing of it is left running."""
    cluster = Cluster(directory, count)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def missing(programs: Sequence[str] = PROGRAMS) -> list[str]:
    """The programs of Slurm that this machine lacks."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    return [program for program in programs if not shutil.which(program, path=path)]
