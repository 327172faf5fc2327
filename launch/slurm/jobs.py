"""The jobs of a run on a Slurm cluster: scripts that sbatch takes, for the learner's nodes and for actors."""

import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from actors.engines.sglang.server.gpu_count import gpus_of_host
from bus.errors import ConfigError, nearest
from bus.process.child_process import module_command
from launch.settings.run_config import RunConfig
from launch.settings.slurm import SlurmConfig
from learner.config.backend import refuse_other_world
from storage.disk.atomic_files import make_directory, write_file
from storage.disk.run_directory import RunDirectory

UNTAKEN = "\\%\n"
"""Characters that mean something else to Slurm in the path of a file."""
_TEMPLATES = Environment(
    loader=PackageLoader("launch", "slurm"), undefined=StrictUndefined,
    trim_blocks=True, keep_trailing_newline=True,
)  # fmt: skip


@dataclass(frozen=True)
class Jobs:
    """The scripts of a run."""

    run: Path
    """Script of the job with bus, storage and learner."""
    actors: Path | None
    """Script of the array of actors; None for a run that generates nothing."""
    name: str

    @property
    def actors_name(self) -> str:
        return f"{self.name}-actors"


def write_jobs(config: RunConfig, settings: str) -> Jobs:
    """Write the scripts of a run, and its `settings` as TOML, into the directory `slurm` of the run. Raises
    `ConfigError` for settings with which the jobs could not run."""
    refuse_settings(config)
    directory = config.directory.absolute()
    path = RunDirectory(directory, config.run).path / "slurm"
    if found := sorted(set(UNTAKEN) & set(f"{path}{Path.cwd()}")):
        raise ConfigError(f"Slurm takes no {found[0]!r} in the path {path}: choose another --directory")
    make_directory(path)
    write_file(path / "settings.toml", settings.encode())
    name, slurm = f"sluice-{config.run}", config.slurm
    scripts = {"run.sh": [*_run_options(config, name, path), *slurm.options]}
    if config.has_rollouts:
        own = _actor_options(config, f"{name}-actors", path)
        scripts["actors.sh"] = [*own, *slurm.options, *slurm.actor_options]
    values = {
        "launch": shlex.join(module_command("launch")),
        "run": config.run,
        "directory": shlex.quote(str(directory)),
        "setup": slurm.setup,
        "look_s": slurm.look_s,
        "nodes": config.actors.engine.servers.nodes,
    }
    for script, options in scripts.items():
        text = _TEMPLATES.get_template(script).render(values, options=map(_quoted, options))
        write_file(path / script, text.encode())
    return Jobs(path / "run.sh", path / "actors.sh" if config.has_rollouts else None, name)


def refuse_settings(config: RunConfig) -> None:
    """Raise `ConfigError` for settings that the jobs of a run cannot have."""
    world, gpus = config.learner.world, config.slurm.gpus_per_node
    ranks = world.processes * world.nodes
    try:
        refuse_other_world(config.learner.parallel, ranks, config.learner.backend)
    except ConfigError as error:
        raise ConfigError(
            f"{error} (learner.world.nodes={world.nodes}, learner.world.processes={world.processes})"
        ) from error
    if gpus and world.processes > gpus:
        raise ConfigError(
            f"learner.world.processes={world.processes} ranks on a node need a GPU each, and "
            f"slurm.gpus_per_node={gpus}: set both alike, and learner.world.nodes to the number of nodes"
        )
    if config.colocation.enabled:
        raise ConfigError(
            "colocation.enabled=true: `launch slurm` gives actors nodes of their own; set it to false"
        )
    if rendezvous := config.actors.engine.servers.rendezvous:
        raise ConfigError(
            f"actors.engine.rendezvous={rendezvous!r}: each job of the array has an address of its own: "
            "leave it out"
        )
    if gpus and (own := gpus_of_host(config.actors.engine)) > gpus:
        raise ConfigError(
            f"actors.engine.server has {own} ranks on a node, and slurm.gpus_per_node={gpus}: set "
            "actors.engine.nodes to the number of nodes of an engine, or lower tp_size"
        )
    if config.policies:
        raise ConfigError(
            f"policies.{next(iter(config.policies))}: `launch slurm` starts one learner, and each further "
            "policy has its own; start the processes as docs/hosts.md says"
        )


def _run_options(config: RunConfig, name: str, path: Path) -> Iterator[str]:
    """Yield the options of the job with the learner. A second job of that name waits for the first."""
    yield from _options(config, name)
    yield f"--nodes={config.learner.world.nodes}"
    yield f"--output={path}/run-%j.out"
    yield "--dependency=singleton"


def _actor_options(config: RunConfig, name: str, path: Path) -> Iterator[str]:
    yield from _options(config, name)
    yield f"--nodes={config.actors.engine.servers.nodes}"
    yield f"--output={path}/actors-%A_%a.out"
    yield f"--array=0-{config.slurm.actors - 1}"


def _options(config: RunConfig, name: str) -> Iterator[str]:
    slurm = config.slurm
    yield f"--job-name={name}"
    for option, value in (("partition", slurm.partition), ("account", slurm.account)):
        if value is not None:
            yield f"--{option}={value}"
    if slurm.gpus_per_node:
        yield f"--gpus-per-node={slurm.gpus_per_node}"
    yield "--ntasks-per-node=1"
    yield f"--time={slurm.time_limit_min}"
    yield f"--signal=B:USR1@{slurm.signal_s}"
    yield "--requeue"
    yield "--open-mode=append"
    yield f"--chdir={Path.cwd()}"


def _quoted(option: str) -> str:
    """Return an option as a script has it: within quotes sbatch takes a backslash as a shell does."""
    if shlex.quote(option) == option:
        return option
    escaped = option.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


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
    """Submit the jobs of a run, and return in words what was submitted. Raises `ConfigError` for jobs of the
    run that are still there, and with what sbatch says of jobs that the cluster does not take; then none is
    left."""
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
    try:
        return _ask("sbatch", "--parsable", *arguments).partition(";")[0]
    except ConfigError as error:
        raise ConfigError(f"{error}: change the settings of the section slurm") from error


def _ask(*command: str) -> str:
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
