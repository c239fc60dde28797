"""Files kept for a model's next start: its certification and the digests of its weights.

docs/adr/0036-kept-certification.md has the rule. A file that cannot be trusted is a miss.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from kvboost.core import KVGeometry, Rotation

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

PACKAGE = Path(__file__).parents[1]
SOURCES = ("core.py", "rope.py", "models/*.py", "weights/*.py")  # what certification runs
KNOWN = {"kvboost", "torch", "transformers"}  # packages whose versions are part of a key
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

Planes = Mapping[int, Rotation | None]


class KeptFile:
    """A JSON file with a checksum, in a folder that only the user can write."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name

    def read(self) -> dict[str, Any] | None:
        """What was kept, if nobody else can have written it."""
        try:
            if not _is_ours(os.lstat(self._folder)):
                return None
            with open(self._folder / self._name, "rb", opener=_no_links) as file:
                if not _is_ours(os.fstat(file.fileno())):
                    return None
                checksum, text = file.read().split(b"\n", 1)
            found = json.loads(text) if checksum.decode() == self._checksum(text) else None
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def write(self, found: Mapping[str, Any]) -> None:
        """Write it; an unwritable folder is not an error."""
        text = json.dumps(found).encode()
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._folder) as inside:
                with tempfile.NamedTemporaryFile(dir=inside, delete=False) as file:
                    file.write(self._checksum(text).encode() + b"\n" + text)
                Path(file.name).replace(self._folder / self._name)
        except OSError as error:
            log.debug("not kept: %s", error)

    def _checksum(self, text: bytes) -> str:
        return sha256(self._name.encode() + text).hexdigest()


class Certificate:
    """The file with the rotations of a certified model."""

    def __init__(self, folder: Path, name: str, about: Mapping[str, str]) -> None:
        self._file, self._about = KeptFile(folder, name), about

    def read(self, geometry: KVGeometry) -> tuple[Planes, bool] | None:
        """The rotations that were kept, and whether attention may be joined; None: certify."""
        found = self._file.read()
        if found is None:
            return None
        try:
            rotations = [Rotation(tuple(each[0]), *each[1:]) for each in found["rotations"]]
            planes = {
                int(plane): None if number is None else rotations[number]
                for plane, number in found["planes"].items()
            }
            joins = bool(found["joins"])
        except (ValueError, LookupError, TypeError):
            return None
        cached = {plane for group in geometry.groups for plane in group.planes}
        return (planes, joins) if planes.keys() == cached else None

    def write(self, planes: Planes, *, joins: bool) -> None:
        """Keep what certification found."""
        rotations = list(dict.fromkeys(each for each in planes.values() if each is not None))
        numbers = {n: None if each is None else rotations.index(each) for n, each in planes.items()}
        told = [[each.inv_freq, each.offset, each.layout] for each in rotations]
        self._file.write({**self._about, "rotations": told, "planes": numbers, "joins": joins})


def certificate(
    model: PreTrainedModel,
    fingerprint: bytes,
    numerics: bytes,
    folder: Path,
    attentions: Sequence[str],
) -> Certificate | None:
    """The certificate of a model on this machine; None if it runs code that no key covers.

    `numerics` is a digest of versions, device and threads, `attentions` are what may run.
    """
    if not all(map(_is_known, model.modules())):
        return None
    chosen = repr((str(model.dtype), str(model.device), list(attentions))).encode()
    name = sha256(fingerprint + numerics + _sources() + chosen).hexdigest()
    about = {"model": model.config._name_or_path, "fingerprint": fingerprint.hex()}  # noqa: SLF001
    return Certificate(folder, name, about)


def model_names(folder: Path) -> dict[bytes, str]:
    """Names of certified models by their fingerprints, for people to read."""
    found = {}
    for path in folder.glob("*"):
        with suppress(OSError, ValueError, LookupError, TypeError):
            about = json.loads(path.read_bytes().split(b"\n", 1)[1])
            found[bytes.fromhex(about["fingerprint"])] = str(about["model"])
    return found


def _is_known(module: torch.nn.Module) -> bool:
    """Whether a module runs only code of a known version."""
    if module._forward_hooks or module._forward_pre_hooks:  # noqa: SLF001
        return False
    forward = vars(module).get("forward")  # of the instance: somebody has replaced it
    is_ours = isinstance(forward, FunctionType) and forward.__module__.startswith("kvboost.")
    return type(module).__module__.partition(".")[0] in KNOWN and (forward is None or is_ours)


@cache
def _sources() -> bytes:
    """Digest of our own code: the version stays the same during development."""
    digest = sha256()
    for path in sorted(path for pattern in SOURCES for path in PACKAGE.glob(pattern)):
        digest.update(path.read_bytes())
    return digest.digest()


def _is_ours(found: os.stat_result) -> bool:
    """Whether nobody else can have written it."""
    is_own = not hasattr(os, "geteuid") or found.st_uid == os.geteuid()
    return is_own and not found.st_mode & OTHERS_WRITE


def _no_links(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0))
