"""The run says at its start by how much recorded log-probs differ from those that tokens are drawn with."""

from math import log

import numpy as np
import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from actors.policy.cut_off_sampling import warn_of_cut_off_sampling
from actors.settings.actors import SamplingConfig


def said(**settings: float) -> list[str]:
    with capture_logs() as logs:
        warn_of_cut_off_sampling(SamplingConfig(**settings))
    assert all(entry["event"] == "sampling_is_off_policy" for entry in logs)
    return [entry["nats_per_token"] for entry in logs]


def test_the_whole_distribution_needs_no_warning():
    assert said() == said(temperature=0.5) == []


def test_the_bound_is_told_where_there_is_one():
    assert said(top_p=0.5) == ["up to 0.69"]
    assert said(top_p=0.5, top_k=20) == said(top_k=20) == said(min_p=0.1) == ["without a bound"]


def test_nothing_is_off_where_kept_tokens_are_recorded():
    assert said(top_p=0.5, keep_masks=True) == said(min_p=0.1, top_k=20, keep_masks=True) == []


@pytest.mark.parametrize(
    ("settings", "why"), [({}, r"set one of them \(top_k=0\)"), ({"top_k": 1025}, "at most 1024: set")]
)
def test_recording_without_a_cut_or_of_too_large_sets_is_refused(settings, why):
    with pytest.raises(ValidationError, match=why):
        SamplingConfig(keep_masks=True, **settings)


@pytest.mark.parametrize("top_p", [0.3, 0.9])
def test_no_kept_token_is_further_off_than_the_bound(top_p):
    draw = np.random.default_rng(0)
    for _ in range(200):
        probs = np.sort(draw.dirichlet(np.full(20, 0.3)))[::-1]
        kept = np.cumsum(probs) - probs < top_p  # what lies before a token is below top_p
        off = -log(probs[kept].sum())
        assert 0 <= off + 1e-12 <= -log(top_p) + 2e-12
