"""A SLURM site on this machine, on loopback: munged, slurmctld and one slurmd, with all their files in one folder."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "srun", "scontrol", "sinfo")
MAX_ARRAY = 3
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmdPort={d_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,batch_sched_delay=1,defer
ReturnToService=2
KillWait=2
MaxArraySize={max_array}
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=60 State=UP OverSubscribe=NO
"""


def why_not() -> str | None:
    """What this machine lacks to run a site."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [name for name in PROGRAMS if not shutil.which(name, path=path)]
    return f"{', '.join(missing)} not found; `make services` installs SLURM" if missing else None


@contextlib.contextmanager
def site(folder: Path) -> Iterator[None]:
    """Within, sbatch and its like speak to this site through $SLURM_CONF. RuntimeError with its logs if it does not
    start."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    folder.chmod(0o755)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    conf = folder / "slurm.conf"
    fields = {"host": socket.gethostname().partition(".")[0], "user": getpass.getuser(), "folder": folder}
    conf.write_text(CONF.format(ctld_port=free_port(), d_port=free_port(), max_array=MAX_ARRAY, **fields))
    env = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin", "SLURM_CONF": str(conf)}
    files = {"socket": "sock", "key-file": "key", "log-file": "log", "pid-file": "pid", "seed-file": "seed"}
    munge = [f"--{name}={folder}/munge.{end}" for name, end in files.items()]
    commands = [
        ["munged", "--foreground", "--force", *munge],
        ["slurmctld", "-D", "-c"],
        ["slurmd", "-D", "-c"],
    ]
    daemons = []
    before = os.environ.get("SLURM_CONF")
    try:
        for command in commands:
            with open(folder / f"{command[0]}.txt", "wb") as log:
                daemons.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True))
            if command[0] == "munged":
                wait_for(lambda: (folder / "munge.sock").exists(), daemons)
        os.environ["SLURM_CONF"] = str(conf)
        wait_for(lambda: b"idle" in subprocess.run(["sinfo", "-h", "-o", "%T"], capture_output=True).stdout, daemons)
        yield
    except TimeoutError:
        logs = "\n".join(file.read_text(errors="replace")[-1500:] for file in folder.glob("*.txt"))
        raise RuntimeError(f"SLURM did not start:\n{logs}") from None
    finally:
        subprocess.run(["scancel", "--me"], env=env, capture_output=True)
        with contextlib.suppress(TimeoutError):  # what runs a step waits for ever for a controller that is gone
            wait_for(lambda: not subprocess.run(["squeue", "-h"], env=env, capture_output=True).stdout, daemons)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()
        os.environ.pop("SLURM_CONF", None)
        if before:
            os.environ["SLURM_CONF"] = before


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(condition, daemons, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in daemons):
            raise TimeoutError
        time.sleep(0.2)
