"""The alarm that engines and learner disagree about the policy: when it holds, pauses and ends a run."""

import math
import time

import pytest
from pydantic import ValidationError

from bus.errors import PolicyMismatchError
from bus.messages import Metrics
from learner.config.diagnostics import DiagnosticsConfig
from learner.metrics import alarms
from learner.metrics.alarms import PROBE_ALARMS, PolicyAlarm

CONFIG = DiagnosticsConfig(largest_mismatch_nats=0.1, mismatch_pause_steps=2, mismatch_end_steps=4)


def looked(*mismatches: float | None, config: DiagnosticsConfig = CONFIG) -> PolicyAlarm:
    alarm = PolicyAlarm(config)
    for mismatch in mismatches:
        alarm.look(mismatch)
    return alarm


def counters(wrong: int, source: str = "actor-1") -> Metrics:
    return Metrics(source=source, step=3, time_s=time.time(), values={PROBE_ALARMS: wrong})


def ends(alarm: PolicyAlarm) -> bool:
    try:
        alarm.end_run()
    except PolicyMismatchError:
        return True
    return False


@pytest.mark.parametrize(
    ("mismatches", "pauses", "over"),
    [
        ((), False, False),
        ((0.1, 0.1, 0.1, 0.1), False, False),
        ((0.2,), False, False),
        ((0.2, 0.2), True, False),
        ((0.2, math.nan, 0.2), True, False),
        ((0.2, 0.2, 0.2, 0.2), True, True),
        ((0.2, 0.2, 0.2, 0.1, 0.2), False, False),
        ((0.2, None, None, None), False, False),
        ((0.2, None, 0.2, None), True, False),
        ((0.2, 0.2, 0.2, None, 0.2), True, True),
    ],
)
def test_steps_in_a_row_pause_admission_and_then_end_the_run(mismatches, pauses: bool, over: bool):
    alarm = looked(*mismatches)
    assert (bool(alarm.pause_reason), ends(alarm)) == (pauses, over)


def test_the_probes_alarm_counts_also_in_steps_without_a_mismatch_and_until_it_is_over():
    alarm = looked(0.0)
    alarm.hear(counters(1))
    alarm.look(None)
    alarm.look(0.0)
    assert alarm.pause_reason == (
        "engines and learner disagree about the policy, 2 steps in a row: the probe finds wrong engines of "
        "actor-1"
    )
    alarm.hear(counters(0))
    alarm.look(None)
    assert alarm.text == alarm.pause_reason == ""


def test_an_actor_that_is_gone_holds_no_alarm(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(alarms, "SILENT_S", 0.0)
    alarm = looked()
    alarm.hear(counters(1))
    alarm.look(None)
    assert alarm.text == ""


def test_the_alarm_says_what_follows_and_its_end_names_the_remedy():
    assert looked(0.25).text == (
        "engines and learner disagree about the policy, 1 step: policy/mismatch_nats is 0.25, above 0.1; "
        "admission is paused after 2; the run ends after 4"
    )
    assert "admission is paused; the run ends after 4" in looked(0.25, 0.25).text
    with pytest.raises(
        PolicyMismatchError, match=r"policy mismatch: .*4 steps in a row.*or raise .*bound_nats"
    ):
        looked(*[0.25] * 4).end_run()


def test_each_number_may_be_none_and_the_run_does_not_end_before_it_pauses():
    never = CONFIG.model_copy(update={"mismatch_pause_steps": None, "mismatch_end_steps": None})
    alarm = looked(*[0.25] * 20, config=never)
    assert (alarm.pause_reason, ends(alarm)) == ("", False)
    assert alarm.text.endswith("above 0.1")
    assert looked(5.0, config=CONFIG.model_copy(update={"largest_mismatch_nats": None})).text == ""
    with pytest.raises(ValidationError, match="mismatch_pause_steps=3 is above mismatch_end_steps=2"):
        DiagnosticsConfig(mismatch_end_steps=2)
