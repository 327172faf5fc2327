"""The probe shows an image to a vision-language model: an engine whose tower has other weights is named."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from actors.engines.embedded.engine import EmbeddedEngine
from actors.engines.fleet.fleet import Fleet
from actors.settings.engines import EmbeddedEngineConfig
from actors.settings.fleet import FleetConfig
from actors.weights.probe import ProbeCheck
from bus.codec import decode, encode
from bus.errors import SchemaError
from bus.messages import BlobRef, PolicyManifest, Probe
from learner.backends.fsdp.trainer import FsdpTrainer
from learner.backends.model_loading import load_hf_directory
from learner.backends.shared.trainable import TrainableWeights
from learner.config.model import ScratchVision
from learner.config.optimizer import OptimizerConfig
from learner.data.packing import pack
from learner.model_directories.model_directory import load_hf_config
from learner.publication.probe import probe_samples, scored_probe
from storage.images.reader import ImageReader
from tests.learner.tiny import TIS
from tests.pictures import SIZES, TINY, vision_directory

pytestmark = pytest.mark.slow

BLOB = BlobRef(subject="blob", chunks=1, size_bytes=1, digest="")


@pytest.fixture(scope="module", params=TINY)
def directory(request, tmp_path_factory):
    return TINY[request.param](tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture
def reader(directory):
    return ImageReader.of(directory)


@pytest.fixture
def trainer(directory, reader):
    """A learner that trains the tower alone."""
    tower = TrainableWeights((), ("visual",))
    return FsdpTrainer(
        *load_hf_directory(directory), OptimizerConfig(lr=1e-2), images=reader, trainable=tower
    )


@pytest.fixture
async def fleet(directory):
    async def build():
        config = EmbeddedEngineConfig(slots=2, dtype="float32", threads=1)
        return EmbeddedEngine.from_directory(directory, config)

    fleet = Fleet({"one": build}, FleetConfig(engines=1))
    await fleet.start()
    yield fleet
    await fleet.close()


def manifest(version: int, probe: Probe) -> PolicyManifest:
    given = PolicyManifest(
        policy_version=version, incarnation="one", snapshot=BLOB, model=BLOB, stage="rl", probe=probe
    )
    return decode(encode(given), PolicyManifest)  # the image travels with it


async def test_a_tower_that_was_not_updated_is_named_and_one_that_was_is_not(fleet, trainer, reader):
    check = ProbeCheck(fleet, bound_nats=100.0)  # the versions before tell it without the bound
    await fleet.load_weights(trainer.export(), 0)
    check.loaded(manifest(0, scored_probe(trainer, reader)))
    await check.check()
    assert check.alarms == {}
    assert 0 < check.nats["one"] < 1e-5
    text, shown = probe_samples(trainer.hf_config, reader)[0], probe_samples(trainer.hf_config, reader)[-1]
    samples = [
        one.with_streams(behaviour_logprobs=-4.0, policy_versions=0, advantages=1.0) for one in (text, shown)
    ]
    trainer.train_step(pack(samples, 100), TIS, policy_version=0)
    now = trainer.export()
    untrained = {name: tensor for name, tensor in now.items() if "visual" not in name}
    await fleet.load_weights(untrained, 1)  # as a learner does that leaves the tower out
    check.loaded(manifest(1, scored_probe(trainer, reader)))
    await check.check()
    assert check.alarms == {"one": "one says that it has version 1, but it sees images as version 0 did"}
    await fleet.load_weights(now, 1)
    await check.check()
    assert check.alarms == {}


async def test_another_tower_than_any_version_had_is_told_by_the_bound_on_the_image_alone(
    fleet, trainer, reader
):
    check, probe = ProbeCheck(fleet, bound_nats=0.01), scored_probe(trainer, reader)
    torch.manual_seed(0)
    state = {
        name: torch.randn_like(tensor) if "visual" in name else tensor
        for name, tensor in trainer.export().items()
    }
    await fleet.load_weights(state, 0)
    check.loaded(manifest(0, probe))
    await check.check()
    assert "nats a token on the probe's image of version 0, actors.probe_bound_nats" in check.alarms["one"]
    assert "on the probe of version" not in check.alarms["one"], "of text it says what the learner says"
    check.loaded(manifest(0, replace(probe, images=(), **{
        name: getattr(probe, name)[:-1] for name in ("token_ids", "logprobs")
    })))  # fmt: skip
    await check.check()
    assert check.alarms == {}, "text alone does not tell it"


def test_the_image_of_the_probe_is_the_same_each_time_and_its_text_has_no_token_of_images(directory, reader):
    config = load_hf_config(directory)
    [shown] = [sample for sample in probe_samples(config, reader) if sample.images]
    [again] = [sample for sample in probe_samples(config, ImageReader.of(directory)) if sample.images]
    assert shown.xxh3() == again.xxh3()
    [image] = shown.images
    assert (image.rows, image.columns) == (2, 3)
    assert len({patch.tobytes() for patch in reader.patches(image)}) > 12, "most of its patches differ"
    others = np.delete(shown.token_ids, np.arange(image.start, image.stop))
    assert sorted(set(others) & {*reader.token_ids, *reader.shown_ids}) == sorted(
        {reader.token_ids[0], reader.token_ids[2]}
    )
    assert np.count_nonzero(shown.loss_mask) == len(shown.token_ids) - 6


@pytest.mark.parametrize(("context", "shows"), [(24, [17]), (17, [10]), (16, [])])
def test_a_context_without_room_for_the_image_is_probed_with_text(tmp_path, context, shows):
    sizes = SIZES.model_copy(update={"context": context, "vision": ScratchVision(layers=1)})
    directory = vision_directory(tmp_path / "model", sizes=sizes)
    samples = probe_samples(load_hf_config(directory), ImageReader.of(directory))
    assert [len(sample.token_ids) for sample in samples if sample.images] == shows


def test_log_probs_and_images_that_do_not_belong_to_the_probe_are_refused(trainer, reader):
    probe = scored_probe(trainer, reader)
    probe.check()
    with pytest.raises(SchemaError, match="has images of 1"):
        replace(probe, images=probe.images[:1]).check()
    with pytest.raises(SchemaError, match="log-probs"):
        replace(probe, images=()).check()
    bare = tuple(image._replace(data=b"") for image in probe.images[-1])
    with pytest.raises(SchemaError, match="its bytes are not in the message"):
        replace(probe, images=(*probe.images[:-1], bare)).check()
