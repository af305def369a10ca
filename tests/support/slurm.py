"""A SLURM of two nodes on this machine: munge, one controller and two `slurmd -N`, in a folder of their own."""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from support.waiting import until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "squeue", "sinfo", "srun")
# Their names are addresses: that of rank 0, which the example takes from SLURM's list of nodes, needs no DNS then.
NODES = ("127.0.0.1", "127.0.0.2")
# Daemons are where packages put them, which is not in everyone's PATH.
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])

# select/linear: a job has whole nodes. cred_expire: a job that is requeued waits until its credential has expired.
_CONFIG = """
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SelectType=select/linear
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
KillWait=10
SlurmdParameters=config_overrides
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=64
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=64
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """The programs of SLURM and munge that this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]


class Cluster:
    """The two nodes; close it to end every process that it started.

    Args:
        folder: An empty folder with a short path, since a Unix socket has at most 107 characters.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._environment = {**os.environ, "PATH": _PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        self._write_files()
        try:
            self._start_all()
        except BaseException:
            self.close()
            raise

    def submit(self, script: Path, options: Sequence[str], words: Sequence[str], variables: Mapping[str, str]) -> int:
        """`sbatch OPTIONS SCRIPT WORDS`; the number of the job."""
        said = self.run("sbatch", "--parsable", *options, str(script), *words, variables=variables)
        return int(said.split(";")[0])

    def run(self, *command: str, variables: Mapping[str, str] | None = None) -> str:
        """What a command of SLURM prints."""
        environment = {**self._environment, **(variables or {})}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stderr}\n{self.logs()}"
        return done.stdout.strip()

    def state(self, job: int) -> dict[str, str]:
        """What SLURM knows of a job: JobState, Restarts, ExitCode and more."""
        words = self.run("scontrol", "--oneliner", "show", "job", str(job)).split()
        return dict(word.partition("=")[::2] for word in words)

    def wait_for_end(self, job: int, timeout: float = 200) -> dict[str, str]:
        """The state of a job that has ended, and is not in the queue again."""
        going = ("PENDING", "RUNNING", "COMPLETING", "REQUEUED", "CONFIGURING")
        until(
            lambda: self.state(job)["JobState"] not in going,
            lambda: f"{self.state(job)}\n{self.logs()}",
            timeout,
            every=0.5,
        )
        return self.state(job)

    def logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in sorted(self._folder.glob("*.log")))

    def close(self) -> None:
        """End jobs and daemons."""
        if len(self._daemons) > 2:
            subprocess.run(["scancel", "--user", getpass.getuser()], env=self._environment, timeout=60)
            with suppress(AssertionError):
                self._wait_for_answer("squeue", "--noheader", answers="", seconds=30)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _write_files(self) -> None:
        key = self._folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        (self._folder / "state").mkdir()
        values = {"host": socket.gethostname(), "user": getpass.getuser(), "folder": self._folder, "nodes": NODES}
        (self._folder / "slurm.conf").write_text(_CONFIG.format(ports=_free_ports(3), **values))

    def _start_all(self) -> None:
        place = self._folder / "munge"
        files = {"key": "key", "pid": "pid", "log": "log", "seed": "seed"}
        names = [f"--{what}-file={place}.{ending}" for what, ending in files.items()]
        self._start("munged", "--foreground", "--force", f"--socket={place}.socket", *names)
        until(Path(f"{place}.socket").exists, self.logs, 20)
        self._start("slurmctld", "-D")
        for node in NODES:
            self._start("slurmd", "-D", "-N", node)
        self._wait_for_answer("sinfo", "--noheader", "--format=%D %T", answers="2 idle", seconds=60)

    def _start(self, *command: str) -> None:
        with (self._folder / "daemons.log").open("ab") as log:
            program = [shutil.which(command[0], path=_PATH) or command[0], *command[1:]]
            self._daemons.append(subprocess.Popen(program, env=self._environment, stdout=log, stderr=log))

    def _wait_for_answer(self, *command: str, answers: str, seconds: float) -> None:
        def is_there() -> bool:
            said = subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=60)
            return said.returncode == 0 and said.stdout.strip() == answers

        until(is_there, self.logs, seconds, every=0.2)


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()
