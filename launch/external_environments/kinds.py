"""What each kind of environment of others needs: its packages, its adapter and its network."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Kind:
    """How environments of one library are had."""

    packages: Callable[[str], tuple[str, ...]]
    """Function from the name of an environment to what pip installs for it."""
    about: str
    """What stands behind the colon, for errors."""
    network: Literal["gateway", "host"] = "gateway"
    """What its process reaches while it plays; all may reach the network while rows are made."""


HUB = "https://hub.primeintellect.ai/{}/simple/"
"""Package index of an owner on the Environments Hub."""


def _of_verifiers(name: str) -> tuple[str, ...]:
    """Return what pip gets for `package`, `owner/name` or `owner/name@version`; `:module` is left out."""
    package = name.partition(":")[0]
    of_hub = re.fullmatch(r"([\w-]+)/([\w.-]+)(?:@([\w.+-]+))?", package)
    if of_hub is None:
        return (package,)
    owner, found, version = of_hub.groups()
    return (f"{found}=={version}" if version else found, f"--extra-index-url={HUB.format(owner)}")


KINDS: Mapping[str, Kind] = {
    "gymnasium": Kind(lambda _: ("gymnasium[toy-text]>=1,<2",), "the id of an environment, as FrozenLake-v1"),
    "nemo_gym": Kind(lambda _: (), "the URL of a resources server, with the setting data", "host"),
    "openenv": Kind(lambda _: ("openenv>=0.10,<0.11",), "the URL of a server", "host"),
    "textarena": Kind(lambda _: ("textarena>=0.7.4,<0.8",), "the id of a game, as GuessTheNumber-v0"),
    "verifiers": Kind(
        _of_verifiers, "a package with an environment, owner/name of the hub, or package:module"
    ),
}
"""Each kind by its name, whose adapter is `adapters/NAME_adapter.py`."""
