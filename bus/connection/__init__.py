"""One connection: requests and answers, keys, roles, status."""

from bus.connection.bus import Bus

__all__ = ["Bus"]
