"""What the dashboard calls an alert: figures, collapses, failures, idle engines and a full disk, in words."""

from collections import namedtuple
from pathlib import Path

import pytest

from bus.codec import Json
from launch.dashboard import alerts
from launch.dashboard.alerts import RunAlerts, StepAlerts, disk_alerts, state_alerts
from launch.settings.run_config import RunConfig, validate
from storage.metrics.records import metrics_record
from tests.launch.dashboard.run_on_disk import make_run
from tests.launch.messages import actor, learner, metrics, state_of

CONFIG = validate({"run": "test", "admission": {"max_staleness": 4}})


def after(*steps: dict[str, Json], config: RunConfig = CONFIG) -> list[str]:
    """Return the alerts after these steps, whose reward is 0.5 where they have no other."""
    found = StepAlerts()
    for number, values in enumerate(steps, 1):
        reward = values.get("reward", 0.5)
        own = {key: value for key, value in values.items() if key != "reward"}
        found.add(metrics_record(metrics(number, reward=reward, **own)))
    return found.words(config)


def test_a_reward_that_was_lost_again_is_a_collapse():
    rewards = [*[0.2] * 10, *[0.8] * 10, *[0.3] * 10]
    [said] = after(*({"reward": reward} for reward in rewards))
    assert said.startswith(
        "the reward has collapsed: 0.3 on average over the last 10 steps, 0.8 up to step 20;"
    )
    assert after(*({"reward": reward} for reward in rewards[:22])) == []
    assert after(*({"reward": reward} for reward in [*[-0.9] * 10, *[-0.4] * 10, *[-0.5] * 10])) == []


def test_entropy_that_is_gone_is_a_collapse():
    steps = [{"policy/entropy_nats": nats} for nats in [1.0] * 10 + [0.03] * 10]
    [said] = after(*steps)
    assert said.startswith("the entropy has collapsed: 0.03 nats a token, 1 at first;")
    assert after(*steps[:12]) == []


def test_what_a_resumed_learner_undid_counts_no_more():
    undone = [*range(1, 11), *range(11, 21), *range(2, 13)]
    found = StepAlerts()
    for place, number in enumerate(undone):
        found.add(metrics_record(metrics(number, reward=0.9 if 10 <= place < 20 else 0.2)))
    assert found.words(CONFIG) == []


def test_figures_out_of_their_range_are_told_with_their_meaning():
    low, high = after({"policy/ess_fraction": 0.1, "policy/k3_nats": 3.0})
    assert low.startswith("policy/ess_fraction is 0.1, below 0.3: few tokens carry the update, since")
    assert high.startswith("policy/k3_nats is 3, above 0.2: the policy is far from the one that sampled")
    assert after({"policy/ess_fraction": 0.9, "policy/k3_nats": 0.1}) == []


def test_any_mismatch_in_exact_arithmetic_is_told():
    exact = validate({
        "run": "test", "model": {"numerics": "exact", "dtype": "float32"},
        "learner": {"backend": "fsdp", "publish_dtype": "float32"},
    })  # fmt: skip
    [said] = after({"policy/mismatch_nats": 1e-7}, config=exact)
    assert said.startswith("policy/mismatch_nats is 1e-07, above 0: engine and learner disagree")
    assert after({"policy/mismatch_nats": 0.0}, config=exact) == []
    assert after({"policy/mismatch_nats": 1e-7}) == []


def test_staleness_beyond_its_bound_is_told():
    assert after({"staleness/max_versions": 6}) == [
        "the last step trained on tokens that are 6 versions old, and admission.max_staleness is 4"
    ]
    assert after({"staleness/max_versions": 4}) == []


def test_alarms_failures_and_idle_engines_of_a_live_run_are_told():
    def said(*statuses) -> list[str]:
        return state_alerts(state_of(*statuses))

    assert said(learner(), actor(running=0, waiting=0), actor(1, waiting=0)) == []
    assert said(learner(alarm="the digest did not change")) == ["learner says: the digest did not change"]
    waits = actor(wait="leases", running=0, waiting=0)
    yields = actor(2, wait="device", running=0, waiting=0)
    idle = said(waits, yields, actor(1, running=30, waiting=9))
    assert idle == ["no request runs in the engines of actor-host-1000, while 9 requests queue elsewhere"]
    [failed] = said(actor(recent_ends={"completed": 70, "tool_error": 30}, waiting=0))
    assert "30% failed of 100 recent: 30 tool_error: actors log why" in failed
    assert said(actor(recent_ends={"completed": 95, "tool_error": 5}, waiting=0)) == []


def test_a_disk_that_is_nearly_full_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(alerts.shutil, "disk_usage", lambda path: usage(100 << 30, 98 << 30, 2 << 30))
    [said] = disk_alerts(tmp_path)
    assert said.startswith(f"the disk of {tmp_path} is nearly full: 2 GiB of 100 GiB are free;")
    monkeypatch.setattr(alerts.shutil, "disk_usage", lambda path: usage(100 << 30, 90 << 30, 10 << 30))
    assert disk_alerts(tmp_path) == []
    assert disk_alerts(tmp_path / "elsewhere") == []


def test_the_settings_of_a_run_that_does_not_answer_are_read_from_its_directory(tmp_path: Path):
    steps = StepAlerts()
    steps.add(metrics_record(metrics(1, **{"staleness/max_versions": 5})))
    make_run(tmp_path, "here", steps=3)
    assert len(RunAlerts(tmp_path, "here").look(steps, None)) == 1
    assert RunAlerts(tmp_path, "elsewhere").look(steps, None) == []
