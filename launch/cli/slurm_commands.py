"""`launch slurm`: the jobs of a run on a Slurm cluster."""

from typing import Annotated

from bus.config import URL_VARIABLE, without_credentials
from bus.errors import ConfigError
from launch.cli import options
from launch.cli.app import USAGE, app, log_as
from launch.cli.given_settings import GivenSettings
from launch.settings.run_config import RunConfig, resolve
from launch.settings.sources import merged


@app.command(usage=USAGE.format("slurm"))
def slurm(
    *,
    preset_name: options.PresetName = None,
    config: options.ConfigFiles = None,
    submit: Annotated[bool, options.short("--submit", negative=())] = False,
    log: options.Logging = options.LogOptions(),
    settings: options.Settings = RunConfig(),
) -> None:
    """Write the jobs of a run on a Slurm cluster, and submit them.

    One job has bus, storage and a learner of `learner.world.nodes` nodes; each job of an array has an actor.
    The section `slurm` of the settings says what the cluster is asked for. --directory must be on a disk
    that all nodes share; the scripts are written into RUN/slurm there.

    Parameters
    ----------
    submit
        Submit the jobs, from a login node of the cluster.
    """
    from launch.cli.print_config import printed_toml
    from launch.slurm.jobs import refuse_no_cluster, write_jobs
    from launch.slurm.jobs import submit as submit_jobs

    log_as(log, "slurm", level="warning")
    sources = GivenSettings(preset_name=preset_name, config=config).sources(settings)
    layer = merged(sources)
    if "url" in layer.get("bus", {}):
        raise ConfigError(
            f"bus.url={without_credentials(layer['bus']['url'])}: `launch slurm` starts its own bus; leave "
            f"it and {URL_VARIABLE} out"
        )
    resolved = resolve(layer)
    if submit:
        refuse_no_cluster(resolved.slurm)
    jobs = write_jobs(resolved, printed_toml(resolved, sources))
    said = submit_jobs(jobs) if submit else "--submit submits them, on a login node of the cluster"
    print(f"wrote {' and '.join(map(str, filter(None, (jobs.run, jobs.actors))))}: {said}")  # noqa: T201 - the user's terminal
