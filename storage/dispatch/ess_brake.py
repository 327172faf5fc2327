"""The brake on admission: how many steps in a row had too small an effective sample size, and until when it
holds.
"""

import json

from bus.messages import PolicyManifest
from storage.ledger.ledger import Ledger
from storage.settings.admission import EssBrakeConfig

FACT = "ess_brake"
"""Fact of the ledger: where the brake stands, as JSON."""


class EssBrake:
    """Says whether only what the next step needs may be issued.

    It begins to hold after `steps` steps in a row whose effective sample size was below the threshold, and
    lets go after as many in a row at or above it. Each published version says the figure of the step that
    made it; one without a figure changes nothing. The ledger keeps where it stands, so that a restart of
    storage lets go of nothing.
    """

    def __init__(self, ledger: Ledger, config: EssBrakeConfig) -> None:
        """Go on from what the ledger says; without a threshold it never holds."""
        self._ledger = ledger
        self._config = config
        found = json.loads(ledger.facts.get(FACT, "{}")) if config.below is not None else {}
        self.holds = bool(found.get("holds", False))
        self._in_a_row = int(found.get("in_a_row", 0))
        """Steps in a row whose figure speaks for the other state than the present one."""
        self._latest: tuple[str, int] = (found.get("incarnation", ""), found.get("version", -1))
        """Learner and version that were counted last: a version may be announced again."""
        self._fraction = float(found.get("fraction", 1.0))

    def hear(self, manifest: PolicyManifest) -> None:
        """Count the step that made a version, once."""
        below, fraction = self._config.below, manifest.ess_fraction
        version = (manifest.incarnation, manifest.policy_version)
        if below is None or fraction is None or version == self._latest:
            return
        if manifest.incarnation != self._latest[0]:  # it may have come back from steps that no longer count
            self._in_a_row = 0
        self._latest, self._fraction = version, fraction
        self._in_a_row = self._in_a_row + 1 if (fraction < below) != self.holds else 0
        if self._in_a_row >= self._config.steps:
            self.holds, self._in_a_row = not self.holds, 0
        self._ledger.set_fact(FACT, self._state())

    def _state(self) -> str:
        return json.dumps({
            "holds": self.holds,
            "in_a_row": self._in_a_row,
            "incarnation": self._latest[0],
            "version": self._latest[1],
            "fraction": self._fraction,
        })  # fmt: skip

    @property
    def reason(self) -> str:
        """Return why leases are held back, in words; nothing while it does not hold."""
        if not self.holds:
            return ""
        return (
            f"waiting for the effective sample size: it was {self._fraction:.3f} in the step of version "
            f"{self._latest[1]}, and admission.ess_brake lets go after {self._config.steps} steps in a row "
            f"of at least {self._config.below:g}; until then leases are issued for the next step alone"
        )
