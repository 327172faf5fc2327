"""Which servers tell what sampling kept, and how they are started so that they do."""

import pytest

from actors.evaluation.dedicated import own_servers
from actors.other_policies.opponents import opponent_engine
from actors.policy.cut_off_sampling import refuse_untold_masks, told_by
from actors.settings.actors import ActorsConfig, SamplingConfig
from actors.settings.engines import EmbeddedEngineConfig, SglangEngineConfig
from actors.settings.opponents import OpponentConfig
from bus.errors import ConfigError

CUT = SamplingConfig(top_p=0.9, keep_masks=True)


def test_a_server_that_is_to_tell_what_it_kept_is_started_with_the_setting_that_says_so():
    own = SglangEngineConfig(server={"dtype": "bfloat16"})
    assert told_by(own, CUT).settings == {"sampling_mask_max_tokens": 4096, "dtype": "bfloat16"}
    given = SglangEngineConfig(server={"sampling_mask_max_tokens": 2000})
    assert told_by(given, CUT).settings == given.settings
    embedded = EmbeddedEngineConfig()
    assert told_by(embedded, CUT) is embedded
    assert told_by(own, SamplingConfig(top_p=0.9)) is own


def test_a_server_that_runs_already_is_to_have_that_setting_wherever_it_is():
    running = told_by(SglangEngineConfig(urls=("http://a:1", "http://b:2")), CUT)
    for url in ("http://a:1", "http://c:3"):
        assert running.attached_to(url).settings == {"sampling_mask_max_tokens": 4096}
    own = told_by(SglangEngineConfig(server={"dtype": "bfloat16"}), CUT)
    embedded = told_by(EmbeddedEngineConfig().servers, CUT)
    for config in (own, embedded):
        assert config.attached_to("http://c:3").settings == {"sampling_mask_max_tokens": 4096}


def test_running_servers_of_opponents_and_held_out_prompts_need_not_have_it():
    engine = SglangEngineConfig(server={"sampling_mask_max_tokens": 2000})
    actors = ActorsConfig.model_validate({"engine": engine, "evaluation": {"urls": ["http://a:1"]}})
    opponent = opponent_engine("old", OpponentConfig(version=0, url="http://b:2"), engine)
    assert own_servers(actors).settings == opponent.settings == {}


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"disaggregation": {"enabled": True}}, "a pair was not tried"),
        ({"server": {"speculative_algorithm": "EAGLE"}}, "'EAGLE': SGLang does not tell"),
        (
            {"server": {"sampling-mask-max-tokens": 64}},
            r"server\.sampling_mask_max_tokens=64: .*leave it out",
        ),
    ],
)
def test_servers_that_do_not_tell_what_they_kept_are_refused(settings, why):
    engine = SglangEngineConfig(**settings)
    with pytest.raises(ConfigError, match=why):
        refuse_untold_masks(CUT, engine)
    with pytest.raises(ConfigError, match=why):
        told_by(engine, CUT)
    refuse_untold_masks(SamplingConfig(top_p=0.9), engine)
    refuse_untold_masks(CUT, SglangEngineConfig(server={"speculative_algorithm": "DFLASH"}))
    refuse_untold_masks(CUT, EmbeddedEngineConfig())
