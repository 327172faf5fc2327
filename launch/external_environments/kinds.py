"""What each kind of environment of others needs: its packages, its adapter and its network."""

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


KINDS: Mapping[str, Kind] = {
    "gymnasium": Kind(lambda _: ("gymnasium[toy-text]>=1,<2",), "the id of an environment, as FrozenLake-v1"),
    "nemo_gym": Kind(lambda _: (), "the URL of a resources server, with the setting data", "host"),
    "openenv": Kind(lambda _: ("openenv>=0.10,<0.11",), "the URL of a server", "host"),
    "textarena": Kind(lambda _: ("textarena>=0.7.4,<0.8",), "the id of a game, as GuessTheNumber-v0"),
    "verifiers": Kind(
        lambda name: (name.partition(":")[0],),
        "a package with an environment of verifiers, or package:module",
    ),
}
"""Each kind by its name, whose adapter is `adapters/NAME_adapter.py`."""
