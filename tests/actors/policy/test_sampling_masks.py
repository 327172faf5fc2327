"""Which servers tell what sampling kept, and how they are started so that they do."""

import pytest

from actors.config import SamplingConfig
from actors.engines.config import EmbeddedEngineConfig, SglangEngineConfig
from actors.policy.sampling_masks import refuse_untold_masks, told_by
from bus.errors import ConfigError

CUT = SamplingConfig(top_p=0.9, keep_masks=True)


def test_a_server_that_is_to_tell_what_it_kept_is_started_with_the_setting_that_says_so():
    own = SglangEngineConfig(server={"dtype": "bfloat16"})
    assert told_by(own, CUT).settings == {"sampling_mask_max_tokens": 4096, "dtype": "bfloat16"}
    given = SglangEngineConfig(server={"sampling_mask_max_tokens": 2000})
    assert told_by(given, CUT).settings == given.settings
    for unchanged in (SglangEngineConfig(url="http://a:1"), EmbeddedEngineConfig()):
        assert told_by(unchanged, CUT) is unchanged
    assert told_by(own, SamplingConfig(top_p=0.9)) is own


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"disaggregation": {"enabled": True}}, "a pair was not tried"),
        ({"server": {"speculative_algorithm": "EAGLE"}}, "'EAGLE': SGLang does not tell"),
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
