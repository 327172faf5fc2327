"""What is made of SGLang's answers, and of configurations, without a server."""

import json
import resource
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.engines.sglang import weights as sglang_weights
from actors.engines.sglang.client.answers import read_answer, read_prompt_logprobs
from actors.engines.sglang.client.server_facts import ServerFacts
from actors.engines.sglang.client.weight_labels import OtherWeightsError, weights_label
from actors.engines.sglang.server import settings as sglang_settings
from actors.engines.sglang.server.gpu_count import base_gpu_id, gpus
from actors.engines.sglang.server.launcher import _flags
from actors.engines.sglang.server.settings import KERNEL_CACHES, server_environment, server_settings
from actors.engines.sglang.weights import HeldWeights, buckets
from actors.settings.engines import SglangEngineConfig
from bus.errors import ConfigError, EngineError
from tests.actors.sglang_stand_in import answer
from tests.actors.tiny import request


def span(version: int, start: int, end: int) -> dict[str, object]:
    return {"version": weights_label(version), "start": start, "end": end}


NOT_SGLANGS = "the answer is not one of SGLang's"


def test_tokens_logprobs_and_versions_are_read():
    generation = read_answer(answer(), request("r", [1]))
    assert generation.token_ids.tolist() == [5, 6, 7]
    np.testing.assert_array_equal(generation.logprobs, np.float32([-0.5, -1.5, -2.5]))
    assert generation.policy_versions.tolist() == [3, 3, 4]
    assert generation.finish_reason == "length"


@pytest.mark.parametrize(("stops", "reason"), [((7, 9), "stop"), ((6,), "length"), ((), "length")])
def test_an_answer_that_ends_with_the_last_token_of_its_limit_is_whole(stops, reason):
    found = read_answer(answer(), request("r", [1], new=3, stop_token_ids=stops))
    assert found.finish_reason == reason
    assert found.token_ids.tolist() == [5, 6, 7]


def test_without_spans_all_tokens_are_of_the_one_version():
    generation = read_answer(answer(weight_versions=None), request("r", [1]))
    assert generation.policy_versions.tolist() == [4, 4, 4]


@pytest.mark.parametrize(
    ("meta", "says"),
    [
        ({"output_token_logprobs": [[-0.5, 5, None]]}, "3 tokens came with 1 log-probs"),
        ({"output_token_logprobs": None}, "3 tokens came with 0 log-probs"),
        (
            {"output_token_logprobs": [[-0.5, 5, None], [None, 6, None], [-2.5, 7, None]]},
            "log-prob of token 1 of 3 is nan",
        ),
        (
            {"output_token_logprobs": [[-0.5, 5, None], [-1.5, 9, None], [-2.5, 7, None]]},
            "of other tokens than those returned: token 1 of 3 is 6, and the log-prob is of 9",
        ),
        ({"weight_versions": [{"version": weights_label(3), "start": 0, "end": 2}]}, "of no version"),
        ({"weight_versions": [span(3, 0, 3), span(4, 2, 3)]}, "do not follow one another"),
        ({"weight_versions": [span(4, -1, 3)]}, "do not follow one another"),
        ({"weight_versions": [span(3, 0, 2), span(4, 2, 0), span(4, 0, 3)]}, "do not follow one another"),
        ({"weight_versions": [{"version": weights_label(2**31), "start": 0, "end": 3}]}, NOT_SGLANGS),
        ({"weight_versions": [{"start": 0, "end": 3}]}, NOT_SGLANGS),
        ({"weight_versions": {"version": "3"}}, NOT_SGLANGS),
        ({"output_token_logprobs": [-0.5, -1.5, -2.5]}, NOT_SGLANGS),
        ({"output_token_logprobs": [[], [], []]}, NOT_SGLANGS),
        ({"finish_reason": {"type": []}}, NOT_SGLANGS),
        ({"prompt_tokens": 0}, "SGLang read 0 of its 1 tokens: .*--allow-auto-truncate"),
        (
            {"finish_reason": {"type": "abort", "status_code": 500, "message": "out of memory"}},
            "out of memory",
        ),
        ({"finish_reason": None}, NOT_SGLANGS),
    ],
)
def test_an_answer_that_cannot_be_a_generation_is_an_error(meta, says):
    with pytest.raises(EngineError, match=f"request r: .*({says})"):
        read_answer(answer(**meta), request("r", [1]))


def test_log_probs_of_a_prompt_are_read_though_the_last_id_of_the_vocabulary_comes_as_0():
    pairs = [[None, 3, None], [-0.5, 7, None], [-1.5, 0, None]]
    answered = {"meta_info": {"input_token_logprobs": pairs}}
    assert read_prompt_logprobs(answered, request("r", [3, 7, 57])) == [-0.5, -1.5]
    with pytest.raises(EngineError, match="token 0 of 2 is 8, and the log-prob is of 7"):
        read_prompt_logprobs(answered, request("r", [3, 8, 57]))
    for places in ((1,), (1, 2)):
        zeros = [[0.0, 0, None] if n in places else pair for n, pair in enumerate(pairs)]
        with pytest.raises(EngineError, match="token 0 of 2 is 7, and the log-prob is of 0"):
            read_prompt_logprobs({"meta_info": {"input_token_logprobs": zeros}}, request("r", [3, 7, 57]))
    above = [[None, 3, None], [0.5, 7, None]]
    with pytest.raises(EngineError, match=r"log-prob of token 0 of 1 is 0\.5"):
        read_prompt_logprobs({"meta_info": {"input_token_logprobs": above}}, request("r", [3, 7]))
    with pytest.raises(EngineError, match="1 tokens came with 2 log-probs"):
        read_prompt_logprobs(answered, request("r", [3, 7]))


def test_an_answer_of_something_else_is_an_error():
    for other in ({"choices": []}, {**answer(), "output_ids": [5, 6, 2**31]}):
        with pytest.raises(EngineError, match=NOT_SGLANGS):
            read_answer(other, request("r", [1]))


@pytest.mark.parametrize("label", ["default", "-1", "3", "3.another"])
def test_tokens_of_weights_that_another_process_gave_the_server_are_of_no_version(label):
    spans = [{"version": label, "start": 0, "end": 3}]
    with pytest.raises(OtherWeightsError, match=f"weights '{label}', which are not of this actor"):
        read_answer(answer(weight_versions=spans), request("r", [1]))


@pytest.fixture
def model_dir(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    config = {"architectures": ["Qwen3ForCausalLM"], "dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def held(model_dir, tmp_path):
    weights = HeldWeights(model_dir, tmp_path / "weights")
    yield weights
    weights.close()
    assert not list((tmp_path / "weights").iterdir())


STATE = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.ones(5, dtype=torch.bfloat16),
    "c": torch.tensor(3, dtype=torch.int64),
}


def in_files(held):
    return [load_file(file) for file in sorted(held.directory.glob("*.safetensors"))]


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_file_holds_what_is_to_be_read_until_it_was_read(held):
    held.keep(STATE, 0)
    assert in_files(held) == []
    assert held.write(STATE) == held.directory
    [written] = in_files(held)
    assert same(written, STATE)
    held.drop(held.files)
    assert in_files(held) == []
    changed = {"b": torch.zeros(5, dtype=torch.bfloat16)}
    held.keep(changed, 1)
    assert held.policy_version == 1
    held.write(held.tensors)
    [written] = in_files(held)
    assert same(written, {**STATE, **changed})
    assert (held.directory / "config.json").is_file()


def test_a_file_that_a_server_has_mapped_is_not_written_into(held):
    held.write(STATE)
    [mapped] = in_files(held)
    held.write({"a": torch.zeros(2, 3)})
    assert same(mapped, STATE)


def test_files_that_were_read_go_and_those_written_since_stay(held):
    held.write(STATE)
    read = held.files
    held.write({"c": STATE["c"]})
    held.drop(read)
    [written] = in_files(held)
    assert same(written, {"c": STATE["c"]})


def test_much_is_written_as_several_files_and_none_of_those_before_stays(held, monkeypatch):
    monkeypatch.setattr(sglang_weights, "FILE_BYTES", 32)
    held.write(STATE)
    one, two = in_files(held)
    assert same(one, {"a": STATE["a"]})
    assert same(two, {"b": STATE["b"], "c": STATE["c"]})
    held.write({"c": STATE["c"]})
    [written] = in_files(held)
    assert same(written, {"c": STATE["c"]})


def test_a_tensor_that_no_file_can_hold_is_named(held):
    odd = {**STATE, "d": torch.zeros(2, dtype=torch.complex64)}
    with pytest.raises(EngineError, match=r"tensor d is torch\.complex64, which no safetensors file"):
        held.write(odd)
    assert in_files(held) == []


def test_tensors_are_held_once(held):
    held.keep(STATE, 0)
    held.keep({"c": torch.tensor(4)}, 1)
    assert held.smallest()["c"].tolist() == 4
    held.keep({"c": STATE["c"]}, 2)
    assert held.smallest()["c"] is STATE["c"]


def test_the_smallest_tensor_that_is_held_is_its_newest(held):
    held.keep(STATE, 0)
    held.keep({"c": torch.tensor(4, dtype=torch.int64)}, 1)
    assert held.smallest() == {"c": torch.tensor(4)}


def test_weights_of_another_model_are_not_taken(held):
    held.keep(STATE, 0)
    with pytest.raises(EngineError, match="tensor d is not one of this model"):
        held.keep({"a": torch.zeros(2, 3), "d": torch.zeros(1)}, 1)
    with pytest.raises(EngineError, match=r"tensor a is torch.bfloat16 \(2, 3\), and was torch.float32"):
        held.keep({"a": torch.zeros(2, 3, dtype=torch.bfloat16)}, 1)
    assert same(held.tensors, STATE)
    assert held.policy_version == 0


@contextmanager
def files_of_at_most(size_bytes):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_weights_for_which_there_is_no_room_are_refused(held):
    full = pytest.raises(ConfigError, match=r"no room for [\d,]+ bytes .* actors.engine.weights_directory")
    with files_of_at_most(64), full:
        held.write(STATE)
    assert in_files(held) == []


def test_what_a_killed_process_left_behind_is_removed(model_dir, tmp_path, monkeypatch):
    parent = tmp_path / "weights"
    alive = HeldWeights(model_dir, parent)
    dead = parent / "sluice-weights-dead"
    dead.mkdir()
    (dead / "lock").touch()
    HeldWeights(model_dir, parent).close()
    assert dead.exists(), "it may be about to take its lock"
    monkeypatch.setattr(sglang_weights, "SETTLED_S", time.time() - dead.stat().st_mtime - 1.0)
    HeldWeights(model_dir, parent).close()
    assert not dead.exists()
    assert alive.directory.exists()
    alive.close()


def test_tensors_go_together_as_far_as_they_are_small():
    state = {name: torch.zeros(size) for name, size in {"a": 2, "b": 2, "c": 9, "d": 1}.items()}
    assert [list(bucket) for bucket in buckets(state, size_bytes=16)] == [["a", "b"], ["c"], ["d"]]


def test_a_server_gets_our_settings_then_the_users(model_dir):
    config = SglangEngineConfig(server={"device": "cpu", "max-running-requests": 7, "dtype": "bfloat16"})
    settings = server_settings(config, model_dir, host="::1", port=7, first_gpu=0)
    assert settings["max_running_requests"] == 7
    assert settings["dtype"] == "bfloat16"
    assert settings["attention_backend"] == "torch_native"
    assert (settings["load_format"], settings["weight_version"]) == ("dummy", "-1")
    again = server_settings(SglangEngineConfig(), model_dir, host="::1", port=7, first_gpu=0)
    assert again["dtype"] == "float32"


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ({}, 1),
        ({"tp_size": 2}, 2),
        ({"tensor_parallel_size": "2", "pp_size": 2}, 4),
        ({"tp_size": 2, "dp_size": 2}, 4),
        ({"tp_size": 2, "data_parallel_size": 2, "enable_dp_attention": True}, 2),
    ],
)
def test_a_server_uses_as_many_gpus_as_its_parallel_sizes_say(given, used):
    assert gpus(given) == used
    assert base_gpu_id(given, 5) == 5
    assert base_gpu_id({**given, "base_gpu_id": 3}, 5) == 3


def test_engines_are_told_their_gpus_on_cuda_only(model_dir):
    found = {}
    for device in ("cuda", "cpu"):
        config = SglangEngineConfig(server={"device": device, "tp-size": 2})
        settings = server_settings(config, model_dir, host="::1", port=7, first_gpu=2)
        found[device] = settings.get("base_gpu_id")
    assert found == {"cuda": 2, "cpu": None}


@pytest.mark.parametrize(
    ("given", "sleeps", "port"),
    [
        ({}, True, 9),
        ({"tp_size": 2}, True, 9),
        ({"nccl_port": 11, "sleep_on_idle": False}, False, 11),
        ({"dp_size": 2}, True, None),  # each copy draws one
        ({"device": "cuda", "dp_size": 2, "tp_size": 2, "enable_dp_attention": True}, None, None),
    ],
)
def test_a_server_that_has_nothing_to_do_sleeps_and_its_ranks_meet_at_a_port_of_their_own(
    model_dir, given, sleeps, port
):
    config = SglangEngineConfig(server={"device": "cpu"} | given)
    found = server_settings(config, model_dir, host="::1", port=7, first_gpu=0, ranks_port=9)
    assert (found.get("sleep_on_idle"), found.get("nccl_port")) == (sleeps, port)


def test_a_parallel_size_that_is_no_number_is_refused():
    with pytest.raises(ConfigError, match=r"server\.tp_size='two' is not a whole number"):
        gpus({"tp_size": "two"})


def test_settings_that_are_the_engines_own_are_refused(model_dir):
    config = SglangEngineConfig(server={"weight-version": "7"})
    with pytest.raises(ConfigError, match=r"server\.weight_version='7': the engine sets this itself"):
        server_settings(config, model_dir, host="::1", port=7, first_gpu=0)


def test_a_model_that_names_no_architecture_is_refused(model_dir):
    (model_dir / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="names no architectures"):
        server_settings(SglangEngineConfig(), model_dir, host="::1", port=7, first_gpu=0)


def test_a_directory_whose_own_output_layer_sglang_would_leave_out_is_refused(tmp_path):
    config = {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    embedding = torch.arange(6.0).view(3, 2)
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding + 1}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="set tie_word_embeddings to false there"):
        server_settings(SglangEngineConfig(), tmp_path, host="::1", port=7, first_gpu=0)
    save_file(tensors | {"lm_head.weight": embedding.clone()}, tmp_path / "model.safetensors")
    assert server_settings(SglangEngineConfig(), tmp_path, host="::1", port=7, first_gpu=0)


def test_settings_become_flags_as_the_command_line_wants_them():
    import argparse

    parser = argparse.ArgumentParser()
    actions = {
        "flag": parser.add_argument("--flag", action="store_true"),
        "size": parser.add_argument("--size", type=int),
        "many_sizes": parser.add_argument("--many-sizes", nargs="+"),
    }
    settings = {"flag": True, "size": 3, "many_sizes": [1, 2]}
    assert list(_flags(settings, actions)) == ["--flag", "--size", "3", "--many-sizes", "1", "2"]
    assert list(_flags({"flag": "false"}, actions)) == []


def test_a_server_of_somebody_else_takes_no_settings():
    with pytest.raises(ValueError, match="leave out server, environment and python"):
        SglangEngineConfig(url="http://127.0.0.1:1", server={"dtype": "float32"})


def test_a_server_of_this_interpreter_sees_the_same_packages_and_another_does_not(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/site")
    own = server_environment(SglangEngineConfig(), {}, Path(sys.executable))
    assert own["PYTHONPATH"] == "/site"
    other = server_environment(SglangEngineConfig(), {}, Path("/other/bin/python"))
    assert "PYTHONPATH" not in other
    set_there = SglangEngineConfig(environment={"PYTHONPATH": "/theirs"})
    assert server_environment(set_there, {}, Path("/other/bin/python"))["PYTHONPATH"] == "/theirs"


def test_a_server_keeps_its_compiled_kernels_in_one_directory_unless_it_is_told_otherwise(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    for name in KERNEL_CACHES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_CACHE_PATH", "/set/here")
    config = SglangEngineConfig(environment={"TRITON_CACHE_DIR": "/set/there"})
    found = server_environment(config, {}, Path(sys.executable))
    assert {name: found[name] for name in KERNEL_CACHES} == {
        "SGLANG_CACHE_DIR": "/home/me/.cache/sglang",
        "SGLANG_DG_CACHE_DIR": "/home/me/.cache/sglang/deep_gemm",
        "TRITON_CACHE_DIR": "/set/there",
        "TORCHINDUCTOR_CACHE_DIR": "/home/me/.cache/sglang/inductor",
        "CUDA_CACHE_PATH": "/set/here",
        "FLASHINFER_WORKSPACE_BASE": "/home/me/.cache/sglang",
    }
    other = server_environment(SglangEngineConfig(kernel_cache=Path("/kept")), {}, Path(sys.executable))
    assert other["SGLANG_CACHE_DIR"] == "/kept"


@pytest.mark.parametrize(
    ("server", "engine", "says"),
    [
        ({"speculative_algorithm": "NGRAM"}, {}, "needs a GPU, this server is on the CPU: its kernels"),
        ({"kv_cache_dtype": "fp8_e4m3"}, {}, "needs a GPU, .* leave it out, or set bfloat16"),
        ({"enable-deterministic-inference": True}, {}, "needs a GPU, .* batch-invariant kernels"),
        ({"enable_dp_attention": "true", "tp_size": 2, "dp_size": 2}, {}, "fill up the batches of its ranks"),
        ({"device": "cuda", "disaggregation_mode": "prefill"}, {}, "half of a pair"),
        ({"device": "cuda", "speculative_accept_threshold_acc": 0.9}, {}, "would be of others. Set 1"),
        (
            {"device": "cuda", "enable_dp_attention": True, "tp_size": 4, "dp_size": 3},
            {},
            "divides tp_size=4 by dp_size=3: give a divisor",
        ),
        ({"device": "cuda", "dp_size": 2}, {"update": "tensor"}, "set actors.fleet.engines instead"),
        ({"device": "cuda", "dp_size": "two"}, {}, "dp_size='two' is not a whole number"),
    ],
)
def test_settings_that_a_run_would_suffer_from_are_refused(model_dir, server, engine, says):
    config = SglangEngineConfig(server={"device": "cpu", **server}, **engine)
    with pytest.raises(ConfigError, match=f"actors.engine.server.*{says}"):
        server_settings(config, model_dir, host="h", port=1, first_gpu=0)


def test_settings_that_serve_rollouts_pass_to_the_server(model_dir):
    chosen = {
        "device": "cuda",
        "speculative_algorithm": "EAGLE",
        "speculative_draft_model_path": "/draft",
        "speculative_accept_threshold_acc": 1.0,
        "enable_deterministic_inference": True,
        "attention_backend": "fa3",
        "enable_dp_attention": True,
        "tp_size": 4,
        "dp_size": 2,
    }
    config = SglangEngineConfig(server=chosen)
    settings = server_settings(config, model_dir, host="h", port=1, first_gpu=4)
    assert settings.items() >= chosen.items()
    assert settings["speculative_draft_load_format"] == "auto", "the policy's own weights come later"
    assert "enable_draft_weights_cpu_backup" not in settings
    assert settings["base_gpu_id"] == 4
    leaving = SglangEngineConfig(server={**chosen, "enable_memory_saver": True})
    assert server_settings(leaving, model_dir, host="h", port=1, first_gpu=0)[
        "enable_draft_weights_cpu_backup"
    ]
    own = SglangEngineConfig(server={**chosen, "speculative_draft_load_format": "dummy"})
    format_ = server_settings(own, model_dir, host="h", port=1, first_gpu=0)["speculative_draft_load_format"]
    assert format_ == "dummy"


@pytest.mark.parametrize(
    ("algorithm", "draft", "own"),
    [
        ("EAGLE", "/draft", True),
        ("EAGLE", "/policy", False),
        ("NEXTN", None, False),
        ("NGRAM", None, False),
        ("NGRAM", "/draft", False),
        (None, "/draft", False),
    ],
)
def test_a_draft_model_of_another_checkpoint_than_the_policys_is_its_own(algorithm, draft, own):
    plain = {"model_path": "/policy", "speculative_algorithm": None, "speculative_draft_model_path": None}
    server = plain | {"speculative_algorithm": algorithm, "speculative_draft_model_path": draft}
    for settings in ((server,), (server, plain), (plain, server)):
        facts = ServerFacts(
            version="0.5.23", model="/policy", update_sessions=True, reports_spans=True,
            returns_experts=False, streams=True, tensor_ranks=1, settings=settings,
        )  # fmt: skip
        assert facts.has_own_draft is own


def test_a_directory_that_is_called_sglang_is_none(tmp_path, monkeypatch):
    (tmp_path / "sglang").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sglang_settings, "BUILT_HERE", tmp_path / "none")
    with pytest.raises(ConfigError, match="SGLang is not installed"):
        sglang_settings.interpreter(SglangEngineConfig())
