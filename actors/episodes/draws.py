"""Random draws that repeat: of the name of what is drawn, so that no generator has a state."""

from hashlib import blake2b


def uniform_draw(name: str) -> float:
    """Return a number in (0, 1) that is drawn by name: equal wherever and however often it is asked for."""
    digest = blake2b(name.encode(), digest_size=8).digest()
    return ((int.from_bytes(digest, "big") >> 12) + 0.5) / 2**52
