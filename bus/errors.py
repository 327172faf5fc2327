"""Every exception the system raises on purpose: few types, each named for what the caller can do."""


class SluiceError(Exception):
    """Root of all errors raised on purpose; its message holds the values and the remedy."""


class ConfigError(SluiceError, ValueError):
    """The user gave something that cannot work: report it without a traceback and exit with status 2."""


class SchemaError(SluiceError, ValueError):
    """Bytes on the bus are not a message this build understands, or may act on: a retry cannot help."""

    def __init__(self, reason: str = "", *, kind: str = "unreadable", actor: str = "") -> None:
        super().__init__(reason)
        self.kind = kind
        """A word to count such messages by; part of a subject."""
        self.actor = actor
        """Who made the message, where it says so."""


class HandBackError(SluiceError):
    """This process will not do the work of a message, which is as good as ever: let another have it."""


class BusError(SluiceError):
    """The bus refused, is missing, or did not answer in time."""


class DamagedError(BusError):
    """Bytes came that are not what was announced: where they came from is not to be trusted."""


class FencedError(SluiceError):
    """Another process took over this role: stop at once, write nothing more."""


class WorldError(SluiceError):
    """Another process of the learner's world is gone: this one cannot go on alone."""


class EngineError(SluiceError):
    """An inference engine failed or returned something that cannot be a generation."""


class RequestRefusedError(EngineError):
    """An engine can never serve this request, and is well: it does not fit, or its id is in use."""


class WeightsKeptError(EngineError):
    """New weights could not be had: the engine is well, and goes on with those it has."""


class EngineLostError(EngineError):
    """No engine is left to generate: this process cannot go on, its work is another's."""


class TrainingError(SluiceError):
    """Training cannot go on from where it is: an older checkpoint or other settings are needed."""


class StorageError(SluiceError):
    """Data on disk is missing, torn, or not what its manifest says."""
