"""Whether the interpreter that SGLang's servers run with on this host has SGLang."""

import subprocess
from pathlib import Path

from actors.engines.config import SglangEngineConfig
from actors.engines.sglang.settings import interpreter
from bus.errors import ConfigError
from launch.config import RunConfig

ANSWER_S = 60.0
"""Longest time that an interpreter may take to name a package's version."""
ASKED = "import importlib.metadata as m; print(m.version('sglang'))"


def sglang_python(config: RunConfig) -> Path | None:
    """Return the interpreter of the run's servers on this host; None where it starts none.

    Raises `ConfigError` where there is none."""
    engine = config.actors.engine
    if not isinstance(engine, SglangEngineConfig) or engine.attached:
        return None
    own = config.allow.engine_python
    return interpreter(engine if own is None else engine.model_copy(update={"python": own}))


def refuse_no_sglang(config: RunConfig) -> None:
    """Raise `ConfigError` where this host is to start servers of SGLang, and has none for them."""
    if (python := sglang_python(config)) is not None:
        sglang_version(python)


def sglang_version(python: Path) -> str:
    """Return the version of SGLang that an interpreter has. Raises `ConfigError` for one without."""
    try:
        done = subprocess.run(
            [str(python), "-c", ASKED], capture_output=True, text=True, timeout=ANSWER_S, check=False
        )
        said = (done.stdout.strip() or done.stderr.strip() or f"status {done.returncode}").splitlines()[-1]
    except (OSError, subprocess.TimeoutExpired) as error:
        said = str(error)
    if not said[:1].isdecimal():
        raise ConfigError(
            f"{python} has no SGLang ({said}): install it in an environment of its own (docs/engines.md), "
            "name its interpreter with --engine-python, or use --actors.engine.type embedded"
        )
    return said
