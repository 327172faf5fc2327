"""`launch doctor`: all checks of this host for a run, in order."""

import asyncio
from collections.abc import Callable, Iterator
from functools import partial

from bus.errors import BusError, ConfigError
from launch.doctor.bus import check_bus
from launch.doctor.findings import Finding, refused, worst
from launch.doctor.host import check_disk, check_gpu, check_limits, check_ports, check_variables
from launch.doctor.model import check_model
from launch.doctor.packages import check_nats_server, check_packages, check_python, check_sglang
from launch.settings.run_config import RunConfig

ShowFinding = Callable[[Finding], None]


async def examine(config: RunConfig, named_bus: bool, say: ShowFinding, stop: asyncio.Event) -> list[Finding]:
    """Make every check, tell each finding to `say` as it comes, and return all; ends early on `stop`. Starts
    nothing that stays and leaves no file."""
    findings: list[Finding] = []

    def note(finding: Finding) -> None:
        findings.append(finding)
        say(finding)

    for check in _checks(config):
        if stop.is_set():
            return findings
        for finding in await asyncio.to_thread(list, check()):
            note(finding)
    on_bus = [finding async for finding in check_bus(config, named_bus)]
    for finding in on_bus:
        note(finding)
    if worst(on_bus) != "error" and (config.data.prompts or config.data.sources or config.data.task):
        note(await _start(config, named_bus, stop))
    return findings


async def _start(config: RunConfig, named_bus: bool, stop: asyncio.Event) -> Finding:
    """Tell whether a start would begin, but for what the learner asks of a model, which has a finding."""
    from launch.checks.start_checks import rehearse_local

    try:
        said = await rehearse_local(config, stop, own_bus=not named_bus, models=False)
    except (ConfigError, BusError) as error:
        return refused("start", error, "change this setting")
    return Finding("start", "ok", said.splitlines()[0])


def _checks(config: RunConfig) -> Iterator[Callable[[], Iterator[Finding]]]:
    yield from (check_python, check_packages, check_nats_server)
    yield from (partial(check, config) for check in (check_sglang, check_gpu))
    yield from (partial(check_disk, config.directory), partial(check_ports, config))
    yield from (check_limits, check_variables, partial(check_model, config))
