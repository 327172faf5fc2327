"""Whether the interpreter that SGLang's servers run with on this host has SGLang."""

import subprocess

from actors.settings.engines import SglangEngineConfig
from bus.errors import ConfigError
from launch.settings.run_config import RunConfig

ANSWER_S = 60.0
"""Longest time that an interpreter may take to name a package's version."""
ASKED = "import importlib.metadata as m; print(m.version('sglang'))"


def own_servers(config: RunConfig) -> SglangEngineConfig | None:
    """Return the settings of the run's servers on this host; None where it starts none."""
    engine = config.actors.engine.servers
    if not config.actors.engine.starts_servers:
        return None
    own = config.allow.engine_python
    return engine if own is None else engine.model_copy(update={"python": own})


def refuse_no_sglang(config: RunConfig) -> None:
    """Raise `ConfigError` where this host is to start servers of SGLang, and has none for them."""
    if (engine := own_servers(config)) is not None:
        sglang_version(engine)


def sglang_version(engine: SglangEngineConfig) -> str:
    """Return the version of SGLang that a server finds, and where. Raises `ConfigError` for none."""
    from actors.engines.sglang.server.settings import interpreter, server_environment  # loads torch

    python = interpreter(engine)
    environment = dict(server_environment(engine, {}, python))
    try:
        done = subprocess.run(
            [str(python), "-c", ASKED],
            capture_output=True, text=True, timeout=ANSWER_S, check=False, env=environment,
        )  # fmt: skip
        found, problem = done.returncode == 0, done.stderr.strip() or f"status {done.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        found, problem = False, str(error)
    if not found:
        raise ConfigError(
            f"{python} has no SGLang ({problem.splitlines()[-1]}): install it in an environment of its own "
            "(docs/engines.md), name its interpreter with --engine-python, or use "
            "--actors.engine.type embedded"
        )
    return f"{done.stdout.strip()} in {python}"
