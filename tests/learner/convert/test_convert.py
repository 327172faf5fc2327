import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from bus.errors import ConfigError, StorageError
from launch.cli import main as cli
from learner.backends.fsdp.trainer import FsdpTrainer
from learner.backends.megatron.core.megatron_core import dist_checkpointing
from learner.backends.megatron.trainer import Trainer
from learner.backends.model_loading import load_hf_directory
from learner.checkpoint.commit import load_checkpoint, save_checkpoint
from learner.config.loss import SFTLoss
from learner.config.optimizer import OptimizerConfig
from learner.convert.megatron import hf_to_megatron, megatron_to_hf
from learner.data.packing import pack
from learner.initial.scratch_model import character_tokenizer
from learner.model_directories.model_directory import load_hf_config
from storage.model_files.output_head import has_other_head
from storage.model_files.packed_files import bundle
from tests.learner.backends.model.built import build_model
from tests.learner.tiny import FAMILIES, hf_state, random_samples, tiny_model

REPOSITORY = Path(__file__).parents[3]


def written(path, family="qwen3", *, dtype=torch.float32, tokenizer=False, **changes):
    """A model directory as transformers writes it."""
    tiny_model(family, **changes).to(dtype).save_pretrained(path)
    if tokenizer:
        character_tokenizer().save_pretrained(path)
    return path


def weights(directory):
    return {
        name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()
    }


def trained(family="qwen3", **settings):
    model = tiny_model(family)
    trainer = Trainer(model.config, hf_state(model), OptimizerConfig(lr=1e-2), **settings)
    trainer.train_step(pack(random_samples([9, 4]), 100), SFTLoss(), policy_version=0)
    return trainer


def equal_bits(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert torch.equal(tensor.view(torch.uint8), other[name].view(torch.uint8)), name


@pytest.mark.first(5, others=pytest.mark.slow)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("family", "tied"), [*((f, False) for f in FAMILIES), ("qwen3", True)])
def test_there_and_back_again_every_bit_is_the_same(tmp_path, family, tied, dtype):
    source = written(tmp_path / "hf", family, dtype=dtype, tied=tied, tokenizer=True)
    assert "verified" in str(hf_to_megatron(source, tmp_path / "megatron"))
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", shard_bytes=50_000)
    assert len(list((tmp_path / "back").glob("model-*-of-*.safetensors"))) > 1
    equal_bits(weights(tmp_path / "back"), weights(source))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto")
    equal_bits(hf_state(loaded), hf_state(AutoModelForCausalLM.from_pretrained(source, dtype="auto")))
    assert (tmp_path / "back/tokenizer.json").read_text() == (source / "tokenizer.json").read_text()
    assert not list(tmp_path.glob(".tmp-*"))


def with_other_head(source):
    """Give a directory whose config.json ties the output layer to the embedding another one."""
    [file] = source.glob("*.safetensors")
    found = load_file(file)
    embedding = found["model.embed_tokens.weight"]
    save_file(found | {"lm_head.weight": embedding.flip(0).clone()}, file, metadata={"format": "pt"})
    return source


@pytest.mark.first(1, others=pytest.mark.slow)
@pytest.mark.parametrize(("family", "is_said"), [("gemma3_text", False), ("qwen3", True), ("llama", True)])
def test_an_output_layer_beside_a_tied_embedding_is_the_models_as_it_is_for_transformers(
    tmp_path, family, is_said
):
    source = with_other_head(written(tmp_path / "hf", family, tied=True))
    if not is_said:  # the type's default ties them
        described = json.loads((source / "config.json").read_text())
        described.pop("tie_word_embeddings", None)
        (source / "config.json").write_text(json.dumps(described))
    expected = hf_state(AutoModelForCausalLM.from_pretrained(source, dtype="auto"))
    assert not torch.equal(expected["lm_head.weight"], expected["model.embed_tokens.weight"])
    hf_config, state = load_hf_directory(source)
    assert not hf_config.tie_word_embeddings
    equal_bits(Trainer(hf_config, state, OptimizerConfig()).export(), weights(source))
    equal_bits(FsdpTrainer(hf_config, state, OptimizerConfig()).export(), weights(source))
    hf_to_megatron(source, tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    equal_bits(hf_state(AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto")), expected)
    told = json.loads(dict(zip(*dataclasses.astuple(bundle(source)), strict=True))["config.json"])
    assert told["tie_word_embeddings"] is False  # engines go by config.json alone


def test_an_output_layer_that_repeats_the_embedding_stays_tied(tmp_path):
    source = written(tmp_path / "hf", "qwen3", tied=True)
    [file] = source.glob("*.safetensors")
    found = load_file(file)
    save_file(found | {"lm_head.weight": found["model.embed_tokens.weight"].clone()}, file)
    assert load_hf_config(source).tie_word_embeddings
    assert not has_other_head(written(tmp_path / "untied", "qwen3"))


def test_a_model_of_mixed_dtypes_comes_back_with_each_tensors_own(tmp_path):
    source = written(tmp_path / "hf", "qwen3_moe", dtype=torch.bfloat16)
    mixed = {
        name: tensor.float() if "mlp.gate." in name or "layernorm" in name else tensor
        for name, tensor in weights(source).items()
    }
    assert {tensor.dtype for tensor in mixed.values()} == {torch.float32, torch.bfloat16}
    [file] = source.glob("*.safetensors")
    save_file(mixed, file, metadata={"format": "pt"})
    hf_to_megatron(source, tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    equal_bits(weights(tmp_path / "back"), mixed)
    assert load_hf_config(tmp_path / "back").dtype == torch.bfloat16


@pytest.mark.first(6, others=pytest.mark.nightly)
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=[pytest.mark.slow, pytest.mark.nightly])]
)
@pytest.mark.parametrize(
    "family",
    [f if f in ("qwen3", "qwen3_moe") else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES],
)
def test_a_checkpoint_of_a_training_run_becomes_a_model_directory(tmp_path, family, dtype):
    trainer = trained(family, dtype=dtype)
    save_checkpoint(trainer, tmp_path / "checkpoints", 1, {}, keep=1)
    megatron_to_hf(tmp_path / "checkpoints", tmp_path / "hf")
    equal_bits(weights(tmp_path / "hf"), trainer.export())
    assert load_hf_config(tmp_path / "hf").dtype == dtype


@pytest.mark.first(2, others=pytest.mark.slow)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next"])
def test_training_starts_from_a_converted_directory(tmp_path, family):
    source = written(tmp_path / "hf", family)
    hf_to_megatron(source, tmp_path / "megatron")
    hf_config, state = load_hf_directory(tmp_path / "megatron")
    exported = Trainer(hf_config, state, OptimizerConfig()).export()
    equal_bits(exported, weights(source))


@pytest.mark.first(1, others=pytest.mark.slow)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3", "qwen3_next"])
def test_megatron_core_itself_reads_what_was_converted(tmp_path, family):
    source = written(tmp_path / "hf", family)
    hf_to_megatron(source, tmp_path / "megatron")
    model = build_model(load_hf_config(source), dtype=torch.float32)
    wanted = {k: v for k, v in model.sharded_state_dict().items() if "_extra_state" not in k}
    loaded = dist_checkpointing.load(wanted, str(tmp_path / "megatron"))
    _, state = load_hf_directory(source)
    expected = Trainer(load_hf_config(source), state, OptimizerConfig()).model.state_dict()
    assert all(torch.equal(loaded[name], expected[name]) for name in loaded)


def test_weights_alone_are_not_resumed_from(tmp_path):
    hf_to_megatron(written(tmp_path / "hf"), tmp_path / "megatron")
    with pytest.raises(ConfigError, match="holds weights only: training starts from it with --model"):
        load_checkpoint(trained(), tmp_path / "megatron")


def test_nothing_is_overwritten(tmp_path):
    source = written(tmp_path / "hf")
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="there exists already"):
        hf_to_megatron(source, tmp_path / "there")
    with pytest.raises(ConfigError, match="there exists already"):
        megatron_to_hf(source, tmp_path / "there")


def refused(source, target, match, error=ConfigError):
    with pytest.raises(error, match=match):
        hf_to_megatron(source, target)
    assert not target.exists()
    assert not list(target.parent.glob(".tmp-*"))


def test_an_unknown_family_is_refused(tmp_path):
    source = written(tmp_path / "hf")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    refused(source, tmp_path / "out", "model_type='gpt2' is unknown; known are deepseek_v3, gemma3_text, ")


def test_a_hyperparameter_of_another_type_is_refused(tmp_path):
    source = written(tmp_path / "hf")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "hidden_size": "wide"}))
    refused(source, tmp_path / "out", r"cannot read .*config\.json: .*'hidden_size'")


def test_a_torn_shard_is_refused(tmp_path):
    source = written(tmp_path / "hf")
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused(source, tmp_path / "out", "cannot read .*model.safetensors")


def test_a_shard_that_is_not_there_is_refused(tmp_path):
    source = tmp_path / "hf"
    tiny_model().save_pretrained(source, max_shard_size="100KB")
    next(source.glob("model-00002-*")).unlink()
    refused(source, tmp_path / "out", "cannot read .*model-00002-of")


def test_weights_that_do_not_fit_their_configuration_are_all_named(tmp_path):
    source = written(tmp_path / "hf")
    config = json.loads((source / "config.json").read_text())
    changed = {**config, "num_hidden_layers": 3, "intermediate_size": 100, "layer_types": None}
    (source / "config.json").write_text(json.dumps(changed))
    with pytest.raises(ConfigError) as error:
        hf_to_megatron(source, tmp_path / "out")
    assert "missing model.layers.2.self_attn.q_proj.weight [96, 64]" in str(error.value)
    assert "model.layers.1.mlp.up_proj.weight is [96, 64], not [100, 64]" in str(error.value)


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    source = written(tmp_path / "hf", vocab_size=20)
    character_tokenizer().save_pretrained(source)
    refused(source, tmp_path / "out", "the model embeds 20: they do not belong together")


def test_the_configuration_of_another_model_is_refused(tmp_path):
    hf_to_megatron(written(tmp_path / "hf"), tmp_path / "megatron")
    other = written(tmp_path / "other", vocab_size=70)
    with pytest.raises(ConfigError, match="of another model: vocab is 58, not 70"):
        megatron_to_hf(tmp_path / "megatron", tmp_path / "out", other)


def test_what_a_manifest_of_before_does_not_say_is_not_compared(tmp_path):
    hf_to_megatron(written(tmp_path / "hf"), tmp_path / "megatron")
    other = written(tmp_path / "other", rms_norm_eps=1e-3)
    with pytest.raises(ConfigError, match=r"of another model: rms_norm_eps is 1e-06, not 0\.001"):
        megatron_to_hf(tmp_path / "megatron", tmp_path / "out", other)
    manifest = json.loads((tmp_path / "megatron/manifest.json").read_text())
    del manifest["model"]["rms_norm_eps"]
    (tmp_path / "megatron/manifest.json").write_text(json.dumps(manifest))
    megatron_to_hf(tmp_path / "megatron", tmp_path / "out", other)


def test_a_scaled_rotary_embedding_is_kept_and_no_other_taken(tmp_path):
    source = written(tmp_path / "hf", "llama", rope="yarn")
    hf_to_megatron(source, tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    assert load_hf_config(tmp_path / "back").rope_parameters == load_hf_config(source).rope_parameters
    other = written(tmp_path / "other", "llama", rope="llama3")
    with pytest.raises(ConfigError, match=r"of another model: rope_scaling is .*'yarn'.*, not .*'llama3'"):
        megatron_to_hf(tmp_path / "megatron", tmp_path / "out", other)


def test_a_flipped_bit_in_a_checkpoint_is_found(tmp_path):
    hf_to_megatron(written(tmp_path / "hf"), tmp_path / "megatron")
    file = tmp_path / "megatron/__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(StorageError, match=r"the bytes of __0_0\.distcp are not those that were written"):
        megatron_to_hf(tmp_path / "megatron", tmp_path / "out")


def test_the_command_converts_and_complains(tmp_path, capsys):
    def launch(*arguments: object) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["convert", *map(str, arguments)])
        return ended.value.code, *capsys.readouterr()

    source = written(tmp_path / "hf")
    status, output, errors = launch("hf-to-megatron", source, tmp_path / "megatron")
    assert status in (None, 0), errors
    assert output.startswith(f"wrote {tmp_path}/megatron: ")
    status, output, errors = launch("hf-to-megatron", source, tmp_path / "megatron")
    assert (status, output) == (2, "")
    assert errors.startswith(f"launch: {tmp_path}/megatron exists already")
    assert launch("megatron-to-hf", tmp_path / "megatron", tmp_path / "back")[0] in (None, 0)
    equal_bits(weights(tmp_path / "back"), weights(source))


MEASURE = """
import re, sys
from pathlib import Path
from learner.convert.megatron import hf_to_megatron, megatron_to_hf
small, large, out = map(Path, sys.argv[1:])
def resident(field):
    return 1024 * int(re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
def convert(source, name):
    hf_to_megatron(source, out / name)
    megatron_to_hf(out / name, out / (name + "-back"), shard_bytes=30_000_000)
convert(small, "small")
before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
convert(large, "large")
print(resident("VmHWM") - before)
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_a_model_is_never_in_memory_as_a_whole(tmp_path):
    small = written(tmp_path / "small")
    sizes = {"hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 16}
    large = written(tmp_path / "large", **sizes)
    model_bytes = sum(file.stat().st_size for file in large.glob("*.safetensors"))
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, small, large, tmp_path / "out"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    grown = int(done.stdout)
    assert model_bytes > 100e6
    assert grown < 40e6, f"{grown / 1e6:.0f} MB for {model_bytes / 1e6:.0f} MB of weights"
    assert weights(tmp_path / "out/large-back").keys() == weights(large).keys()
