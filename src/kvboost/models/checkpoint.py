"""A checkpoint's files: which there are, and the digest of each tensor, kept for the next start."""

from __future__ import annotations

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
from kvboost.models.fingerprint import NUM_THREADS, hash_tensors
from kvboost.models.kept import KeptFile


class Checkpoint:
    """The safetensors files of a model, in a folder or in the hub's cache."""

    def __init__(self, name: str, **arguments: Any) -> None:
        """`arguments`: those of the hub (`revision`, `cache_dir`).

        Raises:
            UnsupportedModel: there are none.
        """
        try:
            self._files: Sequence[str] = [cached_file(name, SAFE_WEIGHTS_NAME, **arguments)]
        except OSError:
            try:
                index = cached_file(name, SAFE_WEIGHTS_INDEX_NAME, **arguments)
            except OSError as error:
                raise UnsupportedModel(f"{name} has no safetensors files") from error
            self._files, _ = get_checkpoint_shard_files(name, index, **arguments)
        self._holder: dict[str, str] = {}
        self.shapes: dict[str, list[int]] = {}  # of its tensors, by their names
        for path in self._files:
            with safe_open(path, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    self._holder[name] = path
                    self.shapes[name] = opened.get_slice(name).get_shape()

    def digests(self, dtypes: Mapping[str, torch.dtype], folder: Path) -> dict[str, list[Any]]:
        """Dtype, shape and BLAKE3 of each tensor, once converted to its type in `dtypes`.

        Those of a file are kept in `folder` for as long as its size, times and inode stay.
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
            found = opened.get_slice(name)
            pieces = [slice(None)] if rows is None else [slice(row, row + 1) for row in rows]
            return torch.cat([found[piece] for piece in pieces])


def _digests(path: str, dtypes: Mapping[str, torch.dtype]) -> dict[str, list[Any]]:
    with safe_open(path, "pt") as opened, ThreadPoolExecutor(NUM_THREADS) as pool:

        def digest(name: str) -> list[Any]:
            tensor = opened.get_tensor(name)
            converted = tensor.to(dtypes.get(name, tensor.dtype))
            return hash_tensors({name: converted})[name]

        names = list(opened.keys())
        return dict(zip(names, pool.map(digest, names), strict=True))


def _version(path: str, dtypes: Mapping[str, torch.dtype]) -> str:
    """A name for a file as it is now, and for what its tensors are converted to."""
    found = os.stat(path)
    # The time of the last change of its inode cannot be set, unlike that of its content.
    times = found.st_mtime_ns, found.st_ctime_ns
    file = str(Path(path).resolve()), found.st_size, found.st_ino, *times
    return sha256(repr((file, sorted(dtypes.items()))).encode()).hexdigest()
