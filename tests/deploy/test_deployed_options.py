"""Names of options in all files of deploy/, and what Ray Serve is told."""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployed import DEPLOY, ROOT, manifest, pods, read_yaml, variables

from kvboost.config import Options
from kvboost.server.options import ServerOptions

OPTIONS = {each.name for kind in (ServerOptions, Options) for each in fields(kind)}
VARIABLES = {f"KVBOOST_{name.upper()}" for name in OPTIONS} | {"KVBOOST_CONFIG"}
PAGE = ROOT / "docs/guides/deploy.md"
FILES = [PAGE, *sorted(path for path in DEPLOY.rglob("*") if path.is_file())]
FLEET = manifest("RayService", "kvboost-fleet", DEPLOY / "ray")
CONFIGS = {
    "serve.yaml": read_yaml(DEPLOY / "ray/serve.yaml"),
    "rayservice.yaml": yaml.safe_load(FLEET["spec"]["serveConfigV2"]),
}


@pytest.fixture(scope="module")
def read_arguments() -> Any:
    if "CI" not in os.environ:
        pytest.importorskip("ray.serve")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray has its own
        from kvboost.fleet.app import read_arguments  # noqa: PLC0415
    return read_arguments


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_variable_is_an_option(path: Path) -> None:
    text = path.read_text()
    assert {*re.findall(r"\bKVBOOST_[A-Z_]+\b", text)} <= VARIABLES
    assert not re.search(r"pip install '?kvboost", text)  # on PyPI that is another project


@pytest.mark.parametrize("name", CONFIGS)
def test_ray_serve_takes_the_file(name: str, read_arguments: Any) -> None:
    from ray.serve.schema import ServeDeploySchema  # noqa: PLC0415

    config = ServeDeploySchema(**CONFIGS[name])
    (application,) = config.applications
    assert application.import_path == "kvboost.fleet.app:app"


@pytest.mark.parametrize("name", CONFIGS)
def test_the_fleet_takes_its_arguments(
    name: str, read_arguments: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    arguments = CONFIGS[name]["applications"][0]["args"]
    fleet, options, _ = read_arguments(arguments)
    assert fleet.scale[1] >= 2
    # Without keys only this machine is served.
    is_local = CONFIGS[name]["http_options"]["host"] == "127.0.0.1"
    assert is_local or options.api_keys


def test_the_pods_of_ray_fit_the_application(read_arguments: Any) -> None:
    arguments = CONFIGS["rayservice.yaml"]["applications"][0]["args"]
    fleet, options, _ = read_arguments(arguments)
    cluster = FLEET["spec"]["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    assert (workers["minReplicas"], workers["maxReplicas"]) == fleet.scale
    port = CONFIGS["rayservice.yaml"]["http_options"]["port"]
    for _, template in pods([FLEET]):
        (container,) = template["spec"]["containers"]
        assert {"name": "serve", "containerPort": port} in container["ports"]
        assert {*variables(container)} - VARIABLES == {"OMP_WAIT_POLICY"}
        assert str(Path(options.api_keys).parent) in {
            each["mountPath"] for each in container["volumeMounts"]
        }
        assert float(container["resources"]["limits"]["cpu"]) >= fleet.num_cpus
        assert template["spec"]["terminationGracePeriodSeconds"] > options.drain_s + 30
    base = (DEPLOY / "ray/Dockerfile").read_text()
    assert f"rayproject/ray:{cluster['rayVersion']}-" in base
