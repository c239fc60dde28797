"""The fingerprint of a model from its files, for an engine that runs it without Transformers.

No weights are loaded. docs/adr/0048-name-by-files.md has the rule.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from kvboost.core import KVGeometry
from kvboost.errors import UnsupportedModel
from kvboost.models.certify import cached_tensors, position_limit, rotary_frequencies
from kvboost.models.fingerprint import (
    NUM_THREADS,
    base_tensors,
    compute_buffers,
    described,
    embeddings,
    hash_tensors,
    named_by,
)
from kvboost.models.kept import KeptFile

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

NUM_LAYERS = 4  # whose K/V is compared: no pattern of layers is longer where all keep all tokens
PLAIN = {"F16", "BF16", "F32"}  # dtypes of weights that are not quantised
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


@dataclass(frozen=True)
class Identity:
    """A model's fingerprint, and measurements to compare another engine's K/V with."""

    fingerprint: bytes
    frequencies: frozenset[tuple[float, ...]]  # of its rotary embeddings
    planes: torch.Tensor | None  # [planes, heads, tokens, head_dim] of the probe tokens
    refusal: str = ""  # why Transformers' engine gives it another name


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


def identify(
    name: str,
    dtype: torch.dtype,
    geometry: KVGeometry,
    probe: Sequence[int],
    kept_in: Path,
    *,
    is_changed: bool = False,
    trust_remote_code: bool = False,
    code_revision: str | None = None,
    **arguments: Any,
) -> Identity:
    """Compute the fingerprint of a model, and run `probe` through its first layers.

    `kept_in`: a folder for the digests of files. `is_changed`: the engine does not run the model as
    its files say. `arguments`: those of the hub.

    Raises:
        UnsupportedModel: engines do not agree on the positions of such a model, or it has no files.
    """
    code: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    config = AutoConfig.from_pretrained(name, **code, code_revision=code_revision, **arguments)
    checkpoint = Checkpoint(name, **arguments)
    if trust_remote_code and getattr(config, "auto_map", None):
        revision = code_revision or arguments.get("revision")
        code |= {"code_revision": revision, "cache_dir": arguments.get("cache_dir")}
    model = _empty(lambda: AutoModelForCausalLM.from_config(config, dtype=dtype, **code))
    if position_limit(model) is not None:
        raise UnsupportedModel("its rotary embedding changes with the length of a prompt")
    tensors = dict(base_tensors(model))
    absent = {name: tensor for name, tensor in tensors.items() if tensor.is_meta}
    _, last = embeddings(model)
    if last not in checkpoint.shapes and config.get_text_config().tie_word_embeddings:
        absent.pop(last, None)
    frequencies = frozenset(rotary_frequencies(model))
    refusal = _refusal(config, absent, checkpoint, is_changed=is_changed)
    if refusal:
        # Another rule: its tensors are as they are called and stored in the files.
        contents = checkpoint.digests({}, kept_in)
        fingerprint = sha256(b"files" + named_by(contents, model, geometry)).digest()
        return Identity(fingerprint, frequencies, None, refusal)
    found = checkpoint.digests({name: each.dtype for name, each in absent.items()}, kept_in)
    buffers = {name: each for name, each in tensors.items() if not each.is_meta}
    contents = {name: found[name] for name in absent} | hash_tensors(buffers)
    fingerprint = named_by(contents, model, geometry)
    try:
        planes = _first_planes(model, checkpoint, probe) if probe else None
    except Exception as error:  # foreign code, run in our way
        planes, refusal = None, f"its first layers cannot be run alone: {error}"
    return Identity(fingerprint, frequencies, planes, refusal)


def _empty(make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """A model without memory for its weights."""
    with torch.device("meta"):
        model = make().eval()
    compute_buffers(model)
    return model


def _refusal(
    config: PreTrainedConfig,
    absent: dict[str, torch.Tensor],
    checkpoint: Checkpoint,
    *,
    is_changed: bool,
) -> str:
    if is_changed:
        return "the engine was told to change the model"
    if getattr(config, "quantization_config", None) or not checkpoint.dtypes <= PLAIN:
        return "its checkpoint is quantised"
    for name, tensor in absent.items():
        if checkpoint.shapes.get(name) != list(tensor.shape):
            return f"Transformers converts its checkpoint: {name} is made from other tensors"
    return ""


def _first_planes(
    whole: PreTrainedModel, checkpoint: Checkpoint, probe: Sequence[int]
) -> torch.Tensor:
    """What the first layers cache of `probe`, with no more of the embeddings than its tokens."""
    small = copy.deepcopy(whole.config)
    text = small.get_text_config()
    text.num_hidden_layers = min(NUM_LAYERS, text.num_hidden_layers)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[: text.num_hidden_layers]
    tokens = sorted(set(probe))
    text.vocab_size, text.pad_token_id = len(tokens), None
    model = _empty(lambda: type(whole)._from_config(small, dtype=whole.dtype))  # noqa: SLF001
    state = {}
    for name, tensor in model.state_dict().items():
        if name in checkpoint.shapes:
            is_cut = checkpoint.shapes[name] != list(tensor.shape)
            state[name] = checkpoint.read(name, tokens if is_cut else None).to(tensor.dtype)
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    places = torch.tensor([[tokens.index(token) for token in probe]])
    with torch.no_grad():
        found = dict(cached_tensors(model, places, range(len(probe))))
    return torch.cat([found[plane] for plane in sorted(found)])


def _found(name: str, file: str, arguments: dict[str, Any]) -> str:
    """The path of a file, or nothing."""
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
    """A name for a file as it is now, and for what its tensors are converted to."""
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
