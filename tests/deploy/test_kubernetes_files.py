"""deploy/kubernetes and deploy/ray, against Kubernetes' schemas and the server's own code."""

from __future__ import annotations

import base64
import copy
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployed import (
    DEPLOY,
    FOREIGN_KINDS,
    IMAGES,
    KUSTOMIZED,
    ROOT,
    Image,
    assert_forgets_instead_of_growing,
    manifest,
    manifests,
    num_bytes,
    option_after,
    pods,
    read_yaml,
    variables,
)

from kvboost.config import Options
from kvboost.server.gate import OPEN_PATHS
from kvboost.server.keys import read_keys
from kvboost.server.metrics import METRICS
from kvboost.server.options import read_options
from kvboost.server.serve import GRACE_S
from kvboost.tiers.redis import RedisTier
from servers import find_program

HERE = DEPLOY / "kubernetes"
KUBERNETES = "1.30"  # the oldest that we mean
SOURCES = manifests(DEPLOY)
PODS = list(pods(SOURCES))
SERVER = manifest("Deployment", "kvboost")["spec"]["template"]
CONTAINER = SERVER["spec"]["containers"][0]
VALKEY = manifest("Deployment", "valkey")["spec"]["template"]["spec"]["containers"][0]
PORT = int(Image(IMAGES[0]).environment["KVBOOST_PORT"])
SCALER = manifest("ScaledObject", "kvboost")
(TRIGGER,) = SCALER["spec"]["triggers"]


def check_schema(thing: dict[str, Any]) -> None:
    if "CI" not in os.environ:
        pytest.importorskip("kubernetes_validate")
    import kubernetes_validate  # noqa: PLC0415

    kubernetes_validate.validate(thing, KUBERNETES, strict=True)


def rendered(folder: Path) -> list[dict[str, Any]]:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl on this machine")
    run = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return list(yaml.safe_load_all(run.stdout))


def secrets_in(thing: Any) -> Iterator[str]:
    """Names of the secrets that objects use."""
    if isinstance(thing, list):
        for each in thing:
            yield from secrets_in(each)
    elif isinstance(thing, dict):
        for name, value in thing.items():
            if name == "secretName":
                yield value
            elif name == "secretKeyRef":
                yield value["name"]
            else:
                yield from secrets_in(value)


def deployment(objects: list[dict[str, Any]]) -> Any:
    (found,) = (
        each
        for each in objects
        if each["kind"] == "Deployment" and each["metadata"]["name"] == "kvboost"
    )
    return found


def test_what_is_written_is_what_kubernetes_knows() -> None:
    known = [each for each in SOURCES if each["kind"] not in FOREIGN_KINDS]
    assert len(known) >= 9
    for each in known:
        check_schema(each)


@pytest.mark.parametrize("name", sorted({name for name, _ in PODS}))
def test_a_pod_is_what_kubernetes_knows(name: str) -> None:
    for _, template in (each for each in PODS if each[0] == name):
        pod = {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(template)}
        pod["metadata"]["name"] = "some"
        check_schema(pod)


@pytest.mark.parametrize("folder", KUSTOMIZED, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_a_folder_renders(folder: Path) -> None:
    objects = rendered(folder)
    for each in objects:
        if each["kind"] not in FOREIGN_KINDS:
            check_schema(each)
        assert each["metadata"].get("namespace") == "kvboost" or each["kind"] == "Namespace"
    made = {each["metadata"]["name"] for each in objects if each["kind"] == "Secret"}
    assert len(made) == 2 and {*secrets_in(objects)} <= made


def test_the_folder_of_the_docs_replaces_the_secrets(tmp_path: Path) -> None:
    page = (ROOT / "docs/guides/deploy.md").read_text()
    (text,) = re.findall(r"```yaml\n# my-kvboost/kustomization.yaml\n(.+?)```", page, re.DOTALL)
    there = os.path.relpath(HERE, tmp_path)
    (tmp_path / "kustomization.yaml").write_text(text.replace("../deploy/kubernetes", there))
    (tmp_path / "keys.toml").write_text("mine")
    (tmp_path / "kvboost.toml").write_text("mine")
    objects = rendered(tmp_path)
    secrets = {
        each["metadata"]["name"]: each["data"] for each in objects if each["kind"] == "Secret"
    }
    assert {*secrets} == {*secrets_in(objects)}
    values = {base64.b64decode(one) for data in secrets.values() for one in data.values()}
    assert values == {b"mine", b"..."}
    (container,) = deployment(objects)["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry.example.com/kvboost:cpu"


def test_the_cuda_overlay_asks_for_a_gpu_and_its_image() -> None:
    (container,) = deployment(rendered(HERE / "overlays/cuda"))["spec"]["template"]["spec"][
        "containers"
    ]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert container["image"] == "kvboost:cuda"
    (base,) = deployment(rendered(HERE / "base"))["spec"]["template"]["spec"]["containers"]
    assert base["image"] == "kvboost:cpu"


@pytest.mark.parametrize("by", ["cpu", "queue"])
def test_a_scaler_alone_says_how_many(by: str) -> None:
    objects = rendered(HERE / "overlays/autoscale" / by)
    assert "replicas" not in deployment(objects)["spec"]
    scalers = [
        each for each in objects if each["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")
    ]
    assert [each["spec"]["scaleTargetRef"]["name"] for each in scalers] == ["kvboost"]


def test_the_queue_is_measured_by_metrics_that_exist() -> None:
    query = TRIGGER["metadata"]["query"]
    gauges = {metric.name for metric in METRICS if metric.kind == "gauge"}
    used = re.findall(r"kvboost_\w+", query)
    assert {*used} == {"kvboost_waiting_requests", "kvboost_running_requests"} <= gauges
    # The scrape job gives the label that the query asks for.
    (job,) = read_yaml(HERE / "prometheus.yml")["scrape_configs"]
    given = {rule.get("target_label") for rule in job["relabel_configs"]}
    assert {*re.findall(r"(\w+)=", query)} <= given
    assert float(TRIGGER["metadata"]["threshold"]) <= Options().max_batch_size


def test_promtool_accepts_the_query_and_the_scrape_job(tmp_path: Path) -> None:
    promtool = find_program("promtool")
    rule = {"record": "a", "expr": TRIGGER["metadata"]["query"]}
    rules = tmp_path / "rules.yml"
    rules.write_text(yaml.safe_dump({"groups": [{"name": "a", "rules": [rule]}]}))
    config = read_yaml(HERE / "prometheus.yml")
    for job in config["scrape_configs"]:
        del job["kubernetes_sd_configs"]  # some distributions build it without
    jobs = tmp_path / "prometheus.yml"
    jobs.write_text(yaml.safe_dump(config))
    for command in (["check", "rules", rules], ["check", "config", "--syntax-only", jobs]):
        run = subprocess.run([promtool, *command], capture_output=True, text=True)
        assert run.returncode == 0, run.stdout + run.stderr


def test_the_server_takes_its_options() -> None:
    given = Image(IMAGES[0]).environment | variables(CONTAINER)
    mounts = {each["mountPath"]: each for each in CONTAINER["volumeMounts"]}
    assert mounts[given["KVBOOST_CONFIG"]]["subPath"] == "kvboost.toml"
    given["KVBOOST_CONFIG"] = str(HERE / "base/kvboost.toml")
    options, engine_options = read_options({}, given)
    assert options.port == PORT and not options.is_local
    assert options.api_keys is not None and str(Path(options.api_keys).parent) in mounts
    assert engine_options.cache_url is not None
    RedisTier(engine_options.cache_url.replace("$(VALKEY_PASSWORD)", "secret"))
    stops_after_s = options.drain_s + 2 * GRACE_S
    stops_after_s += int(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert SERVER["spec"]["terminationGracePeriodSeconds"] > stops_after_s
    limits = CONTAINER["resources"]["limits"]
    assert num_bytes(limits["memory"]) >= 1.5 * 2 * engine_options.max_cache_bytes
    assert limits["cpu"].isdecimal()  # as many threads


def test_nobody_has_a_key_of_the_example() -> None:
    (key,) = read_keys(str(HERE / "shared/keys.example.toml"))
    assert set(key["sha256"]) == {"0"} and not key.get("admin", False)


@pytest.mark.parametrize(
    ("probe", "path"),
    [("startupProbe", "/ready"), ("readinessProbe", "/ready"), ("livenessProbe", "/health")],
)
def test_a_probe_asks_a_path_that_needs_no_key(probe: str, path: str) -> None:
    asked = CONTAINER[probe]["httpGet"]
    assert asked == {"path": path, "port": "http"} and path in OPEN_PATHS


def test_ports_agree() -> None:
    assert CONTAINER["ports"] == [{"name": "http", "containerPort": PORT}]
    annotations = SERVER["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(PORT)
    (service,) = manifest("Service", "kvboost")["spec"]["ports"]
    assert service["targetPort"] == "http"
    door, tier = (manifest("NetworkPolicy", name)["spec"] for name in ("kvboost", "valkey"))
    assert door["ingress"][0]["ports"] == [{"port": PORT}]
    url = variables(CONTAINER)["KVBOOST_CACHE_URL"]
    (valkey,) = manifest("Service", "valkey")["spec"]["ports"]
    assert f"@valkey:{valkey['port']}/" in url
    shown = VALKEY["ports"][0]["containerPort"]
    assert tier["ingress"][0]["ports"] == door["egress"][0]["ports"] == [{"port": shown}]


def test_only_the_engines_reach_the_tier() -> None:
    policy = manifest("NetworkPolicy", "valkey")["spec"]
    (rule,) = policy["ingress"]
    (who,) = rule["from"]
    assert {*policy["policyTypes"]} == {"Ingress", "Egress"} and policy["egress"] == []
    allowed = who["podSelector"]["matchLabels"].items()
    for name, template in PODS:
        is_client = allowed <= template["metadata"]["labels"].items()
        assert is_client == (name != "Deployment valkey"), name
    assert option_after(VALKEY["args"], "--requirepass") == "$(VALKEY_PASSWORD)"


@pytest.mark.parametrize("kind", ["Service", "PodDisruptionBudget", "NetworkPolicy"])
def test_selectors_find_pods(kind: str) -> None:
    labels = [template["metadata"]["labels"].items() for _, template in PODS]
    for each in (each for each in SOURCES if each["kind"] == kind):
        spec = each["spec"]
        selector = spec.get("podSelector") or spec["selector"]
        wanted = selector.get("matchLabels", selector).items()
        assert any(wanted <= found for found in labels), each["metadata"]["name"]


def test_the_tier_forgets_instead_of_growing() -> None:
    limits = VALKEY["resources"]["limits"]
    assert_forgets_instead_of_growing(VALKEY["args"], limits["memory"])


@pytest.mark.parametrize(("name", "template"), PODS, ids=[name for name, _ in PODS])
def test_pods_are_restricted(name: str, template: dict[str, Any]) -> None:
    spec = template["spec"]
    # A Service named kvboost sets KVBOOST_PORT=tcp://... in every pod beside it that has links.
    assert spec["enableServiceLinks"] is False
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in spec["containers"]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in container["resources"]["limits"]


def test_the_container_that_kuberay_adds_is_restricted() -> None:
    (namespace,) = (each for each in SOURCES if each["kind"] == "Namespace")
    labels = namespace["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    cluster = manifest("RayService", "kvboost-fleet", DEPLOY / "ray")["spec"]["rayClusterConfig"]
    assert cluster["enableInTreeAutoscaling"]
    assert cluster["autoscalerOptions"]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def test_only_the_fleet_and_its_operator_reach_rays_ports() -> None:
    policy = manifest("NetworkPolicy", "kvboost-fleet", DEPLOY / "ray")["spec"]
    assert {*policy["policyTypes"]} == {"Ingress", "Egress"}
    fleet = {"podSelector": policy["podSelector"]}
    wanted = policy["podSelector"]["matchLabels"].items()
    for name, template in PODS:
        is_chosen = wanted <= template["metadata"]["labels"].items()
        assert is_chosen == name.startswith("RayService"), name
    within, clients, operator = policy["ingress"]
    assert within == {"from": [fleet]}
    base = manifest("NetworkPolicy", "kvboost")["spec"]
    assert clients == base["ingress"][0]
    (who,) = operator["from"]
    assert who["namespaceSelector"]["matchLabels"] and who["podSelector"]["matchLabels"]
    assert operator["ports"] == [{"port": 8265}, {"port": PORT}]
    assert policy["egress"][0] == {"to": [fleet]}
    assert policy["egress"][1:3] == base["egress"][:2]
    assert policy["egress"][3:] == [{"ports": [*base["egress"][2]["ports"], {"port": 6443}]}]
