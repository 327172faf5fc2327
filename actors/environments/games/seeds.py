"""Seeds of games that a library begins at random."""

from hashlib import blake2b

from actors.episodes.task import Task

SEED = "seed"
"""Field of a prompt's metadata that names its seed."""


def seed_of(task: Task) -> int:
    """Return the seed that the task's metadata names, or else one of its prompt: all rollouts begin alike."""
    named = task.metadata.get(SEED)
    if isinstance(named, int) and not isinstance(named, bool):
        return named
    digest = blake2b(repr(task.messages[-1].get("content")).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
