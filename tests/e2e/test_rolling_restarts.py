"""A run whose actors are restarted again and again, politely and not, while rollouts are half done.

`launch soak --rolling 600 --minutes 60` is the same at the pace of a real run."""

import json
from pathlib import Path

import pytest

from soak.rolling import WAYS
from tests.e2e.commands import Command

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.nats, pytest.mark.timeout(1500)]
INTERVAL_S, RESTARTS = 25, 6


def test_rolling_restarts_of_all_actors_quarantine_nothing_and_bias_no_length(tmp_path: Path):
    soak = Command(
        tmp_path, "soak", "--rolling", str(INTERVAL_S), "--minutes", str(INTERVAL_S * RESTARTS / 60), "--json"
    )
    try:
        status = soak.wait(1400)
        said = soak.said()
    finally:
        soak.kill()
    assert status == 0, said
    account = json.loads(said.splitlines()[-1])
    restarts = account["restarts"]
    assert len(restarts) == RESTARTS
    assert {restart["how"] for restart in restarts} == set(WAYS)
    assert all(restart["groups_rolling_out"] > 0 for restart in restarts), restarts
    told = [restart["attempts_counted"] for restart in restarts if WAYS[restart["how"]].is_told]
    assert set(told) == {0}, restarts
    nothing = "lost", "trained_too_often", "groups_rejected", "groups_left_behind", "messages_set_aside"
    assert {account[name] for name in nothing} == {0}, account
    assert min(account["known_length_ks_p"], account["length_ks_p"]) > 0.01, account
