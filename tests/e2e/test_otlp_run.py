"""A whole run whose steps, publications and rollouts a collector of OpenTelemetry hears of."""

from pathlib import Path

import pytest

from tests.e2e.commands import SMALL, records_of_run
from tests.otlp_collector import collecting

pytestmark = [pytest.mark.nightly, pytest.mark.nats]


def test_each_step_publication_and_rollout_is_a_span_and_the_metrics_are_gauges(tmp_path: Path):
    with collecting() as collector:
        records_of_run(tmp_path, *SMALL, "--metrics.otlp-url", collector.url)
    by_name: dict[str, list] = {}
    for one in collector.spans:
        by_name.setdefault(one.name, []).append(one)
    steps = {one.span_id: collector.attributes(one)["step"] for one in by_name["step"]}
    assert sorted(steps.values()) == [1, 2, 3, 4]
    for part in ("wait for the batch", "train"):
        assert [steps[one.parent_span_id] for one in by_name[part]] == [1, 2, 3, 4]
    published = [collector.attributes(one)["policy_version"] for one in by_name["publish weights"]]
    assert published[:5] == sorted(published[:5])
    assert len(set(published)) >= 5
    ends = {collector.attributes(one)["end"] for one in by_name["rollout"]}
    assert len(by_name["rollout"]) >= 4 * 4 * 4
    assert ends <= {"completed", "length"}
    assert {sender["sluice.role"] for sender in collector.senders} == {"storage", "learner", "actor"}
    assert {"sluice/train/loss", "sluice/actors/engine/tokens_per_s", "sluice/evaluation/sampled"} <= (
        collector.values.keys()
    )
