"""Whether a policy plays in the groups of an actor: one that never does would be waited for without end."""

from bus.errors import ConfigError

MOST_WITHOUT_PART = 200
"""First groups without a part for a policy after which nobody is taken to be it, and the run ends."""


class Participation:
    """Counts the groups in a row in which one policy took no part, until it is seen to play."""

    def __init__(self, policy: str, remedy: str) -> None:
        """Count for `policy`; `remedy` says what to do where it never plays."""
        self._policy = policy
        self._remedy = remedy
        self._without_part = 0
        self._has_played = False

    def note(self, *, took_part: bool, has_played: bool) -> None:
        """Count one group. One whose episodes failed for the policy too shows nothing: `took_part` holds.
        Raises `ConfigError` for a policy that never had a part; one that plays in few groups may wait
        long."""
        self._has_played = self._has_played or has_played
        self._without_part = 0 if took_part else self._without_part + 1
        if self._without_part >= MOST_WITHOUT_PART and not self._has_played:
            seen = f"policy {self._policy!r} took no part in {self._without_part} groups in a row"
            raise ConfigError(f"{seen}: {self._remedy}")
