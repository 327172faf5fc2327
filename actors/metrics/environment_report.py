"""What an actor tells of its environment: the state of rollouts led from outside, and its rewards."""

from actors.environments.base import CallsRewards, Environment, RunsOnDemand
from actors.rewards.scoring.call_times import reward_report
from bus.codec import Json


def environment_report(environment: Environment) -> dict[str, Json]:
    """Return numbers for screens; nothing of rewards where an environment computes them by itself."""
    return {
        **(environment.status if isinstance(environment, RunsOnDemand) else {}),
        **(reward_report(environment.reward_times) if isinstance(environment, CallsRewards) else {}),
    }


def idle_text(environment: Environment) -> str:
    """Return what an actor waits for whose engines have no request."""
    times = environment.reward_times if isinstance(environment, CallsRewards) else ()
    return "waiting for rewards" if any(one.running for one in times) else "waiting for leases"
