"""The learner's computation of SGLang's arithmetic, with torch's functions in place of the kernels."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from bus.errors import ConfigError
from learner.backends.factory import build_backend
from learner.backends.fsdp.trainer import FsdpTrainer
from learner.backends.sglang_kernels import kernels
from learner.backends.sglang_kernels.kernels import decoded_tokens, load_kernels, most_splits
from learner.config.model import ModelConfig
from learner.config.optimizer import OptimizerConfig
from learner.data.packing import micro_batch_of, pack
from tests.learner.plain_kernels import plain_kernels
from tests.learner.tiny import TIS, hf_state, random_samples, tiny_model

BF16 = {"dtype": torch.bfloat16}


def trainer(given=None, family="qwen3", **settings):
    model = tiny_model(family)
    return FsdpTrainer(
        model.config, hf_state(model), OptimizerConfig(lr=1e-2), **(BF16 | settings), kernels=given
    )


def test_log_probs_are_transformers_own_but_for_rounding():
    batch = pack(random_samples([40, 17, 3]), 100)
    [wide], [ordinary], [ours] = (
        each.logprobs(batch) for each in (trainer(dtype=torch.float32), trainer(), trainer(plain_kernels()))
    )
    trained = ~wide[0].isnan()
    errors = [(each - wide)[:, trained].abs().mean(1) for each in (ordinary, ours)]
    assert (errors[1] < 1.2 * errors[0]).all(), "a float32 residual stream loses no more than a bfloat16 one"
    assert (errors[1] > 0).all()


def test_gradients_are_those_of_the_ordinary_model():
    batch = pack(random_samples([40, 17, 3]), 100)
    found, expected = (
        each.train_step(batch, TIS, policy_version=3) for each in (trainer(plain_kernels()), trainer())
    )
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=0.05)
    assert found.loss == pytest.approx(expected.loss, rel=0.05)


def test_each_weight_has_the_ordinary_gradient():
    batch = pack(random_samples([30, 11]), 100)
    found, expected = {}, {}
    for each, gradients in ((trainer(plain_kernels()), found), (trainer(dtype=torch.float32), expected)):
        [micro_batch] = batch
        loss, *_ = each.model(micro_batch, lambda logprobs, *_: logprobs.sum())
        loss.backward()
        each.model.forget_gathered()  # until then its parameters are those of the pass
        gradients.update({name: p.grad.full_tensor() for name, p in each.model.named_parameters()})
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        similar = torch.nn.functional.cosine_similarity(found[name].flatten(), gradient.flatten(), dim=0)
        assert similar > 0.99, name


def test_sampled_tokens_are_those_that_a_server_feeds_alone():
    sampled = [*map(int, "000111100110111")]  # two prompts and answers, and another sequence
    starts = [0] * 11 + [11] * 4
    following = torch.tensor([*sampled[1:11], 0, *sampled[12:], 0], dtype=torch.bool)
    positions = torch.arange(15) - torch.tensor(starts)
    [tokens] = decoded_tokens(following, positions, longest=11, width=8)
    assert tokens.rows.tolist() == [3, 4, 5, 6, 9, 10, 12, 13, 14], "the last of an answer, too"
    assert tokens.ends.diff().tolist() == [4, 5, 6, 7, 10, 11, 2, 3, 4]
    keys = tokens.key_rows().split(tokens.ends.diff().tolist())
    assert [each.tolist() for each in (keys[0], keys[-1])] == [[0, 1, 2, 3], [11, 12, 13, 14]]


def test_long_packs_are_decoded_in_parts_that_fit(monkeypatch):
    monkeypatch.setattr(kernels, "WORKSPACE_BYTES", 3 * 4 * 8 * 2)  # three tokens with two parts of 8 numbers
    following = torch.ones(300, dtype=torch.bool)
    parts = decoded_tokens(following, torch.arange(300), longest=300, width=8)
    assert [len(part.rows) for part in parts] == [3] * 99 + [2]
    assert torch.cat([part.rows for part in parts]).tolist() == list(range(1, 300))
    splits = torch.cat([part.splits for part in parts])
    assert splits[254] == 1, "token 255 sees 256 keys"
    assert splits[255] == 2


def test_sampled_tokens_are_attended_to_by_the_kernel_for_single_tokens():
    plain = plain_kernels()
    other = replace(plain, decode=lambda *given: 1.1 * plain.decode(*given))
    samples = [replace(sample, loss_mask=np.arange(20) >= 8) for sample in random_samples([20, 20])]
    batch = pack(samples, 100)
    [expected], [found] = (trainer(each).logprobs(batch) for each in (plain, other))
    of_sequences = (found[0] != expected[0]).view(2, 20)  # the first answer token is predicted by the prompt
    assert of_sequences[:, 8:19].all()
    assert torch.equal(found[0].view(2, 20)[:, 7], expected[0].view(2, 20)[:, 7])


def test_sampled_tokens_that_are_not_trained_are_attended_to_as_they_were_sampled():
    plain = plain_kernels()
    other = replace(plain, decode=lambda *given: 1.1 * plain.decode(*given))
    [sample] = random_samples([20])
    sample = replace(sample, loss_mask=np.arange(20) == 15)
    greedy = sample.with_streams(sampled_untrained=(np.arange(20) >= 5) & (np.arange(20) < 12))
    [alone], [expected], [found] = (
        trainer(kernels).logprobs(pack([each], 100))
        for kernels, each in ((other, sample), (plain, greedy), (other, greedy))
    )
    assert torch.equal(alone[0][14], expected[0][14]), "nothing is decoded for one sampled token"
    assert found[0][14] != expected[0][14], "its context was"


@pytest.mark.parametrize(("longest", "most"), [(1, 1), (256, 1), (257, 2), (513, 4), (4096, 16)])
def test_few_kinds_of_kernels_are_compiled_for_all_lengths(longest, most):
    assert most_splits(longest) == most


def test_a_pack_where_nothing_was_sampled_has_no_such_tokens():
    batch = micro_batch_of(random_samples([5]))
    assert decoded_tokens(torch.zeros_like(batch.loss_mask), batch.position_ids, 5, 8) == []


def test_models_that_sglang_computes_otherwise_are_refused():
    with pytest.raises(ConfigError, match="model_type='llama' is not qwen3"):
        trainer(plain_kernels(), family="llama")
    with pytest.raises(ConfigError, match=r"model.dtype=torch.float32: set model.dtype=bfloat16"):
        trainer(plain_kernels(), dtype=torch.float32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, SGLang may be there")
def test_an_environment_without_sglang_is_told_what_to_install(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    model = tiny_model("qwen3")
    given = (ModelConfig(numerics="sglang"), model.config, hf_state(model), OptimizerConfig(), None)
    with pytest.raises(ConfigError, match="install the server's version of SGLang"):
        build_backend(*given, backend="fsdp")
    with pytest.raises(ConfigError, match=r"learner.backend=megatron: set learner.backend=fsdp"):
        build_backend(*given)
    load_kernels.cache_clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_learner_without_a_gpu_is_told_so_before_it_computes():
    with pytest.raises(ConfigError, match="need a GPU, and torch finds none"):
        load_kernels()
