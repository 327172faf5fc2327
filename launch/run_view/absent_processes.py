"""Tells which processes of a run that starts have not reported yet."""

from launch.run_view.monitor import RunMonitor

ROLES = ("learner", "storage", "actor")
ABSENT = "no report yet: to load its libraries takes several seconds"


def absent_processes(monitor: RunMonitor) -> list[str]:
    """Return the roles of which no process has reported; none once the learner says what it does."""
    if monitor.stage != "starting":
        return []
    there = {process.status.role for process in monitor.shown()}
    return [role for role in ROLES if role not in there]
