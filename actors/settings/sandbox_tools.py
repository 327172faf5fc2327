"""Settings of the tools that an episode's sandbox offers. Loads without torch."""

from typing import Literal

from pydantic import Field

from actors.settings.episode_sandboxes import EpisodeSandboxes, NamespaceSandboxes

TOOLS = {"shell": ("shell",), "python": ("python",), "files": ("read_file", "write_file", "edit_file")}
"""Names of the tools by what offers them."""


class SandboxToolConfig(EpisodeSandboxes):
    """Tools in a sandbox that each episode has for itself: a shell, files and a Python session."""

    type: Literal["sandbox"] = "sandbox"
    """Name of the tool's kind."""
    at_once: int = Field(32, ge=1)
    """Most sandboxes of this actor at a time; further episodes wait for one."""
    offers: tuple[Literal["shell", "python", "files"], ...] = Field(
        ("shell", "python", "files"), min_length=1
    )
    """Tools that the model gets: `shell`, `python`, and with `files` `read_file`, `write_file` and
    `edit_file`."""
    heldout_at_once: int | None = Field(None, ge=1)
    """Most sandboxes of held-out tasks beside the `at_once` of others, so that neither waits for the other.
    `None` means a quarter as many."""
    command_s: float = Field(60.0, gt=0)
    """Longest time that a command may run; then it is ended, and the sandbox goes on."""
    output_kb: int = Field(64, ge=1)
    """Output of a command after which it is ended; the model sees no more than `output_characters` of it."""
    check: str | None = None
    """Shell command by which the reward `sandbox_check` judges the workspace that the model left. It runs in
    a new sandbox, beside texts of the prompt's metadata `sandbox_check_files`, which the model never sees. It
    reads a line on its standard input, and passes by status 0 with that line as the last of its output. A
    number behind it is the reward."""
    python: str | None = None
    """Interpreter of the Python session; `None` is the actor's own in namespaces, with its packages, and
    `python3` elsewhere."""

    @property
    def on_this_host(self) -> bool:
        return isinstance(self.backend, NamespaceSandboxes)

    @property
    def heldout_sandboxes(self) -> int:
        """Return how many sandboxes of held-out tasks there may be beside those of others."""
        return self.heldout_at_once or max(1, self.at_once // 4)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for kind in self.offers for name in TOOLS[kind])
