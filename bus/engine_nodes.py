"""What the nodes of an engine say of themselves to each other. Each sets a key of its own."""

from dataclasses import dataclass

from xxhash import xxh3_64

from bus.codec import Message

NODES = "engine-nodes"
"""Prefix of the keys."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineNode(Message, tag="engine_node"):
    """A node of an engine, as long as the key is being set (`bus.device_messages.Beats`)."""

    process: str
    """Random name of the actor process. That of node 0 names the engine: nodes of another start anew."""
    engine: str
    """Name of the engine whose ranks this node runs."""
    host: str
    ended: str = ""
    """Why the node's ranks have ended; empty while they run."""
    shared_file: str = ""
    """A file of node 0 in the directory of weights, which the other nodes must see; empty for none."""


def node_key(rendezvous: str, rank: int) -> str:
    return f"{NODES}.{xxh3_64(rendezvous.lower().encode()).hexdigest()}-{rank}"
