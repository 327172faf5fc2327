"""The examples of docs/deploy are what their programs take: images, manifests, units."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from configparser import ConfigParser
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from tomllib import loads

import pytest
import yaml

from launch.cli import main as cli
from launch.local.local import LEARNER_DRAIN_S
from launch.process.runtime import FINAL, TEMPORARY
from launch.settings.run_config import resolve

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "docs" / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
MANIFESTS = [one for one in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()) if one]
KUBERNETES = "1.31"
"""Oldest version whose schemas the manifests must fit."""


def refused(words: list[str]) -> str:
    """Why the command line would not take these arguments; empty if it would."""
    try:
        cli.app.parse_args(
            [word.replace("$(NODE)", "0") for word in words], exit_on_error=False, print_error=False
        )
    except cli.CycloptsError as error:
        return str(error)
    return ""


def test_a_wrong_flag_would_be_noticed():
    assert "--shard" in refused(["bus", "--shard", "3"])


# --- Docker ---


def test_the_dockerfile_has_no_remark_of_its_linter():
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    found = subprocess.run([str(hadolint), DEPLOY / "Dockerfile"], capture_output=True, text=True)
    assert (found.stdout, found.returncode) == ("", 0)


def test_the_images_install_what_the_package_has():
    text = (DEPLOY / "Dockerfile").read_text()
    project = loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"\*\.whl\)\[([\w,-]+)\]", text):
        assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert project["optional-dependencies"]["sglang"] == re.findall(r'"(sglang[^"]+)"', text)
    assert f"TORCH={re.search('TORCH [?]= (.*)', (ROOT / 'Makefile').read_text())[1]}" in text
    assert set(re.findall(r'ENTRYPOINT \["(\w+)"\]', text)) == set(project["scripts"])
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE)
    assert [name for names in copied for name in names.split() if not (ROOT / name).exists()] == []


# --- Kubernetes ---


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda one: f"{one['kind']}-{one['metadata']['name']}")
def test_manifests_fit_their_schemas(manifest: dict):
    import kubernetes_validate  # takes a fifth of a second to import

    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


# --- Helm ---

CHART = DEPLOY / "helm"
"""Rendered by Helm's own library."""


def rendered(**values: object) -> list[dict]:
    """Return the objects that the chart makes of these values."""
    helm = pytest.importorskip("helm_python", reason="no Helm: see [dev]")
    files = helm.Chart.load(CHART).render(values, name="mine", namespace="sluice")
    return [one for text in files.values() for one in yaml.safe_load_all(text) if one]


def by_name(objects: list[dict]) -> dict[tuple[str, str], dict]:
    return {(one["kind"], one["metadata"]["name"]): one for one in objects}


def test_the_chart_makes_by_default_what_the_manifests_have():
    ours, theirs = by_name(rendered()), by_name(deepcopy(MANIFESTS))
    settings = [one["ConfigMap", "sluice-run"].pop("data")["run.toml"] for one in (ours, theirs)]
    assert loads(settings[0]) == loads(settings[1])
    assert ours == theirs


def test_values_reach_the_objects_which_still_fit_their_schemas():
    import kubernetes_validate

    values = {
        "name": "second",
        "run": "other",
        "images": {"cpu": "hub/sluice:1", "cuda": "hub/sluice:2"},
        "models": "shelf",
        "learner": {"nodes": 3, "gpus": 2, "disk": "7Gi"},
        "actors": {"replicas": 9},
        "settings": 'data = { prompts = "p.jsonl" }',
    }
    objects = rendered(**values)
    for one in objects:
        kubernetes_validate.validate(one, KUBERNETES, strict=True)
    found = by_name(objects)
    assert {name.split("-")[0] for _, name in found} == {"second"}
    assert loads(found["ConfigMap", "second-run"]["data"]["run.toml"]) == {
        "run": "other",
        "data": {"prompts": "p.jsonl"},
    }
    assert found["Deployment", "second-actors"]["spec"]["replicas"] == 9
    claim = found["PersistentVolumeClaim", "second-learner"]["spec"]
    assert claim == {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "7Gi"}}}
    learner = found["Job", "second-learner"]["spec"]
    assert (learner["completions"], learner["parallelism"]) == (3, 3)
    [container] = learner["template"]["spec"]["containers"]
    assert container["image"] == "hub/sluice:2"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert refused(container["args"]) == ""
    assert container["args"][1:5] == ["--bus", "nats://second-bus:4222", "--run", "other"]
    assert "shelf" in str(learner)


def test_each_pod_of_the_learner_finds_the_first_by_the_name_that_its_service_gives():
    found = by_name(rendered(learner={"nodes": 2}))
    service, job = found["Service", "sluice-learner"], found["Job", "sluice-learner"]["spec"]
    pod = job["template"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    [container] = pod["spec"]["containers"]
    flags = dict(pairwise(container["args"]))
    assert flags["--master"] == f"sluice-learner-0.sluice-learner:{service['spec']['ports'][0]['port']}"
    assert (flags["--nodes"], flags["--node-rank"]) == ("2", "$(NODE)")
    assert [one["name"] for one in container["env"]] == ["NODE"]


def test_the_learners_job_goes_on_and_ends_as_exit_statuses_say():
    job = by_name(MANIFESTS)["Job", "sluice-learner"]["spec"]
    by_status = {
        status: rule["action"]
        for rule in job["podFailurePolicy"]["rules"]
        for status in rule.get("onExitCodes", {}).get("values", ())
    }
    assert by_status == {**dict.fromkeys(FINAL, "FailJob"), TEMPORARY: "Ignore"}
    [container] = job["template"]["spec"]["containers"]
    assert dict(pairwise(container["args"]))["--stopped-status"] == str(TEMPORARY)


def test_actors_are_as_many_as_the_learner_needs_where_more_are_allowed():
    import kubernetes_validate

    found = by_name(rendered(actors={"replicas": 2, "maxReplicas": 16, "waitingShare": "80m"}))
    scaler = found["HorizontalPodAutoscaler", "sluice-actors"]
    kubernetes_validate.validate(scaler, KUBERNETES, strict=True)
    deployment = found["Deployment", "sluice-actors"]
    assert "replicas" not in deployment["spec"]  # an upgrade of the chart would set it again
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert (scaler["spec"]["minReplicas"], scaler["spec"]["maxReplicas"]) == (2, 16)
    [metric] = scaler["spec"]["metrics"]
    assert metric["external"]["target"] == {"type": "Value", "value": "80m"}


def test_each_pod_of_an_engine_of_several_nodes_knows_its_number_and_the_first_by_name():
    import kubernetes_validate

    objects = rendered(actors={"replicas": 2, "maxReplicas": 2, "nodes": 3})
    for one in objects:
        kubernetes_validate.validate(one, KUBERNETES, strict=True)
    found = by_name(objects)
    service = found["Service", "sluice-actors"]["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    engines = [found["StatefulSet", f"sluice-actors-{number}"] for number in range(2)]
    assert ("Deployment", "sluice-actors") not in found
    labels = [engine["spec"]["template"]["metadata"]["labels"] for engine in engines]
    assert labels[0] != labels[1], "each takes its own pods only"
    for engine, own in zip(engines, labels, strict=True):
        spec, name = engine["spec"], engine["metadata"]["name"]
        assert (spec["replicas"], spec["podManagementPolicy"], spec["serviceName"]) == (
            3, "Parallel", "sluice-actors",
        )  # fmt: skip
        assert spec["selector"]["matchLabels"] == own
        assert service["selector"].items() <= own.items()
        [container] = spec["template"]["spec"]["containers"]
        assert refused(container["args"]) == ""
        flags = dict(pairwise(container["args"]))
        assert flags["--actors.engine.node-rank"] == "$(NODE)"
        head = f"{name}-0.sluice-actors:{service['ports'][0]['port']}"
        assert flags["--actors.engine.rendezvous"] == head
        assert "apps.kubernetes.io/pod-index" in str(container["env"])


def test_engines_of_several_nodes_are_not_scaled_by_the_cluster():
    helm = pytest.importorskip("helm_python", reason="no Helm: see [dev]")
    with pytest.raises(helm.HelmError, match="adds no engines of several nodes"):
        rendered(actors={"replicas": 1, "maxReplicas": 2, "nodes": 2})


def test_helm_finds_nothing_wrong_and_refuses_values_that_there_are_not():
    helm = pytest.importorskip("helm_python", reason="no Helm: see [dev]")
    report = helm.lint(str(CHART), strict=True)
    assert [one for one in report["messages"] if one["severity"] > 1] == []
    chart = helm.Chart.load(CHART)
    chart.validate_schema(chart.values)
    for wrong in (
        {"replicas": 3},
        {"learner": {"gpus": "eight"}},
        {"learner": {"nodes": 0}},
        {"run": "two words"},
    ):
        with pytest.raises(helm.HelmError):
            chart.validate_schema(chart.merge_values(wrong))


def test_the_pods_run_commands_that_there_are():
    pods = [one["spec"]["template"] for one in MANIFESTS if "template" in one.get("spec", {})]
    assert [pod["metadata"]["labels"]["part"] for pod in pods] == ["bus", "storage", "learner", "actors"]
    for pod in pods:
        [container] = pod["spec"]["containers"]
        assert pod["spec"]["enableServiceLinks"] is False  # they set SLUICE_BUS_PORT to an address
        assert refused(container["args"]) == ""
        port = int(container["args"][container["args"].index("--monitoring.port") + 1])
        probes = [container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")]
        assert probes == [{"path": path, "port": port} for path in ("/healthz", "/healthz", "/readyz")]
        volumes = {volume["name"] for volume in pod["spec"].get("volumes", ())} | {"runs"}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


def test_the_run_of_the_manifests_is_one():
    [text] = [one["data"]["run.toml"] for one in MANIFESTS if one["kind"] == "ConfigMap"]
    assert resolve(loads(text)).run == "mine"


# --- systemd ---


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_units_run_commands_that_there_are_and_restart_as_exit_statuses_say(unit: Path):
    parsed = ConfigParser()
    parsed.optionxform = str
    parsed.read(unit)
    service = parsed["Service"]
    program, *words = shlex.split(service["ExecStart"])
    assert Path(program).name == "launch"
    assert unit.stem == f"sluice-{words[0]}"
    assert refused(words) == ""
    assert service["Restart"] == "on-failure"
    assert sorted(map(int, service["RestartPreventExitStatus"].split())) == sorted(FINAL)
    if words[0] == "learner":
        assert float(service["TimeoutStopSec"]) > LEARNER_DRAIN_S
    if shutil.which("systemd-analyze"):
        said = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True).stderr
        assert [line for line in said.splitlines() if "is not executable" not in line] == []
