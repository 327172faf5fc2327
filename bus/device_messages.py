"""Messages by which learner and actors take turns on a host's devices. Each process sets a key of its own."""

import time
from dataclasses import dataclass

from bus.codec import Message

HOLD_KEY = "device"
USERS = "device-users"
"""Prefix of the actors' keys."""
BEAT_S = 1.0
"""Seconds between two settings of a key, changed or not, by which a process shows that it lives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceHold(Message, tag="device_hold"):
    """The learner claims the devices of its host, or claims them no longer."""

    incarnation: str
    number: int
    """Number of this claim, counted by the learner."""
    host: str
    """Host of the devices, by `storage.disk.host_identity.host_identity`."""
    held: bool

    @property
    def name(self) -> str:
        """Return the name of this claim, unique in the run."""
        return f"{self.incarnation}.{self.number}"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceUser(Message, tag="device_user"):
    """An actor that shares the devices of its host with the learner."""

    actor: str
    host: str
    yielded_to: str
    """Name of the claim for which its engines freed the devices; empty while they may use them."""


def user_key(actor: str) -> str:
    return f"{USERS}.{actor}"


class Beats:
    """Knows whether a key is still being set, by this process's clock; clocks of other hosts may be wrong."""

    def __init__(self, lapse_s: float) -> None:
        self._lapse_s = lapse_s
        self._revision = -1
        self._since_s = 0.0

    def alive(self, revision: int) -> bool:
        """Return whether the key, which has this revision now, had another one less than `lapse_s` ago."""
        if revision != self._revision:
            self._revision, self._since_s = revision, time.monotonic()
        return time.monotonic() - self._since_s < self._lapse_s

    def unknown(self) -> None:
        """Note that the key could not be read, which says nothing about the process that sets it."""
        self._since_s = time.monotonic()
