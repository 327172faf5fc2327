"""`launch completion`: the scripts by which shells complete commands, flags and their values."""

from typing import Literal

from launch.cli.app import app


@app.command(usage="Usage: launch completion bash|zsh|fish")
def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print the scripts by which shells complete commands and flags.

    Write it, once and after each upgrade, to ~/.local/share/bash-completion/completions/launch for bash, to
    ~/.config/fish/completions/launch.fish for fish, and to a file _launch in a directory of $fpath for zsh.

    Parameters
    ----------
    shell
        Shell that reads the script.
    """
    from launch.cli.completion_script import script

    print(script(shell))  # noqa: T201 - the user's terminal
