"""Submits the jobs of a run to the Slurm cluster of this host."""

import shlex
import shutil
import subprocess

from bus.errors import ConfigError
from launch.settings.slurm import SlurmConfig
from launch.settings.tree import nearest
from launch.slurm.jobs import Jobs

ANSWER_S = 60.0
"""Longest time that Slurm's controller may take to answer."""


def refuse_no_cluster(slurm: SlurmConfig) -> None:
    """Raise `ConfigError` on a host that is none of a cluster, and for a partition that the cluster lacks."""
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "--submit needs sbatch, which is not installed here: run the command on a login node of the "
            "cluster, or leave --submit out, which only writes the scripts"
        )
    partitions = _ask("sinfo", "--all", "--noheader", "--format=%R").split()
    if slurm.partition is not None and (unknown := {*slurm.partition.split(",")} - {*partitions}):
        name = min(unknown)
        raise ConfigError(
            f"slurm.partition: the cluster has no partition {name!r}: {nearest(name, partitions)}there are: "
            f"{', '.join(partitions)}"
        )


def submit(jobs: Jobs) -> str:
    """Submit the jobs of a run, and return in words what was submitted.

    Raises `ConfigError` for jobs of the run that are still there, and with what sbatch says of jobs that the
    cluster does not take; then none is left."""
    names = f"{jobs.name},{jobs.actors_name}"
    if there := _ask("squeue", "--me", "--noheader", f"--name={names}", "--format=%i").split():
        raise ConfigError(
            f"the run has jobs already: {', '.join(there)}; end them with `scancel --me --name={names}`"
        )
    run = _sbatch(str(jobs.run))
    submitted = f"job {run} has bus, storage and learner"
    if jobs.actors is not None:
        try:
            actors = _sbatch(f"--dependency=after:{run}", str(jobs.actors))
        except ConfigError:
            _ask("scancel", run)
            raise
        submitted += f", the array {actors} has the actors"
    return f"{submitted}: `squeue --me --name={names}` shows them, and their logs are in {jobs.run.parent}"


def _sbatch(*arguments: str) -> str:
    """Submit a script, and return the number of its job."""
    try:
        return _ask("sbatch", "--parsable", *arguments).partition(";")[0]
    except ConfigError as error:
        raise ConfigError(f"{error}: change the settings of the section slurm") from error


def _ask(*command: str) -> str:
    """Return what a command of Slurm prints. Raises `ConfigError` with its message if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{command[0]} has not answered in {ANSWER_S:.0f} s: is Slurm's controller there? Try again later"
        ) from error
    if done.returncode:
        said = "; ".join(done.stderr.strip().splitlines())
        raise ConfigError(f"{shlex.join(command)} failed: {said}")
    return done.stdout.strip()
