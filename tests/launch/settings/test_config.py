"""Tests how a run's configuration is put together, and what is said about a wrong one."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError

from bus.errors import ConfigError
from launch.model_files.model_directory import refuse_full_context
from launch.settings.run_config import RunConfig, config_file, flags, merge, preset, resolve, validate
from launch.settings.tree import members
from storage.settings.weights_transport import FilesTransport

SORT = {"data": {"task": "sort"}}


def refusal(*layers: dict) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(*layers)
    return str(caught.value)


def test_without_layers_the_defaults_stand():
    assert resolve() == RunConfig()


@pytest.mark.parametrize(
    ("sampling", "complaint"),
    [
        ({"temperature": 0.7}, "learner.teachers.math.url needs sampling.temperature=1, which is 0.7"),
        ({"top_p": 0.9, "keep_masks": True}, "sampling.keep_masks=true"),
    ],
)
def test_what_actors_sample_must_be_what_a_teacher_behind_a_server_scores(sampling, complaint):
    teachers = {"math": {"url": "http://host:30000"}}
    assert complaint in refusal({"sampling": sampling, "learner": {"teachers": teachers}})
    resolve({"sampling": sampling, "learner": {"teachers": {"math": {"path": "there"}}}})


def test_servers_that_do_not_tell_what_they_keep_are_refused_at_the_start_but_for_those_that_only_evaluate():
    engine = {"type": "sglang", "server": {"speculative_algorithm": "EAGLE"}}
    layer = {"sampling": {"top_p": 0.9, "keep_masks": True}, "actors": {"engine": engine}}
    assert "speculative_algorithm='EAGLE': SGLang does not tell then what it kept" in refusal(layer)
    resolve(layer, {"sampling": {"keep_masks": False}})
    resolve(layer, {"actors": {"evaluation": {"only": True}}})


@pytest.mark.parametrize("kind", [{"type": "agent", "command": "true"}, {"type": "clients"}])
def test_agents_that_choose_their_temperature_are_refused_beside_a_teacher_behind_a_server(kind):
    open_ended = {**kind, "reward": "exact", "gateway": {"pinned": ["top_p", "top_k"]}}
    url, path = ({"teacher": {name: "http://host:30000"}} for name in ("url", "path"))
    told = refusal({"actors": {"environment": open_ended}, "learner": url})
    assert "learner.teacher.url needs temperature 1, and actors.environment lets agents choose theirs" in told
    assert "gateway.pinned=['top_p', 'top_k'] lacks temperature; add it" in told
    resolve({"actors": {"environment": open_ended}, "learner": path})
    resolve({"actors": {"environment": {**kind, "reward": "exact"}}, "learner": url})
    if kind["type"] == "agent":
        named = {"environments": [{"name": "coder", "environment": open_ended}]}
        assert "environment 'coder' of actors.environments" in refusal({"actors": named, "learner": url})


def test_router_replay_needs_what_it_replays():
    told = refusal({"learner": {"router_replay": "engine"}})
    assert "learner.router_replay=engine needs the experts that engines chose" in told
    resolve({"learner": {"router_replay": "engine"}, "actors": {"engine": {"routed_experts": True}}})
    resolve({"learner": {"router_replay": "learner"}})
    resolve({"learner": {"router_replay": "learner", "backend": "fsdp"}})


FP8 = {"learner": {"publication": {"quantisation": "fp8_block"}}}


@pytest.mark.parametrize(
    ("layer", "complaint"),
    [
        ({"learner": {"lora": {"rank": 4, "publish": "adapter"}}}, "adapters alone are published"),
        ({"actors": {"engine": {"type": "sglang", "update": "group"}}}, "set actors.engine.update=disk"),
        ({"actors": {"engine": {"type": "sglang", "url": "http://h:1"}}}, "the running server http://h:1"),
        (
            {"actors": {"engine": {"type": "sglang", "server": {"quantization": "awq"}}}},
            "actors.engine.server.quantization='awq' with quantised weights",
        ),
        (
            {
                "actors": {
                    "engine": {"type": "sglang"},
                    "opponents": {"old": {"version": "latest - 3", "url": "http://h:2"}},
                }
            },
            "the running server http://h:2: SGLang does not say how its model is quantised, and one that is "
            "not would serve codes as weights; leave out actors.opponents.old.url",
        ),
        (
            {"actors": {"evaluation": {"urls": ["http://h:3"]}}},
            "the running server http://h:3: SGLang does not say how its model is quantised, and one that is "
            "not would serve codes as weights; leave out actors.evaluation.urls",
        ),
    ],
)
def test_quantised_weights_are_refused_for_engines_that_cannot_take_them(layer, complaint):
    assert complaint in refusal(layer, FP8)
    resolve(layer)
    resolve(FP8)
    resolve(FP8, {"actors": {"engine": {"type": "sglang"}}})
    resolve(FP8, {"actors": {"evaluation": {"servers": 1}}})


@pytest.mark.parametrize(
    ("name", "why"), [("fp8_tensor", "merges the scales"), ("int4", "packs the codes of linear layers")]
)
def test_formats_of_which_sglang_takes_one_version_are_for_the_embedded_engine_alone(name, why):
    chosen = {"learner": {"publication": {"quantisation": name}}}
    resolve(chosen)
    for actors in ({"engine": {"type": "sglang"}}, {"evaluation": {"servers": 1}}):
        assert "set quantisation to fp8_block" in refusal(chosen, {"actors": actors})
        assert why in refusal(chosen, {"actors": actors})


def test_later_layers_win_key_by_key():
    config = resolve(
        {"run": "preset", "learner": {"steps": 1, "optimizer": {"lr": 1e-3}}, **SORT},
        {"learner": {"steps": 2}},
        {"learner": {"threads": "2"}},
    )
    assert (config.run, config.learner.steps, config.learner.threads) == ("preset", 2, 2)
    assert config.learner.optimizer.lr == 1e-3


def test_an_infinite_bound_is_kept_in_the_configuration_that_processes_read():
    config = resolve({"learner": {"correction": {"type": "token_tis", "truncation_cap": "inf"}}})
    read = resolve(json.loads(config.model_dump_json()))
    assert (read, read.learner.correction.truncation_cap) == (config, math.inf)


def test_a_table_that_is_given_in_part_keeps_the_other_defaults():
    config = resolve({"warmup": {"optimizer": {"lr": 1.0}}})
    assert config.warmup.optimizer.lr == 1.0
    assert config.warmup.optimizer.warmup_steps == RunConfig().warmup.optimizer.warmup_steps == 20


def test_muon_keeps_the_learning_rate_of_the_table_below_it():
    muon = {"learner": {"optimizer": {"matrices": "muon"}}}
    assert resolve({"learner": {"optimizer": {"lr": 1e-3}}}, muon).learner.optimizer.lr == 1e-3


def test_another_type_replaces_the_table_below_it():
    ppo = {"learner": {"loss": {"type": "ppo_clip", "clip_eps": 0.1}}}
    reinforce = resolve(ppo, {"learner": {"loss": {"type": "reinforce"}}}).learner.loss
    assert reinforce.model_dump() == {"type": "reinforce"}


def test_the_same_type_or_none_named_goes_over_the_table_below_it():
    ppo = {"learner": {"loss": {"type": "ppo_clip", "clip_eps": 0.1}}}
    loss = resolve(ppo, {"learner": {"loss": {"clip_eps_high": 3}}}).learner.loss
    assert (loss.type, loss.clip_eps, loss.clip_eps_high) == ("ppo_clip", 0.1, 3)
    assert resolve({"learner": {"steps": 3}}).learner.loss.type == "reinforce"


def test_a_correction_that_the_loss_would_ignore_is_refused():
    tis = {"type": "token_tis", "truncation_cap": 2.0}
    for loss in ({"type": "ppo_clip"}, {"type": "gspo"}):
        assert resolve({"learner": {"loss": loss}}).learner.used_correction.type == "none"
        with pytest.raises(ConfigError, match=r"correction\.type=token_tis has no effect with learner\.loss"):
            resolve({"learner": {"loss": loss, "correction": tis}})
    decoupled = {"type": "ppo_clip", "centre": "proximal"}
    assert resolve({"learner": {"loss": decoupled}}).learner.used_correction.truncation_cap == 2.0
    found = resolve({"learner": {"loss": decoupled, "correction": tis | {"truncation_cap": 3.0}}}).learner
    assert found.used_correction.truncation_cap == 3.0


def test_layers_are_not_changed_by_merging():
    below = {"learner": {"steps": 1}}
    assert merge(below, {"learner": {"threads": 2}}) == {"learner": {"steps": 1, "threads": 2}}
    assert below == {"learner": {"steps": 1}}


def test_none_in_a_flag_takes_a_value_away_where_there_may_be_none():
    given = {"learner": {"target_accuracy": "none", "loss": {"clip_eps_high": "none"}}, "run": "none"}
    assert flags(given) == {
        "learner": {"target_accuracy": None, "loss": {"clip_eps_high": None}},
        "run": "none",
    }
    assert (
        resolve(preset("sort"), flags({"learner": {"target_accuracy": "none"}})).learner.target_accuracy
        is None
    )


def test_none_chooses_that_no_engine_evaluates_in_every_form_of_the_setting(tmp_path: Path):
    for name, text in (
        ("a.toml", '[actors.evaluation]\nengine = "none"'),
        ("a.json", '{"actors": {"evaluation": {"engine": "none"}}}'),
    ):
        (tmp_path / name).write_text(text)
        assert resolve(config_file(tmp_path / name)).actors.evaluates_on == "none"
    flag = flags({"actors": {"evaluation": {"engine": "none"}}})
    chosen = resolve(flag)
    assert chosen.actors.evaluates_on == "none"
    assert resolve(json.loads(chosen.model_dump_json())).actors.evaluates_on == "none"


def test_no_setting_has_both_no_value_and_a_choice_of_that_name():
    """`none` in a flag or a file could not say which of them is meant, and the default would be taken."""
    settings = dict(settings_of(RunConfig))
    assert "actors.evaluation.engine" in settings
    both = [
        name for name, kind in settings.items() if type(None) in get_args(kind) and "none" in choices(kind)
    ]
    assert both == []


def settings_of(section: type[BaseModel], above: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting below a section with what may stand there, those of all members of unions included."""
    for name, field in section.model_fields.items():
        yield above + name, field.annotation
        for member in members(field.annotation):
            yield from settings_of(member, f"{above}{name}.")


def choices(kind: Any) -> set[Any]:
    if get_origin(kind) is Literal:
        return set(get_args(kind))
    return {choice for inner in get_args(kind) for choice in choices(inner)}


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.path", {"model": {"path": ""}}),
        ("bus.creds", {"bus": {"creds": ""}}),
        ("learner.reward_hook.function", {"learner": {"reward_hook": {"function": ""}}}),
        ("actors.weights.advertise", {"actors": {"weights": {"advertise": ""}}}),
    ],
)
def test_an_empty_text_is_no_way_to_give_no_value(name: str, layer: dict):
    """A shell makes it of a variable that is not set, and an empty path would be the present directory."""
    assert f"{name} is empty: name a value, or give none" in refusal(layer)


def test_without_flags_there_is_no_layer():
    assert flags(RunConfig()) == {}


@pytest.mark.parametrize(
    "name", ["sort", "addition", "product", "python", "retool", "search", "debate", "count"]
)
def test_presets_resolve(name: str):
    config = resolve(preset(name))
    assert (config.run, config.data.task) == (name, name)


def test_what_a_run_saves_resolves_to_the_same_again():
    config = resolve(preset("sort"), {"learner": {"loss": {"type": "ppo_clip"}}, "directory": "/somewhere"})
    assert resolve(json.loads(config.model_dump_json())) == config


def test_a_configuration_is_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        RunConfig().run = "other"
    with pytest.raises(ValidationError, match="frozen"):
        RunConfig().learner.loss.type = "ppo_clip"


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"lerner": {"steps": 1}}, "unknown key lerner: did you mean 'learner'?"),
        ({"learner": {"stepps": 1}}, "unknown key learner.stepps: did you mean 'steps'?"),
        (
            {"learner": {"loss": {"type": "ppo_clip", "clip_epss": 1}}},
            "unknown key learner.loss.clip_epss: did you mean 'clip_eps'?",
        ),
        ({"learner": {"loss": {"zzz": 1}}}, "unknown key learner.loss.zzz: there are: type"),
        ({"learner": {"steps": -1}}, "learner.steps: should be greater than or equal to 0 (got -1)"),
        (
            {"learner": {"steps": "many"}},
            "learner.steps: should be a valid integer, unable to parse string as an integer (got 'many')",
        ),
        (
            {"learner": {"loss": {"type": "ppo_clip", "clip_eps": -1}}},
            "learner.loss.clip_eps: should be greater than 0 (got -1)",
        ),
        (
            {"learner": {"loss": {"type": "ppo_clp"}}},
            "learner.loss.type: no 'ppo_clp': did you mean 'ppo_clip'? there are: reinforce, ppo_clip, gspo, "
            "cispo, sapo, topr, aipo, gmpo, vespo, regression, clip_cov, kl_cov, plugin",
        ),
        (
            {"learner": 3},
            "learner is a table of settings, not a value (got 3): name one, such as learner.steps",
        ),
        (
            {"model": {"dtype": "float8"}},
            "model.dtype: should be 'auto', 'float32' or 'bfloat16' (got 'float8')",
        ),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_and_what_is_right(layer: dict, message: str):
    assert refusal(layer) == message


def test_every_problem_is_told_on_a_line_of_its_own():
    said = refusal({"lerner": 1, "seed": -1}).splitlines()
    assert sorted(line.split(":")[0] for line in said) == ["seed", "unknown key lerner"]


@pytest.mark.parametrize(
    ("layer", "remedy"),
    [
        ({"learner": {"target_accuracy": 0.5}}, "--learner.target-accuracy none"),
        (
            {"learner": {"target_accuracy": 0.5}, "data": {"task": "sort", "prompts": "p.jsonl"}},
            "--data.heldout",
        ),
        ({"warmup": {"steps": 5}}, "--warmup.demonstrations"),
        (
            {"learner": {"batch": {"updates": 5}}, "admission": {"samples_per_prompt": 4}},
            "set it to 4 or less",
        ),
        (
            {"learner": {"optimizer": {"offload": 0.5}, "parallel": {"distributed_optimizer": False}}},
            "learner.optimizer.offload=0.5 needs learner.parallel.distributed_optimizer=true",
        ),
        (
            {
                "learner": {"parallel": {"distributed_optimizer": False}},
                "warmup": {"optimizer": {"offload": 1}},
            },
            "warmup.optimizer.offload=1.0 needs learner.parallel.distributed_optimizer=true",
        ),
        (
            {
                "learner": {"backend": "fsdp", "optimizer": {"offload": 1}},
                "warmup": {"steps": 5},
                "data": {"task": "sort"},
            },
            "warmup.optimizer.offload=0.0 is not learner.optimizer.offload=1.0; set both alike",
        ),
        (
            {"learner": {"lora": {"rank": 8}}, "warmup": {"steps": 1, "optimizer": {"matrices": "muon"}}},
            "warmup.optimizer.matrices=muon with learner.lora.rank=8",
        ),
        (
            {"learner": {"backend": "fsdp", "lora": {"rank": 8}}, "model": {"freeze": ["embed"]}},
            "choose the layers that have adapters with learner.lora.targets",
        ),
        (
            {
                "learner": {"backend": "fsdp", "lora": {"rank": 8}},
                "actors": {"engine": {"type": "sglang", "update": "group"}},
            },
            "set learner.lora.publish=merged",
        ),
        (
            {"actors": {"engine": {"type": "sglang", "adapter": "loaded"}}},
            'adapter="loaded" needs adapters: set learner.lora.rank',
        ),
        (
            {
                "learner": {"backend": "fsdp", "lora": {"rank": 8, "publish": "merged"}},
                "actors": {"engine": {"type": "sglang", "adapter": "loaded"}},
            },
            'adapter="loaded" with learner.lora.publish=merged',
        ),
        (
            {
                "learner": {"backend": "fsdp", "lora": {"rank": 8, "weight_decomposed": True}},
                "actors": {"engine": {"type": "sglang", "adapter": "loaded"}},
            },
            "set actors.engine.adapter=merged, or leave weight_decomposed out",
        ),
        (
            {
                "learner": {"lora": {"rank": 8, "experts": True}},
                "actors": {"engine": {"type": "sglang", "adapter": "loaded"}},
            },
            "routed experts are loaded into SGLang: set actors.engine.adapter=merged, or leave experts out",
        ),
        (
            {
                "learner": {"backend": "fsdp", "lora": {"rank": 8}},
                "actors": {"engine": {"type": "sglang", "adapter": "loaded"}},
                "colocation": {"enabled": True},
            },
            'colocation.enabled with actors.engine.adapter="loaded"',
        ),
    ],
)
def test_settings_that_need_each_other_say_so(layer: dict, remedy: str):
    assert remedy in refusal(layer)
    validate(layer)  # alone it is no mistake: the rest may come from the bus


def test_an_unknown_preset_is_answered_with_the_nearest_and_all():
    with pytest.raises(
        ConfigError,
        match=r"no preset 'sotr': did you mean 'sort'\? .*: addition, agent, count, .*, product, .*, sort",
    ):
        preset("sotr")


@pytest.mark.parametrize(
    ("name", "text"), [("a.toml", "[learner]\nsteps = 3"), ("a.json", '{"learner": {"steps": 3}}')]
)
def test_a_configuration_file_is_toml_or_json(tmp_path: Path, name: str, text: str):
    (tmp_path / name).write_text(text)
    assert config_file(tmp_path / name) == {"learner": {"steps": 3}}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "steps = 1\nrun = sort", "a.toml is not TOML: .* line 2, column 7"),
        ("a.json", "{", "a.json is not JSON: .* line 1 column 2"),
        ("a.json", "[1]", "a.json is not an object of settings"),
        ("a.toml", b"\xff\xfe", "a.toml is not TOML: .*utf-8"),
        ("a.toml", "model = 'Qwen/Qwen3-0.6B'", r"model is a table .*got 'Qwen/Qwen3-0.6B'.* model\.path"),
        ("a.json", '{"bus": "nats://here"}', r"bus is a table .* such as bus\.url"),
        ("a.toml", "directory = 3", r"directory: .*got 3"),
    ],
)
def test_a_malformed_configuration_file_is_named(tmp_path: Path, name: str, text: str | bytes, message: str):
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=message):
        config_file(tmp_path / name)


def test_a_value_of_a_flag_in_place_of_a_table_is_named():
    with pytest.raises(ConfigError, match=r"model is a table .* such as model\.path"):
        flags({"model": "Qwen/Qwen3-0.6B"})


def test_a_configuration_file_that_cannot_be_read_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"missing\.toml: No such file"):
        config_file(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        config_file(tmp_path)


def test_a_refused_combination_ends_with_its_remedy_and_not_with_the_whole_section():
    found = refusal(SORT, {"admission": {"ahead": "need", "exact_staleness": True}})
    assert found.endswith("with exact_staleness=False only; set that, or admission.ahead=bound")


def test_the_engine_is_chosen_by_its_type_and_a_servers_own_settings_pass():
    server = {"mem_fraction_static": 0.8, "tp_size": 2, "disable_radix_cache": "true"}
    config = resolve(preset("sort"), {"actors": {"engine": {"type": "sglang", "server": server}}})
    assert config.actors.engine.type == "sglang"
    assert resolve(json.loads(config.model_dump_json())) == config
    assert resolve(preset("sort")).actors.engine.type == "embedded"


def test_a_setting_of_another_engine_is_refused_with_those_there_are():
    assert "unknown key actors.engine.slots: there are: type, routed_experts, url, urls" in refusal(
        SORT, {"actors": {"engine": {"type": "sglang", "slots": 3}}}
    )
    assert "no 'slang': did you mean 'sglang'?" in refusal(SORT, {"actors": {"engine": {"type": "slang"}}})


def test_a_transport_is_chosen_by_its_type():
    def chosen(**transport):
        return SORT | {"learner": {"publication": {"transport": transport}}}

    found = resolve(chosen(type="files", directory="/nfs")).learner.publication.transport
    assert found == FilesTransport(directory=Path("/nfs"))
    assert "transport.type: no 'pigeon'" in refusal(chosen(type="pigeon"))
    assert "transport.directory" in refusal(chosen(type="files"))


def test_forced_lengths_fit_the_longest_completion():
    said = refusal({"actors": {"environment": {"type": "length_profile"}}})
    assert "answers of up to 4096 tokens, but sampling.max_new_tokens=512: raise that" in said


def environments(**fields):
    nim = {"name": "nim", "environment": {"type": "game", "game": {"type": "nim"}}}
    return {"actors": {"environments": [nim], **fields}}


def test_sources_and_evaluation_sets_choose_environments_that_are_there():
    def source(**fields):
        return {"data": {"sources": [{"name": "a", "prompts": "a.jsonl", **fields}]}}

    def evaluation(**fields):
        return {"evaluation": {"sets": [{"name": "s", "prompts": "s.jsonl", **fields}]}}

    resolve(SORT, environments(), source(environment="nim"), evaluation(environment="nim"))
    for chooses, where in ((source, "data.sources 'a'"), (evaluation, "evaluation.sets 's'")):
        said = refusal(environments() | chooses(environment="mim"))
        assert f"{where}: environment='mim' is none of actors.environments: did you mean 'nim'?" in said
        said = refusal(environments() | chooses(environment="nim", reward="exact"))
        assert f"{where}: reward='exact' is not for an environment of type=game" in said


def test_environments_of_one_run_have_names_of_their_own_and_none_waits_for_clients():
    [nim] = environments()["actors"]["environments"]
    assert "two environments are named 'nim'" in refusal({"actors": {"environments": [nim, nim]}})
    said = refusal(environments(environment={"type": "clients"}))
    assert "environments with type=clients: leases are taken when clients ask" in said
    duel = {"name": "duel", "environment": {"type": "game", "game": {"type": "nim"}, "opponent": "past"}}
    assert "'past' is none of opponents" in refusal({"actors": {"environments": [duel]}})


def test_variables_of_a_process_that_does_not_exist_are_refused():
    said = refusal({"supervision": {"environment": {"actor": {"CUDA_VISIBLE_DEVICES": "1"}}}})
    assert "environment has 'actor', the processes are: bus, storage, actors, learner" in said


def test_colocation_is_refused_where_turns_cannot_be_taken():
    shared = {"colocation": {"enabled": True}}
    assert resolve(shared).colocation.enabled
    sglang = {"actors": {"engine": {"type": "sglang"}}}
    assert resolve(shared, sglang).colocation.enabled
    attached = {"actors": {"engine": {"type": "sglang", "url": "http://there:30000"}}}
    sent = {"actors": {"engine": {"type": "sglang", "update": "group"}}}
    assert 'actors.engine.update="group"' in refusal(shared, sent)
    assert resolve(sent).actors.engine.update == "group"
    assert "actors.engine.url=http://there:30000:" in refusal(shared, attached)
    several = {"actors": {"engine": {"type": "sglang", "urls": ["http://a:1", "http://b:2"]}}}
    assert "actors.engine.urls=http://a:1, http://b:2:" in refusal(shared, several)
    pair = {"actors": {"engine": {"type": "sglang", "disaggregation": {"enabled": True}}}}
    assert "the two servers of a pair do not free their devices" in refusal(shared, pair)
    assert resolve(pair).actors.engine.disaggregation.transfer == "mooncake"
    unable = {"actors": {"engine": {"type": "sglang", "server": {"enable-memory-saver": False}}}}
    assert "enable_memory_saver is false" in refusal(shared, unable)
    assert "learner.world.nodes=2" in refusal(shared, {"learner": {"world": {"nodes": 2}}})
    assert "yield_timeout_s=600 is not above" in refusal(
        {"colocation": {"enabled": True, "yield_timeout_s": 600}}
    )
    assert resolve(attached).actors.engine.url


def test_answers_that_fill_the_context_are_refused_before_anything_starts(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"max_position_embeddings": 4096}')
    of_model, scratch = {"model": {"path": str(model)}}, {"model": {"scratch": {"context": 64}}}
    refuse_full_context(resolve({"sampling": {"max_new_tokens": 4095}}, of_model))
    supervised = {"learner": {"steps": 0}, "warmup": {"steps": 5, "demonstrations": "d.jsonl"}}
    refuse_full_context(resolve({"sampling": {"max_new_tokens": 4096}, **supervised}, of_model))
    with pytest.raises(ConfigError, match=r"=4096 leaves no room for a prompt.* of 4096: lower it"):
        refuse_full_context(resolve({"sampling": {"max_new_tokens": 4096}}, of_model))
    with pytest.raises(ConfigError, match=r"=64 leaves no room .*model.scratch.context is 64: lower it"):
        refuse_full_context(resolve({"sampling": {"max_new_tokens": 64}}, scratch))
    refuse_full_context(resolve({"sampling": {"max_new_tokens": 4096}}))
    elsewhere = {"model": {"path": "/on/the/learners/host"}}
    refuse_full_context(resolve({"sampling": {"max_new_tokens": 4096}}, elsewhere))


@pytest.mark.parametrize(
    ("warmup", "learner", "complaint"),
    [
        (
            {"demonstrations": None},
            {},
            "warmup.loss.type=reward_model needs pairs of answers: give them with --p",
        ),
        (
            {},
            {"backend": "megatron", "mtp": {"weight": 0.1}},
            "the head would learn answers that are not preferred",
        ),
        ({}, {"steps": 3}, "with learner.steps=3: it is no policy; set learner.steps=0"),
        ({"loss": {"type": "dpo", "form": "ipo", "label_smoothing": 0.1}}, {}, "has no effect with form=ipo"),
    ],
)
def test_a_loss_over_pairs_is_refused_where_it_cannot_be_trained(warmup, learner, complaint):
    given = {"steps": 1, "demonstrations": "pairs.jsonl", "loss": {"type": "reward_model"}}
    assert complaint in refusal({
        "warmup": given | warmup, "learner": {"backend": "fsdp", "steps": 0} | learner
    })  # fmt: skip


def test_engines_that_load_by_turns_are_not_sent_to_together():
    def started(**fleet: float):
        return resolve({"learner": {"publication": {"broadcast_together": True}}, "actors": {"fleet": fleet}})

    with pytest.raises(ConfigError, match=r"set actors\.fleet\.updated_at_once=1"):
        started(engines=4)
    started(engines=4, updated_at_once=1)
    started(engines=1)
