"""Settings of one section of a run's configuration that do not fit those of another."""

from typing import TYPE_CHECKING

from actors.engines.sglang.server.gpu_count import gpus, replicas
from actors.policy.cut_off_sampling import refuse_untold_masks
from actors.settings.engines import refuse_quantised, refuse_running
from bus.errors import ConfigError, nearest
from launch.settings.numerics_checks import check_numerics
from launch.settings.policies import refuse_policies
from learner.config.frozen_policies import refuse_other_sampling, teacher_settings
from learner.config.lora import LoraConfig
from storage.settings.evaluation import HELD_OUT

if TYPE_CHECKING:
    from launch.settings.run_config import RunConfig


def check_together(config: "RunConfig") -> None:
    """Refuse settings of one section that do not fit those of another."""
    _check_environments(config)
    refuse_policies(config)
    generated = config.data.task is not None and config.data.prompts is None and not config.data.sources
    if config.learner.target_accuracy and not (config.data.heldout or generated):
        raise ConfigError(
            "learner.target_accuracy needs held-out prompts: give them with --data.heldout, or turn the "
            "target off with --learner.target-accuracy none"
        )
    if (config.evaluation.best or "").startswith(f"{HELD_OUT}/") and not (config.data.heldout or generated):
        raise ConfigError(
            f"evaluation.best={config.evaluation.best!r} needs held-out prompts: give them with "
            "--data.heldout, or name one of evaluation.sets"
        )
    updates, samples = config.learner.batch.updates, config.admission.samples_per_prompt
    if updates > samples:
        raise ConfigError(
            f"learner.batch.updates={updates} is more than admission.samples_per_prompt={samples}: each "
            f"update trains on some trajectories of every group; set it to {samples} or less"
        )
    for section, optimizer in (("learner", config.learner.optimizer), ("warmup", config.warmup.optimizer)):
        if optimizer.offload and not config.learner.parallel.distributed_optimizer:
            raise ConfigError(
                f"{section}.optimizer.offload={optimizer.offload} needs "
                "learner.parallel.distributed_optimizer=true: set it so, or the offload to 0"
            )
    warm_up, learner = config.warmup.optimizer.offload, config.learner.optimizer.offload
    if config.learner.backend == "fsdp" and config.warmup.steps and warm_up != learner:
        raise ConfigError(
            f"learner.backend=fsdp offloads one way in a run: warmup.optimizer.offload={warm_up} is not "
            f"learner.optimizer.offload={learner}; set both alike"
        )
    if config.learner.router_replay == "engine" and not config.actors.engine.routed_experts:
        raise ConfigError(
            "learner.router_replay=engine needs the experts that engines chose: set "
            "actors.engine.routed_experts=true, or router_replay to none"
        )
    check_numerics(config)
    _check_publish_dtype(config)
    _check_adapters(config)
    _check_quantisation(config)
    if config.learner.fp8_matmul and config.model.dtype == "float32":
        raise ConfigError(
            f"learner.fp8_matmul=true with model.dtype={config.model.dtype}: products in fp8 are rounded to "
            "bfloat16; set model.dtype=bfloat16, or fp8_matmul to false"
        )
    _check_colocation(config)
    _check_nodes(config)
    _check_broadcasts(config)
    _check_opponents(config)
    check_evaluations(config)
    _check_sampling(config)
    _check_client_temperature(config)
    _check_stages(config)


def _check_stages(config: "RunConfig") -> None:
    """Refuse a supervised stage without demonstrations, and a run without any stage."""
    warmup = config.warmup
    if warmup.steps and warmup.loss.facts.of_pairs:
        loss = f"warmup.loss.type={warmup.loss.type}"
        if not warmup.demonstrations:
            raise ConfigError(f"{loss} needs pairs of answers: give them with --pairs")
        if config.learner.mtp.exists:
            raise ConfigError(
                f"{loss} with learner.mtp.weight={config.learner.mtp.weight}: the head would learn answers "
                "that are not preferred: set the weight to 0"
            )
        if warmup.loss.facts.of_scores:
            _check_reward_model(config, loss)
    if warmup.steps and not (warmup.demonstrations or config.data.task):
        raise ConfigError(
            "warmup.steps needs demonstrations: give them with --warmup.demonstrations, or turn the stage "
            "off with --warmup.steps 0"
        )
    if not (config.learner.steps or warmup.steps):
        raise ConfigError(
            "learner.steps=0 with warmup.steps=0 trains nothing: give learner.steps, or demonstrations with "
            "--sft"
        )


def _check_reward_model(config: "RunConfig", loss: str) -> None:
    learner = config.learner
    if learner.steps:
        raise ConfigError(f"{loss} with learner.steps={learner.steps}: it is no policy; set learner.steps=0")


def _refuse_unloadable(lora: LoraConfig) -> None:
    """Refuse servers that are to add adapters themselves where there are none that they could add."""
    if not lora.exists:
        raise ConfigError(
            'actors.engine.adapter="loaded" needs adapters: set learner.lora.rank (16 is a good start), or '
            "leave adapter out"
        )
    if lora.publish == "merged":
        raise ConfigError(
            'actors.engine.adapter="loaded" with learner.lora.publish=merged: the learner publishes whole '
            "weights: leave publish out, or adapter"
        )
    if lora.experts:
        raise ConfigError(
            'actors.engine.adapter="loaded" with learner.lora.experts=true: no adapters of routed experts '
            "are loaded into SGLang: set actors.engine.adapter=merged, or leave experts out"
        )
    if lora.weight_decomposed:
        raise ConfigError(
            'actors.engine.adapter="loaded" with learner.lora.weight_decomposed=true: SGLang adds no such '
            "adapters (DoRA): set actors.engine.adapter=merged, or leave weight_decomposed out"
        )


def _check_adapters(config: "RunConfig") -> None:
    """Refuse settings by which weights are trained beside adapters, or whole ones are sent to engines."""
    lora = config.learner.lora
    if config.actors.engine.adds_adapters:
        _refuse_unloadable(lora)
    if not lora.exists:
        return
    if config.warmup.steps and config.warmup.optimizer.matrices != "adamw":
        raise ConfigError(
            f"warmup.optimizer.matrices={config.warmup.optimizer.matrices} with learner.lora.rank="
            f"{lora.rank}: it is for whole matrices; set it to adamw, or the rank to 0"
        )
    for name in ("freeze", "train_only"):
        if chosen := getattr(config.model, name):
            raise ConfigError(
                f"model.{name}={list(chosen)} has no effect with learner.lora.rank={lora.rank}, which "
                "freezes every weight: choose the layers that have adapters with learner.lora.targets"
            )
    if lora.publish == "adapter" and config.actors.engine.servers.update == "group":
        raise ConfigError(
            'actors.engine.update="group" with learner.lora.publish=adapter: the learner broadcasts what it '
            "publishes, and its engines take whole weights; set learner.lora.publish=merged, or "
            "actors.engine.update=disk"
        )


TAKEN_ONCE = {
    "fp8_tensor": "merges the scales of fused layers",
    "int4": "packs the codes of linear layers for its kernels",
}
"""Formats of which SGLang takes one version, and what it does to that."""


def _check_publish_dtype(config: "RunConfig") -> None:
    """Refuse what the learner would refuse where the dtype does not depend on its host."""
    if (config.model.dtype, config.learner.publish_dtype) == ("float32", "bfloat16"):
        raise ConfigError(
            "learner.publish_dtype=bfloat16 is coarser than model.dtype=float32: engines would have other "
            "weights than the learner. Leave learner.publish_dtype out"
        )


def _check_quantisation(config: "RunConfig") -> None:
    """Refuse quantised weights where adapters travel, and servers that could not take them."""
    chosen, engine = config.learner.publication.quantisation, config.actors.engine
    if chosen == "none":
        return
    where = f"learner.publication.quantisation={chosen}"
    if config.learner.lora.exists and config.learner.lora.publish == "adapter":
        raise ConfigError(
            f"{where} with learner.lora.publish=adapter: adapters alone are published, and never quantised; "
            "set learner.lora.publish=merged, or quantisation to none"
        )
    serves, evaluation = not engine.in_process, config.actors.evaluation
    if chosen in TAKEN_ONCE and (serves or evaluation.has_own_servers):
        servers = "actors.engine.type=sglang" if serves else "actors.evaluation.servers or urls"
        raise ConfigError(
            f"{where} with {servers}: SGLang {TAKEN_ONCE[chosen]} when it loads them, and takes no second "
            "version; set quantisation to fp8_block"
        )
    for url in evaluation.urls:
        refuse_running(url, where, setting="actors.evaluation.urls")
    if engine.in_process:
        return
    for name, opponent in config.actors.opponents.items():
        if opponent.url is not None and opponent.path is None and opponent.engine == "same":
            refuse_running(opponent.url, where, setting=f"actors.opponents.{name}.url")
    if engine.servers.update == "group":
        raise ConfigError(
            f"{where} with actors.engine.update=group: the learner broadcasts weights that are not quantised "
            "only; set actors.engine.update=disk"
        )
    refuse_quantised(engine.servers)


def _check_sampling(config: "RunConfig") -> None:
    """Refuse sampling that a teacher behind a server, or the engines that roll out, do not tell enough of."""
    sampling = config.sampling
    refuse_other_sampling(
        config.learner.served_teachers, temperature=sampling.temperature, keep_masks=sampling.keep_masks
    )
    if not config.actors.evaluation.only:
        refuse_untold_masks(sampling, config.actors.engine)


def _check_client_temperature(config: "RunConfig") -> None:
    """Refuse agents that may choose their temperature, where a teacher behind a server scores at 1 only."""
    served = config.learner.served_teachers
    for name, environment in config.actors.by_name.items():
        gateway = environment.agents_gateway
        if served and gateway is not None and "temperature" not in gateway.pinned:
            where = f"environment {name!r} of actors.environments" if name else "actors.environment"
            raise ConfigError(
                f"{teacher_settings(next(iter(served)))}.url needs temperature 1, and {where} lets agents "
                f"choose theirs: gateway.pinned={list(gateway.pinned)} lacks temperature; add it, or name "
                "the teacher's directory with path"
            )


def _check_environments(config: "RunConfig") -> None:
    """Refuse environments that are chosen and not there, and those whose answers cannot be so long."""
    environments = config.actors.by_name
    sources = [(f"data.sources {one.name!r}", one.environment, one.reward) for one in config.data.sources]
    sets = [(f"evaluation.sets {one.name!r}", one.environment, one.reward) for one in config.evaluation.sets]
    for where, name, reward in (*sources, *sets):
        chosen = environments.get(name or "")
        if chosen is None:
            there = [one.name for one in config.actors.environments]
            raise ConfigError(
                f"{where}: environment={name!r} is none of actors.environments: "
                f"{nearest(name or '', there)}there are: {', '.join(there) or 'none'}"
            )
        if reward is not None and chosen.has_own_rewards:
            raise ConfigError(
                f"{where}: reward={reward!r} is not for an environment of type={chosen.type}, which has "
                "rewards of its own: leave it out"
            )
    for environment in environments.values():
        limit = config.sampling.max_new_tokens
        if environment.longest_answer > limit:
            raise ConfigError(
                f"actors.environment.lengths: answers of up to {environment.longest_answer} tokens, but "
                f"sampling.max_new_tokens={limit}: raise that, or lower the longest"
            )


def _check_opponents(config: "RunConfig") -> None:
    """Refuse opponents whose weights would be gone, or whose engine would not leave its device."""
    for name, opponent in config.actors.opponents.items():
        pinned, kept = opponent.pinned, config.learner.publication.keep_versions
        if pinned is not None and pinned not in kept:
            raise ConfigError(
                f"actors.opponents.{name}.version={pinned} is gone after a few versions, unless "
                f"learner.publication.keep_versions names it: set that to {sorted({*kept, pinned})}"
            )
        if config.colocation.enabled and opponent.engine == "same":
            raise ConfigError(
                f"colocation.enabled with actors.opponents.{name}: its engine does not leave the device to "
                f"the learner: set actors.opponents.{name}.engine=embedded, or leave out colocation.enabled"
            )


def _check_colocation(config: "RunConfig") -> None:
    """Refuse settings with which learner and engines cannot take turns on a device."""
    if not config.colocation.enabled:
        return
    engine, fleet = config.actors.engine, config.actors.fleet
    servers = engine.servers
    if engine.attached:
        raise ConfigError(
            f"colocation.enabled with actors.engine.{'urls' if servers.urls else 'url'}="
            f"{', '.join(engine.attached)}: only an engine that the actor starts frees its memory for the "
            "learner: leave out one of them, or start that actor with --colocation.no-enabled"
        )
    if servers.update == "group":
        raise ConfigError(
            'colocation.enabled with actors.engine.update="group": an engine takes its device back with '
            "weights that its host holds, which then holds none: set actors.engine.update=disk, or leave out "
            "colocation.enabled"
        )
    if engine.adds_adapters:
        raise ConfigError(
            'colocation.enabled with actors.engine.adapter="loaded": an engine that takes its device back '
            "has lost its adapters: set adapter=merged, or leave out colocation.enabled"
        )
    if servers.disaggregation.enabled:
        raise ConfigError(
            "colocation.enabled with actors.engine.disaggregation.enabled: the two servers of a pair do not "
            "free their devices for the learner: leave out one of them"
        )
    if str(servers.settings.get("enable_memory_saver", True)).lower() == "false":
        raise ConfigError(
            "colocation.enabled needs SGLang's memory saver, and actors.engine.server.enable_memory_saver is "
            "false: leave it out, it is set where it is needed"
        )
    if config.learner.world.nodes > 1:
        raise ConfigError(
            f"colocation.enabled is for a learner on one host, and learner.world.nodes="
            f"{config.learner.world.nodes}: turn one of them off"
        )
    if config.colocation.yield_timeout_s <= fleet.start_timeout_s:
        raise ConfigError(
            f"colocation.yield_timeout_s={config.colocation.yield_timeout_s:g} is not above "
            f"actors.fleet.start_timeout_s={fleet.start_timeout_s:g}: an engine that starts is waited for"
        )


def _check_nodes(config: "RunConfig") -> None:
    """Refuse an engine of several nodes where others would start beside it, or its ranks do not divide."""
    engine, actors = config.actors.engine.servers, config.actors
    if engine.nodes == 1:
        return
    where = f"actors.engine.nodes={engine.nodes}"
    beside = {
        f"actors.fleet.engines={actors.fleet.engines}": actors.fleet.engines > 1,
        "actors.evaluation.servers": actors.evaluation.servers > 0,
        "actors.evaluation.only": actors.evaluation.only,
        "policies": bool(config.policies),
        "colocation.enabled": config.colocation.enabled,
        "actors.opponents of engine=same": any(
            one.engine == "same" and one.url is None for one in actors.opponents.values()
        ),
    }
    if other := [name for name, is_set in beside.items() if is_set]:
        raise ConfigError(f"{where} with {other[0]}: its actors have that one engine alone: leave out one")
    if (copies := replicas(engine.settings)) > 1:
        raise ConfigError(
            f"{where} with actors.engine.server.dp_size={copies}: SGLang has no replicas over several nodes: "
            "run an engine for each, or set actors.engine.server.enable_dp_attention"
        )
    if (ranks := gpus(engine.settings)) % engine.nodes:
        raise ConfigError(
            f"{where} does not divide the {ranks} ranks of actors.engine.server (tp_size times pp_size): set "
            f"tp_size to a multiple of {engine.nodes}"
        )


def _check_broadcasts(config: "RunConfig") -> None:
    """Refuse engines that are to be one group and load by turns: they would be many."""
    fleet = config.actors.fleet
    if config.learner.publication.broadcast_together and fleet.engines > 1 and fleet.updated_at_once < 1:
        raise ConfigError(
            f"learner.publication.broadcast_together=true with actors.fleet.updated_at_once="
            f"{fleet.updated_at_once:g}: engines of a fleet that load by turns are no group; set "
            "actors.fleet.updated_at_once=1, or broadcast_together to false"
        )


def check_evaluations(config: "RunConfig") -> None:
    """Raise `ConfigError` for a set that nobody answers, and for engines that do not leave their device."""
    endpoints = config.actors.evaluation.endpoints
    if both := sorted(endpoints.keys() & config.actors.opponents.keys()):
        raise ConfigError(
            f"actors.evaluation.endpoints.{both[0]}: this name is that of an opponent: choose another one"
        )
    fixed = [name for name, opponent in config.actors.opponents.items() if opponent.path is not None]
    fixed += endpoints
    for one in config.evaluation.sets:
        if one.answered_by is not None and one.answered_by not in fixed:
            raise ConfigError(
                f"evaluation.sets {one.name!r}: answered_by={one.answered_by!r} is none of actors.opponents "
                f"with a path and none of actors.evaluation.endpoints ({', '.join(fixed) or 'none'}): define "
                f"it, as actors.opponents.{one.answered_by}.path=DIRECTORY or as "
                f"actors.evaluation.endpoints.{one.answered_by}.url=URL with its model"
            )
    pair = config.actors.engine.servers.disaggregation
    if config.actors.evaluation.servers and pair.prefill_url is not None:
        raise ConfigError(
            "actors.evaluation.servers with actors.engine.disaggregation.prefill_url: the servers beside a "
            "pair that runs already would be halves of it: name servers as actors.evaluation.urls"
        )
    for name in ("only", "servers"):
        if config.colocation.enabled and getattr(config.actors.evaluation, name):
            raise ConfigError(
                f"colocation.enabled with actors.evaluation.{name}: its engines do not leave the device to "
                "the learner: leave out one of them, or start that actor with --colocation.no-enabled"
            )


def refuse_nobody_rolls_out(config: "RunConfig") -> None:
    """Raise `ConfigError` where the run's own settings are those of an actor that only evaluates."""
    if config.actors.evaluation.only:
        raise ConfigError(
            "actors.evaluation.only=true in the settings of a run: no actor would roll out; give it to the "
            "`launch actors` that is to evaluate"
        )
