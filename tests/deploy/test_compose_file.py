"""deploy/compose, against the options, ports and metrics of the server."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from deployed import DEPLOY, IMAGES, Image, assert_forgets_instead_of_growing, num_bytes, read_yaml

from kvboost.server.options import read_options
from kvboost.server.serve import GRACE_S
from kvboost.tiers.redis import RedisTier
from servers import find_program

HERE = DEPLOY / "compose"
FILE: dict[str, Any] = read_yaml(HERE / "compose.yaml")
SERVICES: dict[str, dict[str, Any]] = FILE["services"]
REPLICAS = [name for name, service in SERVICES.items() if service["image"] == "kvboost:cpu"]
DEFAULT = re.compile(r"\$\{\w+:-([^}]*)\}")
IMAGE = Image(IMAGES[0])


def seconds(written: str) -> float:
    return float(written.removesuffix("s"))


def filled(written: str) -> str:
    """With the defaults of variables that nobody has set."""
    return DEFAULT.sub(r"\1", written)


def environment(service: dict[str, Any]) -> dict[str, str]:
    given = {name: filled(value) for name, value in service["environment"].items()}
    return IMAGE.environment | given


@pytest.mark.parametrize("name", SERVICES)
def test_what_a_service_names_is_there(name: str) -> None:
    service = SERVICES[name]
    assert {*service.get("depends_on", {})} <= {*SERVICES}
    assert {*service.get("networks", {})} <= {*FILE["networks"]}
    assert {*service.get("secrets", [])} <= {*FILE["secrets"]}
    for mount in service.get("volumes", []):
        source = filled(mount).split(":")[0]
        if not source.startswith("."):
            assert source in FILE["volumes"]
        elif source != "./models":  # yours
            assert (HERE / source).exists(), source
    if "build" in service:
        context = HERE / service["build"]["context"]
        assert (context / service["build"]["dockerfile"]).samefile(IMAGES[0])


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_bounded_and_only_this_machine_reaches_it(name: str) -> None:
    service = SERVICES[name]
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    assert num_bytes(service["mem_limit"]) and service["restart"] == "unless-stopped"
    assert service["read_only"] and service["cap_drop"] == ["ALL"]
    assert "healthcheck" in service or (name in REPLICAS and IMAGE.health_command)
    assert re.search(r":v?\d+\.\d+|^kvboost:cpu$", service["image"])


def test_the_secrets_are_not_for_git() -> None:
    ignored = (HERE / ".gitignore").read_text().splitlines()
    assert "secrets/" in ignored
    assert all(each["file"].startswith("./secrets/") for each in FILE["secrets"].values())


@pytest.mark.parametrize("name", REPLICAS)
def test_the_server_takes_its_options(name: str) -> None:
    service = SERVICES[name]
    options, engine_options = read_options({}, environment(service))
    assert options.api_keys == f"/run/secrets/{service['secrets'][0]}"
    (port,) = service["ports"]
    assert int(port.split(":")[-1]) == options.port
    # Time to drain, to cut off what is left and to close the tiers.
    assert seconds(service["stop_grace_period"]) > options.drain_s + 2 * GRACE_S
    assert service["init"] is True
    stored_and_running = 2 * engine_options.max_cache_bytes
    assert num_bytes(service["mem_limit"]) >= 1.5 * stored_and_running


def test_a_second_replica_runs_only_if_asked_for() -> None:
    assert [SERVICES[name].get("profiles") for name in REPLICAS] == [None, ["two"]]
    ports = [SERVICES[name]["ports"] for name in REPLICAS]
    assert ports[0] != ports[1]


def test_only_replicas_reach_the_tier() -> None:
    _, engine_options = read_options({}, environment(SERVICES["kvboost"]))
    assert engine_options.cache_url is not None
    RedisTier(engine_options.cache_url)  # its options are known
    assert re.match(r"redis://valkey:6379/", engine_options.cache_url)
    valkey = SERVICES["valkey"]
    assert "ports" not in valkey and valkey["networks"] == ["cache"]
    assert FILE["networks"]["cache"]["internal"]
    members = {name for name, each in SERVICES.items() if "cache" in each.get("networks", {})}
    assert members == {*REPLICAS, "valkey"}


def test_the_tier_forgets_instead_of_growing() -> None:
    valkey = SERVICES["valkey"]
    assert_forgets_instead_of_growing(valkey["command"], valkey["mem_limit"])


def test_prometheus_finds_all_replicas_and_has_a_key() -> None:
    (job,) = read_yaml(HERE / "prometheus.yml")["scrape_configs"]
    (secret,) = SERVICES["prometheus"]["secrets"]
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    (found,) = job["dns_sd_configs"]
    assert found["port"] == int(IMAGE.environment["KVBOOST_PORT"])
    for name in REPLICAS:
        assert found["names"] == SERVICES[name]["networks"]["default"]["aliases"]


def test_promtool_accepts_the_configuration(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch()
    config = tmp_path / "prometheus.yml"
    text = (HERE / "prometheus.yml").read_text()
    config.write_text(re.sub(r"/run/secrets/\w+", str(key), text))
    run = subprocess.run(
        [find_program("promtool"), "check", "config", config], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_grafana_has_the_dashboard_and_its_source() -> None:
    grafana = SERVICES["grafana"]
    mounts = dict(mount.split(":")[:2] for mount in grafana["volumes"])
    (provider,) = read_yaml(HERE / "grafana/dashboards/kvboost.yml")["providers"]
    folder = provider["options"]["path"]
    assert mounts["../../docs/grafana"] == folder
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home.startswith(f"{folder}/")
    assert (HERE / "../../docs/grafana" / home.removeprefix(f"{folder}/")).exists()
    assert mounts["./grafana"] == "/etc/grafana/provisioning"
    (source,) = read_yaml(HERE / "grafana/datasources/prometheus.yml")["datasources"]
    name, port = source["url"].removeprefix("http://").split(":")
    assert SERVICES[name]["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert source["type"] == "prometheus" and source["isDefault"]
