"""`launch init`: writes a configuration file to start from."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from bus.errors import ConfigError
from launch.cli.app import PresetName, app
from launch.settings.run_config import preset

STANDARD_OUTPUT = Path("-")


@app.command(usage="Usage: launch init [FILE] [OPTIONS]")
def init(
    file: Annotated[Path, Parameter(allow_leading_hyphen=True)] = Path("sluice.toml"),
    /,
    *,
    preset_name: PresetName = None,
    everything: Annotated[bool, Parameter(name="--all", negative=())] = False,
) -> None:
    """Write a configuration file in which every line is explained.

    It has the settings that most runs set. Its lines are comments that show the
    defaults, so that the file as it is changes nothing.

    Parameters
    ----------
    file
        File to write, .toml, which must not exist; - writes to standard output.
    everything
        Write every setting there is.
    """
    from launch.cli.config_template import template

    name = "sluice.toml" if file == STANDARD_OUTPUT else str(file)
    if not name.endswith(".toml"):
        raise ConfigError(f"{name} would be read as JSON or not at all: give it a name that ends with .toml")
    text = template(name, preset(preset_name) if preset_name else {}, everything=everything)
    if file == STANDARD_OUTPUT:
        sys.stdout.write(text)
        return
    try:
        with file.open("x") as created:
            created.write(text)
    except FileExistsError:
        raise ConfigError(f"{file} exists already, and is left as it is: name another file") from None
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}: name a file elsewhere") from error
    print(f"wrote {file}: edit it, then `launch local --config {file}`")  # noqa: T201 - the user's terminal
