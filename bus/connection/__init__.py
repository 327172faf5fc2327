from bus.connection.bus import Bus

__all__ = ["Bus"]
