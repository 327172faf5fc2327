"""A Slurm cluster of one host: its controller, and several nodes that are a daemon each."""

import getpass
import os
import platform
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

SETTINGS = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
SlurmctldPort={ports[0]}
SlurmctldPidFile={directory}/controller.pid
SlurmdPidFile={directory}/%n.pid
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/%n
SlurmctldLogFile={directory}/controller.log
SlurmdLogFile={directory}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SwitchType=switch/none
MpiDefault=none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
ReturnToService=2
SlurmdTimeout=10
KillWait=20
FirstJobId={first_job}
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL PriorityTier=2
"""


class Cluster:
    """The commands of Slurm, for a cluster whose files are below `directory`."""

    def __init__(self, directory: Path, nodes: int) -> None:
        self.directory = directory
        self.names = [f"n{number}" for number in range(1, nodes + 1)]
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        ports = _free_ports(nodes + 1)
        addresses = zip(self.names, ports[1:], strict=True)
        lines = [
            f"NodeName={name} NodeHostname={platform.node()} NodeAddr=127.0.0.1 Port={port} CPUs=4"
            for name, port in addresses
        ]
        (directory / "state").mkdir()
        (directory / "slurm.conf").write_text(
            SETTINGS.format(
                host=platform.node(), user=getpass.getuser(), ports=ports, directory=directory,
                nodes="\n".join(lines), first_job=ports[0],
            )
        )  # fmt: skip
        self.environment = {**os.environ, "SLURM_CONF": str(directory / "slurm.conf")}
        self._start("slurmctld", "slurmctld", "-D")
        for name in self.names:
            self.start_node(name)

    def start_node(self, name: str) -> None:
        self._start(name, "slurmd", "-D", "-N", name)

    def _start(self, name: str, program: str, *arguments: str) -> None:
        found = shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        with (self.directory / f"{name}.out").open("ab") as output:
            self.daemons[name] = subprocess.Popen(
                [str(found), *arguments],
                env=self.environment, start_new_session=True, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def ask(self, *command: str, directory: Path | None = None) -> str:
        """Return what a command prints on a host of the cluster."""
        asked = subprocess.run(
            command, env=self.environment, cwd=directory, capture_output=True, text=True, timeout=120
        )
        assert asked.returncode == 0, asked.stderr
        return asked.stdout.strip()

    def nodes(self, job: str) -> list[str]:
        """Return the nodes of a job; none while it waits."""
        found = self.ask("squeue", "--noheader", "--array", f"--jobs={job}", "--format=%N")
        return self.ask("scontrol", "show", "hostnames", found).split() if found else []

    def node(self, job: str) -> str:
        """Return the one node of a job."""
        [node] = self.nodes(job)
        return node

    def jobs(self, name: str) -> dict[str, str]:
        """Return the state of each job of a name that has not ended, by its number."""
        lines = self.ask("squeue", "--noheader", "--array", f"--name={name}", "--format=%i %T").splitlines()
        return dict(line.split() for line in lines)

    def lose(self, name: str) -> None:
        """Kill a node's daemon and all that its jobs run, as when a host loses its power."""
        daemon = self.daemons.pop(name)
        daemon.kill()
        daemon.wait(60)
        for process in self.processes(name):
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def processes(self, name: str) -> list[psutil.Process]:
        """Return the processes of a node's jobs, behind those that watch them and would tell of their end."""
        wanted = {"SLURM_CONF": self.environment["SLURM_CONF"], "SLURMD_NODENAME": name}
        watching, found = set(), []
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # it has just ended
                environment = process.environ()
                if all(environment.get(key) == value for key, value in wanted.items()):
                    found.append(process)
                    parent = process.parent()
                    if parent is not None and parent.name() == "slurmstepd":
                        watching.add(parent)
        return [*watching, *found]

    def close(self) -> None:
        for name in [name for name in self.names if name in self.daemons]:
            self.lose(name)
        for daemon in self.daemons.values():
            daemon.kill()
            daemon.wait(60)


@contextmanager
def cluster(directory: Path, nodes: int) -> Iterator[Cluster]:
    """Run a cluster whose nodes are all idle."""
    made = Cluster(directory, nodes)
    try:
        wait_until(lambda: made.ask("sinfo", "-hN", "-p", "main", "-o", "%T").split() == ["idle"] * nodes, 60)
        yield made
    finally:
        made.close()


def wait_until(holds: Callable[[], bool], timeout_s: float) -> float:
    """Wait until something holds; return after how many seconds it did."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < timeout_s, f"not within {timeout_s} s"
        time.sleep(0.2)
    return time.monotonic() - began


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
