"""`launch completion`: the script by which a shell completes commands, flags and their values."""

from typing import Literal

from launch.cli.app import app


@app.command(usage="Usage: launch completion bash")
def completion(shell: Literal["bash"], /) -> None:
    """Print the script by which bash completes commands, flags and their values.

    Write it to ~/.local/share/bash-completion/completions/launch, once and after each upgrade.

    Parameters
    ----------
    shell
        Shell that reads the script.
    """
    from launch.cli.completion_script import bash_script

    print(bash_script())  # noqa: T201 - the user's terminal
