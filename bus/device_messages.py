"""Taking turns on a host's devices: what learner and actors tell each other, each by a key of its own."""

import time
from dataclasses import dataclass

from bus.codec import Message

HOLD_KEY = "device"
USERS = "device-users"
"""Keys of actors begin with it."""
BEAT_S = 1.0
"""Between two times that a process sets its key, changed or not: so it is known to live."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceHold(Message, tag="device_hold"):
    """The learner wants the devices of its host, or wants them no more."""

    incarnation: str
    number: int
    """Counts its holds."""
    host: str
    """Where: `storage.addresses.host_identity`."""
    held: bool

    @property
    def name(self) -> str:
        """This hold among all of the run."""
        return f"{self.incarnation}.{self.number}"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceUser(Message, tag="device_user"):
    """An actor that shares the devices of its host with the learner."""

    actor: str
    host: str
    yielded_to: str
    """Name of the hold for which its engines freed the devices; empty while they may use them."""


def user_key(actor: str) -> str:
    """Where an actor says what it does."""
    return f"{USERS}.{actor}"


class Beats:
    """Whether somebody still sets a key, by this process's clock: clocks of others are not believed."""

    def __init__(self, lapse_s: float) -> None:
        self._lapse_s = lapse_s
        self._revision = -1
        self._since_s = 0.0

    def alive(self, revision: int) -> bool:
        """Whether the key, which has this revision now, had another less than `lapse_s` ago."""
        if revision != self._revision:
            self._revision, self._since_s = revision, time.monotonic()
        return time.monotonic() - self._since_s < self._lapse_s

    def unknown(self) -> None:
        """The key could not be read: that says nothing about who sets it."""
        self._since_s = time.monotonic()
