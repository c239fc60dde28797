"""What the files under deploy/ say, for the tests that hold them against the code."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
IMAGES = (DEPLOY / "docker/Dockerfile", DEPLOY / "docker/Dockerfile.cuda")
DOCKERFILES = (*IMAGES, DEPLOY / "ray/Dockerfile")
KUSTOMIZED = sorted(path.parent for path in DEPLOY.rglob("kustomization.yaml"))
FOREIGN_KINDS = ("RayService", "ScaledObject")  # of other projects: Kubernetes has no schema
SIZE = re.compile(r"(\d+)([kmg]?)i?b?", re.IGNORECASE)


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def manifests(folder: Path) -> list[dict[str, Any]]:
    """All objects in the files below a folder, as written."""
    found = []
    for path in sorted(folder.rglob("*.yaml")):
        found += [each for each in yaml.safe_load_all(path.read_text()) if "metadata" in each]
    return found


def manifest(kind: str, name: str, folder: Path = DEPLOY / "kubernetes") -> dict[str, Any]:
    (found,) = (
        each
        for each in manifests(folder)
        if each["kind"] == kind and each["metadata"]["name"] == name
    )
    return found


def pods(objects: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Templates of pods, with a name for messages."""
    for each in objects:
        name = f"{each['kind']} {each['metadata']['name']}"
        if each["kind"] == "Deployment":
            yield name, each["spec"]["template"]
        elif each["kind"] == "RayService":
            cluster = each["spec"]["rayClusterConfig"]
            for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
                yield name, group["template"]


def variables(container: dict[str, Any]) -> dict[str, str]:
    """What a container's environment says outright."""
    return {each["name"]: each["value"] for each in container["env"] if "value" in each}


class Image:
    """The last stage of a Dockerfile."""

    def __init__(self, path: Path) -> None:
        text = path.read_text()
        joined = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
        self.lines = [line for line in joined.splitlines() if line]
        start = max(i for i, line in enumerate(self.lines) if line.startswith("FROM "))
        self.bases = [line.split()[1] for line in self.lines if line.startswith("FROM ")]
        self._last = self.lines[start:]
        self.copied = [
            name
            for line in self.lines
            if line.startswith("COPY ") and "--from" not in line
            for name in line.split()[1:-1]
            if not name.startswith("--")
        ]

    def said(self, instruction: str) -> list[str]:
        begin = f"{instruction} "
        return [line[len(begin) :] for line in self._last if line.startswith(begin)]

    @property
    def environment(self) -> dict[str, str]:
        return dict(pair.split("=", 1) for line in self.said("ENV") for pair in line.split())

    @property
    def health_command(self) -> list[str]:
        (line,) = self.said("HEALTHCHECK")
        command: list[str] = json.loads(line.partition("CMD ")[2])
        return command


def num_bytes(written: str) -> int:
    """A size as Docker, Kubernetes or Valkey write it; powers of 1024 in all of them."""
    match = SIZE.fullmatch(written)
    assert match, written
    return int(match[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[match[2].lower()]


def option_after(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def assert_forgets_instead_of_growing(words: list[str], limit: str) -> None:
    """Of the command line of a Valkey, which may take so much memory."""
    assert option_after(words, "--maxmemory-policy").startswith("allkeys-")
    assert option_after(words, "--save") == "" and option_after(words, "--appendonly") == "no"
    assert num_bytes(option_after(words, "--maxmemory")) < 0.85 * num_bytes(limit)
