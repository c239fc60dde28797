"""A model's safetensors files: tensors by name, and their digests, cached on disk."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from kvboost.errors import UnsupportedModel
from kvboost.models.fingerprint import NUM_THREADS, described
from kvboost.models.kept import KeptFile

VERSION = 1  # of kept digests
NUM_PAGES, PAGE_BYTES = 256, 4096  # of a file, that are looked at before its digests are trusted
CONSOLIDATED = "consolidated.safetensors"  # Mistral's own format, which vLLM prefers
SETS = (
    SAFE_WEIGHTS_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    CONSOLIDATED,
    f"{CONSOLIDATED}.index.json",
)

log = logging.getLogger(__name__)


class Checkpoint:
    """The safetensors files of a model, in a folder or in the hub's cache."""

    def __init__(self, name: str, **arguments: Any) -> None:
        """`arguments`: those of the hub (`revision`, `cache_dir`).

        Raises:
            UnsupportedModel: there are none, or more than one set of them.
        """
        found = {file: _found(name, file, arguments) for file in SETS}
        if len(sets := [file for file, path in found.items() if path]) != 1:
            # With several, engines differ in which one they load.
            what = (
                f"several sets of weights ({', '.join(sets)})" if sets else "no safetensors files"
            )
            raise UnsupportedModel(f"{name} has {what}")
        if not (path := found[SAFE_WEIGHTS_NAME] or found[SAFE_WEIGHTS_INDEX_NAME]):
            raise UnsupportedModel(f"{name} has {sets[0]} only, in a format of its own")
        self._files: Sequence[str] = [path]
        if sets == [SAFE_WEIGHTS_INDEX_NAME]:
            self._files, _ = get_checkpoint_shard_files(name, path, **arguments)
        self._holder: dict[str, str] = {}
        self.shapes: dict[str, list[int]] = {}  # of its tensors, by their names
        self.dtypes: set[str] = set()  # as safetensors calls them
        for path in self._files:
            with safe_open(path, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    self._holder[name] = path
                    tensor = opened.get_slice(name)
                    self.shapes[name] = tensor.get_shape()
                    self.dtypes.add(tensor.get_dtype())

    def digests(self, dtypes: Mapping[str, torch.dtype], folder: Path) -> dict[str, list[Any]]:
        """Dtype, shape and BLAKE3 of each tensor, once converted to its type in `dtypes`.

        Those of a file are kept in `folder` for as long as it stays as it is.
        """
        found: dict[str, list[Any]] = {}
        for path in self._files:
            kept = KeptFile(folder, _version(path, dtypes))
            digests = kept.read()
            if digests is None:
                digests = _digests(path, dtypes)
                kept.write(digests)
            found |= digests
        return found

    def read(self, name: str, rows: Sequence[int] | None = None) -> torch.Tensor:
        """A tensor, or some rows of it."""
        with safe_open(self._holder[name], "pt") as opened:
            if rows is None:
                whole: torch.Tensor = opened.get_tensor(name)  # mapped, not copied
                return whole
            found = opened.get_slice(name)
            return torch.cat([found[row : row + 1] for row in rows])


def _found(name: str, file: str, arguments: dict[str, Any]) -> str:
    """The path of a file, or an empty string."""
    try:
        found: str = cached_file(name, file, **arguments)
    except OSError as error:
        log.debug("%s", error)
        return ""
    return found


def _digests(path: str, dtypes: Mapping[str, torch.dtype]) -> dict[str, list[Any]]:
    with safe_open(path, "pt") as opened, ThreadPoolExecutor(NUM_THREADS) as pool:

        def digest(name: str) -> list[Any]:
            tensor = opened.get_tensor(name)
            return described(tensor, dtypes.get(name, tensor.dtype))

        names = list(opened.keys())
        return dict(zip(names, pool.map(digest, names), strict=True))


def _version(path: str, dtypes: Mapping[str, torch.dtype]) -> str:
    """A name for a file's current state and the dtypes its tensors are converted to."""
    found = os.stat(path)
    file = str(Path(path).resolve()), found.st_dev, found.st_ino, found.st_size
    # Programs can set the first of the times. In images of containers both may be constants.
    times = found.st_mtime_ns, found.st_ctime_ns
    about = repr((VERSION, file, times, sorted(dtypes.items())))
    digest = sha256(about.encode())
    with open(path, "rb") as opened:
        for start in range(0, found.st_size, max(PAGE_BYTES, found.st_size // NUM_PAGES)):
            opened.seek(start)
            digest.update(opened.read(PAGE_BYTES))
    return digest.hexdigest()
