"""SGLang's kernels on a GPU: `pytest -m gpu -k sglang tests/learner`.

The learner's environment must have SGLang. The first tests say of each kernel whether its results depend on
what is beside a row; the last two compare learner and server."""

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch

from actors.engines.base import GenerationRequest, Sampling
from actors.engines.on_policy import on_policy
from actors.engines.sglang.engine import SglangEngine
from actors.engines.sglang.server.settings import BUILT_HERE
from actors.settings.engines import SglangEngineConfig
from bus.errors import ConfigError
from learner.backends.fsdp.trainer import FsdpTrainer
from learner.backends.sglang_kernels.functions import linear, normed, rotary_angles, rotated
from learner.backends.sglang_kernels.kernels import decoded_tokens, load_kernels
from learner.config.optimizer import OptimizerConfig
from learner.data.packing import Sample, pack
from tests.actors.cuda import SERVER, policy
from tests.learner.exact import differences, shuffled, trained_sample
from tests.learner.plain_kernels import plain_kernels
from tests.learner.tiny import TIS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.timeout(900),
]
GROUPS, HEADS, WIDTH = 4, 8, 64


@pytest.fixture(scope="module")
def kernels():
    try:
        return load_kernels()
    except ConfigError as missing:
        pytest.skip(str(missing))


def drawn(*shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).to(dtype)


@pytest.mark.parametrize(("width", "features"), [(512, 1536), (1024, 4096), (1024, 151936)])
def test_products_depend_neither_on_other_rows_nor_on_other_columns(kernels, width, features):
    x, weight = drawn(300, width), drawn(features, width, seed=1)
    together = linear(kernels, x, weight)
    for rows in (1, 7, 64, 129):
        assert torch.equal(linear(kernels, x[:rows], weight), together[:rows]), rows
    part = features // 3
    assert torch.equal(linear(kernels, x, weight[part : 2 * part]), together[:, part : 2 * part])


def test_norms_rotations_and_log_probs_do_not_depend_on_other_rows(kernels):
    x, weight = drawn(300, HEADS, WIDTH), drawn(WIDTH, seed=1)
    angles = rotary_angles(1e6, WIDTH, torch.arange(300, device="cuda"))
    together = rotated(normed(kernels, x, weight, 1e-6), angles)
    logits = drawn(300, 151936, dtype=torch.float32)
    logprobs = kernels.log_softmax(logits)
    for rows in (1, 64):
        some = normed(kernels, x[:rows], weight, 1e-6)
        assert torch.equal(rotated(some, tuple(each[:rows] for each in angles)), together[:rows])
        assert torch.equal(kernels.log_softmax(logits[:rows]), logprobs[:rows])
    torch.testing.assert_close(logprobs, logits.log_softmax(-1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("longest", [40, 300, 1500])
def test_attention_of_a_sequence_does_not_depend_on_its_pack(kernels, longest):
    lengths = [longest, 5, 33]
    total = sum(lengths)
    starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    positions = torch.cat([torch.arange(each, device="cuda") for each in lengths])
    query, key, value = (drawn(total, heads, WIDTH, seed=heads) for heads in (HEADS, GROUPS, GROUPS))
    sampled = torch.ones(total, dtype=torch.bool, device="cuda")
    [tokens] = decoded_tokens(sampled, positions, longest, HEADS * WIDTH)
    prefilled = kernels.prefill(query, key, value, starts, longest, 0.125)
    decoded = kernels.decode(query, key, value, tokens, longest, 0.125)
    begin = longest + 5
    q, k, v = (each[begin:] for each in (query, key, value))
    alone = torch.tensor([0, 33], device="cuda").int()
    assert torch.equal(kernels.prefill(q, k, v, alone, 33, 0.125), prefilled[begin:])
    [of_last] = decoded_tokens(sampled[begin:], positions[begin:], 33, HEADS * WIDTH)
    found = kernels.decode(q, k, v, of_last, 33, 0.125)
    assert torch.equal(found, decoded[tokens.rows >= begin])
    plain = plain_kernels()
    torch.testing.assert_close(
        prefilled, plain.prefill(query, key, value, starts, longest, 0.125), atol=0.02, rtol=0.02
    )
    torch.testing.assert_close(decoded, prefilled[tokens.rows], atol=0.02, rtol=0.02)


def learner_of(kernels, model):
    state = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    optimizer = OptimizerConfig(lr=1e-3)
    return FsdpTrainer(model.config, state, optimizer, dtype=torch.bfloat16, kernels=kernels)


def requests_of(count, vocabulary, *, new=96):
    draw, found = np.random.default_rng(0), []
    for n in range(count):
        prompt = np.random.default_rng(n % 9).integers(0, vocabulary, 3 + 31 * (n % 9)).tolist()
        sampling = Sampling(max_new_tokens=int(draw.integers(2, new)), seed=n)
        found.append(GenerationRequest(str(n), prompt, sampling))
    return found


@asynccontextmanager
async def serving(tmp_path, model):
    model.config.save_pretrained(tmp_path / "model")
    python = BUILT_HERE if BUILT_HERE.is_file() else None
    config = on_policy(SglangEngineConfig(server=SERVER | {"mem_fraction_static": 0.3}, python=python))
    engine = SglangEngine(tmp_path / "model", config, tmp_path / "engine.log")
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


async def answers_of(engine, requests):
    generations = await asyncio.gather(*map(engine.generate, requests))
    return list(zip(requests, generations, strict=True))


async def test_a_learner_and_a_server_of_sglang_agree_to_the_bit(tmp_path, kernels):
    model = policy(0)
    learner = learner_of(kernels, model)
    async with serving(tmp_path, model) as engine:
        for version in range(3):
            state = {name: tensor.cpu() for name, tensor in learner.export().items()}
            await engine.load_weights(state, version)
            requests = requests_of(40, model.config.vocab_size)
            alone = [await engine.generate(each) for each in requests[:4]]
            sampled = await answers_of(engine, requests)
            for one, (_, among) in zip(alone, sampled, strict=False):
                assert np.array_equal(one.token_ids, among.token_ids)
                assert np.array_equal(one.logprobs, among.logprobs)
            for budget in (1, 700, 8192):
                apart = differences(learner, shuffled(sampled, version), version, budget)
                assert not apart.any(), (version, budget, (apart == 0).mean(), apart.max())
            batch = pack([trained_sample(*each) for each in sampled], 4096)
            result = learner.train_step(batch, TIS, policy_version=version)
            assert result.diagnostics["bit_equal_fraction"] == 1.0
            assert result.diagnostics["mismatch_nats"] == 0.0


async def test_a_conversation_of_several_turns_agrees_to_the_bit(tmp_path, kernels):
    model = policy(1)
    learner = learner_of(kernels, model)
    async with serving(tmp_path, model) as engine:
        await engine.load_weights(model.state_dict(), 0)
        tokens, mask, logprobs = [3, 4, 5, 6, 7], [False] * 5, [0.0] * 5
        for turn in range(3):
            sampling = Sampling(max_new_tokens=40, seed=turn)
            answer = await engine.generate(GenerationRequest(str(turn), tokens, sampling))
            observed = [11, 12 + turn, 13]
            tokens = [*tokens, *answer.token_ids.tolist(), *observed]
            mask += [True] * len(answer.token_ids) + [False] * len(observed)
            logprobs += [*answer.logprobs.tolist(), 0.0, 0.0, 0.0]
    sample = Sample(
        token_ids=np.int32(tokens),
        loss_mask=np.array(mask),
        streams={"advantages": 1.0, "policy_versions": 0},
    )
    [found] = learner.logprobs(pack([sample], 8192))
    apart = found[0][:-1].numpy()[sample.loss_mask[1:]] - np.float32(logprobs[1:])[sample.loss_mask[1:]]
    assert not apart.any(), ((apart == 0).mean(), np.abs(apart).max())
