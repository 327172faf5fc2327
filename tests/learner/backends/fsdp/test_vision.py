"""A vision-language model in packs, against plain transformers and AdamW, and what is published of it."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForImageTextToText

from actors.engines.base import GenerationRequest, Sampling
from actors.engines.embedded.engine import EmbeddedEngine
from actors.settings.engines import EmbeddedEngineConfig
from bus.errors import ConfigError
from learner.backends.factory import build_backend
from learner.backends.fsdp import model
from learner.backends.fsdp.trainer import FsdpTrainer
from learner.backends.model_loading import load_hf_directory
from learner.backends.shared.trainable import TrainableWeights
from learner.checkpoint.commit import load_checkpoint, save_checkpoint
from learner.config.lora import LoraConfig
from learner.config.model import ModelConfig
from learner.config.optimizer import OptimizerConfig
from learner.config.parallel import UNDIVIDED, ParallelConfig
from learner.data.packing import Sample, micro_batch_of, pack
from learner.logprobs.logprobs import score
from learner.publication.host_copy import HostCopy
from storage.disk.checkpoints import latest
from storage.images.reader import ImageReader
from tests.learner.reference import reference_optimizer, reference_step
from tests.learner.tiny import TIS, hf_state, random_samples
from tests.pictures import TINY, picture

pytestmark = pytest.mark.slow

LENGTHS = [20, 17, 12, 32, 9]
PICTURES = [(16, 24), (8, 8), (40, 16)]
"""Heights and widths: of 6, 1 and 10 tokens."""
OPTIMIZER = OptimizerConfig(lr=1e-3, warmup_steps=2, weight_decay=0.1, eps=1e-4)


@pytest.fixture(scope="module", params=TINY)
def directory(request, tmp_path_factory) -> Path:
    return TINY[request.param](tmp_path_factory.mktemp("vision") / "model")


def showing(sample: Sample, reader: ImageReader, *pictures: bytes) -> Sample:
    """Put pictures into a sample, the first after two tokens, and a text between each two."""
    tokens, mask, images = sample.token_ids.copy(), sample.loss_mask.copy(), []
    at = 2
    for data in pictures:
        images.append(reader.read(data).moved(at))
        tokens[at : images[-1].stop] = reader.token_ids[1]
        mask[at : images[-1].stop] = False
        at = images[-1].stop + 1
    return Sample(token_ids=tokens, loss_mask=mask, streams=sample.streams, images=tuple(images))


def mixed_samples(reader: ImageReader, *, seed: int = 0) -> list[Sample]:
    """Samples with one image, two, none, and the same as another's."""
    samples = random_samples(LENGTHS, seed=seed)
    wide, small, tall = (picture(*size, seed=seed) for size in PICTURES)
    samples[0] = showing(samples[0], reader, wide, small)
    samples[1] = showing(samples[1], reader, wide)
    samples[3] = showing(samples[3], reader, tall, wide, small)
    return samples


def plain_logits(reader: ImageReader):
    """Logits of transformers, each sequence by itself with its images, end to end."""

    def logits(model, samples):
        return torch.cat([one_logits(model, reader, sample) for sample in samples])

    return logits


def one_logits(model, reader, sample):
    tokens = torch.from_numpy(sample.token_ids).long()[None]
    if not sample.images:
        return model(input_ids=tokens).logits[0]
    kinds = torch.zeros_like(tokens)
    for image in sample.images:
        kinds[0, image.start : image.stop] = 1
    patches = np.concatenate([reader.patches(image) for image in sample.images])
    grids = torch.tensor([reader.grid(image) for image in sample.images])
    shown = {"pixel_values": torch.from_numpy(patches), "image_grid_thw": grids, "mm_token_type_ids": kinds}
    return model(input_ids=tokens, **shown).logits[0]


def trainer_of(directory: Path, **settings) -> FsdpTrainer:
    hf_config, state = load_hf_directory(directory)
    return FsdpTrainer(hf_config, state, OPTIMIZER, images=ImageReader.of(directory), **settings)


def reference_of(directory: Path):
    model = AutoModelForImageTextToText.from_pretrained(directory, attn_implementation="eager")
    model.get_input_embeddings().padding_idx = None  # samples have that token, too
    return model


def test_log_probs_of_a_mixed_pack_are_those_of_transformers_for_each_sequence(directory):
    trainer, reference = trainer_of(directory), reference_of(directory)
    samples = mixed_samples(trainer.model.vision.reader)
    [pack_of_all] = pack(samples, 1000)
    assert len(pack_of_all.images) == 6
    [[found, _]] = trainer.logprobs([pack_of_all])
    with torch.no_grad():
        logits = plain_logits(trainer.model.vision.reader)(reference, samples)
    wanted = logits.log_softmax(-1).gather(-1, pack_of_all.labels[:, None])[:, 0]
    trained = pack_of_all.loss_mask
    assert trained.sum() > 30
    assert (found[trained] - wanted[trained]).abs().max() < 1e-5


def test_steps_follow_plain_transformers_and_adamw(directory):
    trainer, reference = trainer_of(directory), reference_of(directory)
    optimizer = reference_optimizer(reference, OPTIMIZER)
    before = trainer.export()
    reader = trainer.model.vision.reader
    for step in range(2):
        samples = mixed_samples(reader, seed=step)
        lr = 1e-3 * min(1, (step + 1) / 2)
        expected = reference_step(
            reference, optimizer, samples, loss="tis", lr=lr, logits_of=plain_logits(reader)
        )
        result = trainer.train_step(pack(samples, 60), TIS, policy_version=3)
        assert (result.loss, result.grad_norm) == pytest.approx(expected, abs=1e-5)
    exported, expected = trainer.export(), hf_state(reference)
    assert exported.keys() == expected.keys() - trainer.model.hf.all_tied_weights_keys.keys()
    towers = ["visual.blocks.1", "visual.merger", "layers.2"]
    if "qwen3" in trainer.hf_config.model_type:
        towers.append("visual.deepstack_merger_list.0")
    for name, weight in exported.items():
        assert (weight - expected[name]).abs().max() < 1e-5, name
    for tower in towers:
        assert any(not torch.equal(exported[n], before[n]) for n in exported if tower in n), tower


def test_a_tower_passes_each_image_once_and_a_pack_without_images_too(directory, monkeypatch):
    trainer = trainer_of(directory)
    seen, original = [], trainer.model.hf.get_image_features

    def features(patches, grids):
        seen.append(len(grids))
        return original(patches, grids)

    monkeypatch.setattr(trainer.model.hf, "get_image_features", features)
    samples = mixed_samples(trainer.model.vision.reader)
    trainer.logprobs([micro_batch_of(samples), micro_batch_of([samples[2]])])
    assert seen == [3, 1]


def test_a_sampled_token_like_an_images_is_a_token(directory):
    trainer = trainer_of(directory)
    [sample] = random_samples([12])
    sample.token_ids[7] = trainer.model.vision.reader.token_ids[1]
    sample.loss_mask[7] = True
    [scores] = score(trainer, [sample], tokens_per_micro_batch=100)
    with torch.no_grad():
        logits = reference_of(directory)(input_ids=torch.from_numpy(sample.token_ids).long()[None]).logits[0]
    wanted = logits.log_softmax(-1)[6, sample.token_ids[7]].item()
    assert scores.logprobs[7] == pytest.approx(wanted, abs=1e-5)


def test_training_goes_on_from_a_checkpoint_bit_for_bit(directory, tmp_path):
    trainer = trainer_of(directory)
    reader = trainer.model.vision.reader
    trainer.train_step(pack(mixed_samples(reader), 60), TIS, policy_version=3)
    save_checkpoint(trainer, tmp_path, 1, {}, keep=1)
    resumed = trainer_of(directory)
    load_checkpoint(resumed, latest(tmp_path))
    for one in (trainer, resumed):
        one.train_step(pack(mixed_samples(reader, seed=1), 60), TIS, policy_version=3)
    ours, theirs = resumed.export(), trainer.export()
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())


async def test_the_engine_samples_published_weights_with_the_learners_log_probs(directory):
    trainer = trainer_of(directory)
    reader = trainer.model.vision.reader
    trainer.train_step(pack(mixed_samples(reader), 60), TIS, policy_version=3)
    sample = mixed_samples(reader)[3]
    engine = EmbeddedEngine.from_directory(
        directory, EmbeddedEngineConfig(dtype="float32", seed=0, threads=1)
    )
    await engine.start()
    try:
        await engine.load_weights(trainer.export(), 1)
        prompt = sample.token_ids.tolist()
        request = GenerationRequest("a", prompt, Sampling(max_new_tokens=12), images=sample.images)
        generation = await engine.generate(request)
    finally:
        await engine.close()
    tokens = np.concatenate([sample.token_ids, generation.token_ids])
    whole = Sample(
        token_ids=tokens, loss_mask=np.arange(len(tokens)) >= len(prompt), streams={}, images=sample.images
    )
    [scores] = score(trainer, [whole], tokens_per_micro_batch=100)
    np.testing.assert_allclose(scores.logprobs[len(prompt) :], generation.logprobs, atol=1e-5)


def published(trainer: FsdpTrainer) -> dict[str, bytes]:
    tensors = asyncio.run(HostCopy(torch.float32).take(trainer.exported()).arrived())
    return {name: tensor.words.tobytes() for name, tensor in tensors.items()}


def test_what_is_published_has_all_towers_and_a_step_changes_all_of_it(directory):
    trainer = trainer_of(directory)
    before = published(trainer)
    trainer.train_step(pack(mixed_samples(trainer.model.vision.reader), 60), TIS, policy_version=3)
    after = published(trainer)
    assert before.keys() == after.keys() == hf_state(reference_of(directory)).keys() - {"lm_head.weight"}
    assert [name for name in after if before[name] == after[name]] == []


def test_adapters_train_and_merge_in_both_towers(directory):
    if load_hf_directory(directory)[0].model_type == "qwen2_5_vl":
        with pytest.raises(ConfigError, match=r"model files know model\.visual.* by another name"):
            trainer_of(directory, lora=LoraConfig(rank=4))
        return
    trainer = trainer_of(directory, lora=LoraConfig(rank=4))
    before = trainer.export()
    trainer.train_step(pack(mixed_samples(trainer.model.vision.reader), 60), TIS, policy_version=3)
    after = trainer.export()
    changed = {"visual" in name for name in after if not torch.equal(before[name], after[name])}
    assert changed == {True, False}


def test_recomputing_layers_changes_no_result(directory):
    found = []
    for parallel in (UNDIVIDED, ParallelConfig(recompute="full")):
        trainer = trainer_of(directory, parallel=parallel)
        samples = mixed_samples(trainer.model.vision.reader)
        trainer.train_step(pack(samples, 60), TIS, policy_version=3)
        found.append(trainer.export())
    assert all(torch.equal(found[0][name], weight) for name, weight in found[1].items())


def steps_of_a_rank(directory: Path) -> dict[str, np.ndarray]:
    """Return the weights after two steps, in which the second of two ranks has no images."""
    trainer = trainer_of(directory)
    for step in range(2):
        samples = mixed_samples(trainer.model.vision.reader, seed=step)
        shares = (
            [samples]
            if dist.get_world_size() == 1
            else [[one for one in samples if one.images], [one for one in samples if not one.images]]
        )
        trainer.train_step(pack(shares[dist.get_rank()], 25), TIS, policy_version=3)
    return {name: tensor.numpy() for name, tensor in trainer.export().items()}


@pytest.mark.first(1, others=pytest.mark.nightly)
def test_a_rank_without_images_takes_part_in_the_tower(directory, worlds):
    found, _ = worlds.run(2, steps_of_a_rank, directory)
    for name, weight in steps_of_a_rank(directory).items():
        assert np.abs(found[name] - weight).max() < 1e-5, name


def test_a_pack_that_is_not_what_transformers_computes_is_refused(directory, monkeypatch):
    monkeypatch.setattr(model, "rope_positions", lambda length, images: np.arange(length)[None].repeat(3, 0))
    with pytest.raises(ConfigError, match="nats from transformers' own of each sequence"):
        trainer_of(directory)


def test_muon_trains_the_language_model_of_a_frozen_tower_and_refuses_the_tower(directory):
    hf_config, state = load_hf_directory(directory)
    images, muon = ImageReader.of(directory), OptimizerConfig(lr=1e-2, matrices="muon")
    with pytest.raises(ConfigError, match=r"visual\.blocks\.0\.attn\.qkv\.weight.* freeze it with"):
        FsdpTrainer(hf_config, state, muon, images=images)
    trainer = FsdpTrainer(hf_config, state, muon, images=images, trainable=TrainableWeights(("visual",), ()))
    before = trainer.export()
    trainer.train_step(pack(mixed_samples(images), 60), TIS, policy_version=3)
    changed = {name for name, weight in trainer.export().items() if not torch.equal(before[name], weight)}
    assert changed == {name for name in before if "visual" not in name}


def test_exact_arithmetic_is_refused_for_images(directory):
    with pytest.raises(ConfigError, match=r"model\.numerics=exact is for text alone"):
        trainer_of(directory, exact=True)


def test_megatron_refuses_a_vision_language_model_with_the_remedy(directory):
    hf_config, state = load_hf_directory(directory)
    with pytest.raises(
        ConfigError,
        match=rf"a {hf_config.model_type}, is a vision-language model: set learner.backend = \"fsdp\"",
    ):
        build_backend(ModelConfig(), hf_config, state, OPTIMIZER, UNDIVIDED, images=ImageReader.of(directory))
