import asyncio

import numpy as np
import psutil
import pytest

from bus.errors import SluiceError
from launch.verify.comparison import BROKEN
from soak import soak
from soak.soak import SoakPlan, run_soak
from soak.trajectory_account import exit_status, ks_p

CLEAN = {
    "lost": 0, "trained_too_often": 0, "trained_but_not_in_ledger": 0, "length_ks_p": 0.5,
    "max_staleness_seen": 2, "max_staleness_allowed": 2, "steps": 9, "retrained_batches": 9,
    "retrained_batches_equal": 9, "loss_max_abs_diff": 0.0, "weights_max_abs_diff": 0.0,
    "witness": {"trained": "once"},
    "verify": dict.fromkeys((*BROKEN, "not_verifiable"), 0) | {"re_rolled": 3},
}  # fmt: skip


def test_samples_of_one_distribution_are_alike_and_shifted_ones_are_not():
    draw = np.random.default_rng(0)
    one, other = draw.integers(0, 40, 2000), draw.integers(0, 40, 3000)
    assert ks_p(one, one) == 1.0
    assert ks_p(one, other) > 0.01
    assert ks_p(one, other[other > 3]) < 1e-6  # what lost its short answers


@pytest.mark.parametrize(
    "change",
    [
        {"lost": 4}, {"trained_too_often": 4}, {"length_ks_p": 0.001}, {"max_staleness_seen": 3},
        {"retrained_batches": 8}, {"retrained_batches_equal": 8}, {"loss_max_abs_diff": 1e-9},
        {"loss_max_abs_diff": None}, {"weights_max_abs_diff": 2e-6}, {"weights_max_abs_diff": None},
        {"witness": {"trained": "twice"}}, {"broken_promises": ["a second learner was let in"]},
        {"known_length_ks_p": 0.001},
        *({"verify": CLEAN["verify"] | {verdict: 1}} for verdict in (*BROKEN, "not_verifiable")),
    ],
    ids=str,
)  # fmt: skip
def test_anything_lost_doubled_stale_or_trained_otherwise_fails_the_soak(change):
    assert exit_status(CLEAN) == 0
    assert exit_status(CLEAN | change) == 1


@pytest.mark.nightly
@pytest.mark.nats
@pytest.mark.timeout(900)  # harm, settling, and all of it trained again
async def test_a_minute_of_faults_loses_nothing_and_the_loss_goes_on_as_if_there_had_been_none(tmp_path):
    plan = SoakPlan(minutes=1.5, seed=3, outages_s=(2.0, 5.0))
    result = await run_soak(plan, tmp_path, asyncio.Event())
    assert exit_status(result) == 0, result
    assert result["faults"] >= 10, result


@pytest.mark.slow
@pytest.mark.nats
async def test_a_soak_whose_run_never_trains_leaves_nothing_running(tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "START_TIMEOUT_S", 1.0)
    with pytest.raises(SluiceError, match="no training step within 1 s"):
        await run_soak(SoakPlan(minutes=1.0, seed=0, outages_s=(2.0, 5.0)), tmp_path, asyncio.Event())
    left = [p.info["cmdline"] for p in psutil.process_iter(["cmdline"])]
    assert not [command for command in left if str(tmp_path) in " ".join(command or [])]
