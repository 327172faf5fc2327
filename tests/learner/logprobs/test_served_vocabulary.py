"""Whether the model behind a server has the policy's vocabulary, as a learner sees before it starts."""

import time
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from bus.errors import ConfigError, EngineError
from learner.config.frozen_policies import TeacherConfig
from learner.config.learner import LearnerConfig
from learner.config.process_settings import EngineContext
from learner.initial.scratch_model import character_tokenizer
from learner.logprobs.served_teachers import ANY_CONTEXT, refuse_other_teachers
from learner.model_directories.model_directory import save_hf_directory
from tests.learner.logprobs.served_model import ServedModel
from tests.learner.tiny import tiny_config, tiny_model

AWAY = "http://127.0.0.1:9"
"""An address at which nobody answers."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """The policy's model directory, with a tokenizer."""
    made, tokenizer = tmp_path_factory.mktemp("policy"), character_tokenizer()
    tokenizer.save_pretrained(made / "tokenizer")
    model = tiny_model(vocab_size=len(tokenizer), seed=0)
    save_hf_directory(made / "model", model.config, model.state_dict(), made / "tokenizer")
    return made / "model"


class Shifted:
    """A tokenizer that has other texts from an id on."""

    def decode(self, tokens: list[int]) -> str:
        return character_tokenizer().decode([tokens[0] - (tokens[0] > 20)])


def found(directory: Path, server: ServedModel, *, engine_context: EngineContext = ANY_CONTEXT) -> None:
    with server:
        teacher = TeacherConfig(url=server.url, outage_s=0.05)
        refuse_other_teachers(LearnerConfig(teacher=teacher), directory, engine_context=engine_context)


def large(**changes: object) -> PreTrainedModel:
    return tiny_model(seed=5, **{"vocab_size": len(character_tokenizer()), **changes})


def test_a_larger_model_with_the_policys_tokenizer_is_found(directory):
    for vocab in (len(character_tokenizer()), len(character_tokenizer()) + 13):  # models pad their embeddings
        found(directory, ServedModel(large(vocab_size=vocab), character_tokenizer()))
    found(directory, ServedModel(large()))  # which was started without a tokenizer


def test_a_model_of_another_vocabulary_is_refused_at_the_start(directory):
    few = tiny_config().vocab_size - 20
    for server, complaint in (
        (ServedModel(large(vocab_size=few), character_tokenizer()), rf"refuses ids .*vocab size \({few}\)"),
        (ServedModel(large(), Shifted()), r"a-large-model\) has another vocabulary .* \d+ of \d+ tokens"),
        (ServedModel(large(), is_generation=False), "is a-large-model, which scores no tokens"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            found(directory, server)
    nobody = LearnerConfig(teacher=TeacherConfig(url=AWAY, outage_s=0.05))
    with pytest.raises(EngineError, match=rf"{AWAY}/model_info"):
        refuse_other_teachers(nobody, directory)
    refuse_other_teachers(LearnerConfig(), directory)


def test_a_server_that_takes_shorter_texts_than_the_policy_writes_is_refused_at_the_start(directory):
    context = tiny_config().max_position_embeddings
    sglang, embedded = EngineContext(left_free=2), EngineContext()

    def serving(context: int) -> ServedModel:
        return ServedModel(large(), character_tokenizer(), max_req_input_len=context - 6)  # as SGLang says

    for teachers, engine in ((7, embedded), (5, sglang), (context, embedded)):
        found(directory, serving(context + teachers), engine_context=engine)
    found(directory, serving(48 + 5), engine_context=EngineContext(48, left_free=2))
    for teachers, engine, longest in ((6, embedded, context), (4, sglang, context - 2)):
        complaint = (
            rf"takes {longest - 1} tokens in a request.*has {longest}: .*--context-length {longest + 7} "
        )
        with pytest.raises(ConfigError, match=complaint):
            found(directory, serving(context + teachers), engine_context=engine)


def test_a_learner_that_is_stopped_waits_for_no_server(directory):
    began = time.monotonic()
    nobody = LearnerConfig(teacher=TeacherConfig(url=AWAY, outage_s=600))
    refuse_other_teachers(nobody, directory, stopped=lambda: time.monotonic() > began + 0.1)
    assert time.monotonic() - began < 30
