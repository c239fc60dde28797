"""A hub name, folder or GGUF file -> model and tokenizer, by Transformers' own loaders."""

from __future__ import annotations

import importlib.util
import logging
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from huggingface_hub import get_session
from huggingface_hub.constants import ENDPOINT, HF_HUB_ETAG_TIMEOUT
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.gguf import read_gguf_metadata
from transformers.utils import cached_file

from kvboost.errors import ConfigError, KVBoostError, missing_packages
from kvboost.models.adapters import num_embeddings
from kvboost.models.numerics import has_bfloat16
from kvboost.weights.awq import use_own_awq
from kvboost.weights.stream import stream_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NOT_FOR_GGUF = ("gguf_file", "trust_remote_code")  # arguments that do not name a file

log = logging.getLogger(__name__)


class SharedArguments(TypedDict, total=False):
    """Arguments of Transformers' `from_pretrained` for models and tokenizers."""

    cache_dir: str | None
    force_download: bool
    gguf_file: str | None
    local_files_only: bool
    proxies: dict[str, str] | None
    revision: str
    subfolder: str
    token: str | bool | None
    trust_remote_code: bool


class LoadArguments(SharedArguments, total=False):
    """All arguments of Transformers' `from_pretrained` that KVBoost passes on."""

    attn_implementation: str
    code_revision: str
    config: Any
    device_map: Any
    dtype: str | torch.dtype
    experts_implementation: str
    ignore_mismatched_sizes: bool
    key_mapping: dict[str, str]
    max_memory: dict[int | str, int | str]
    offload_buffers: bool
    offload_folder: str
    quantization_config: Any
    state_dict: Any
    tp_plan: Any
    tp_size: int
    use_kernels: bool
    use_safetensors: bool
    variant: str
    weights_only: bool


def load(
    name: str,
    device: str | torch.device | None,
    arguments: dict[str, Any],
    max_weight_bytes: int | str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load both; the model goes to `device`, by default to a GPU if there is one.

    `name` may be the path of a GGUF file. With `max_weight_bytes` at most that much of the weights
    is in memory at a time. Without a dtype, or with "auto", weights keep the one they are stored
    in, except bfloat16 on a CPU without instructions for it: that becomes float32.
    """
    if max_weight_bytes is not None and "device_map" in arguments:
        raise ConfigError("max_weight_bytes and device_map both say where weights are: give one")
    if split := {"tp_plan", "tp_size"} & arguments.keys():
        raise ConfigError(
            f"{min(split)}: vLLM has tensor parallelism; device_map='auto' puts layers on several "
            "GPUs"
        )
    name, arguments = _split_gguf_path(name, arguments)
    if not (_is_path(name) or Path(name).exists() or _is_hub_reachable()):
        arguments = {**arguments, "local_files_only": True}  # else the hub client retries for 50 s
    names = SharedArguments.__optional_keys__
    shared = {key: value for key, value in arguments.items() if key in names}
    tokenizer = AutoTokenizer.from_pretrained(name, **shared)
    target = device or ("cuda" if torch.cuda.is_available() else None)
    if "config" not in arguments and not arguments.get("gguf_file"):
        config = AutoConfig.from_pretrained(name, **shared)
        # Transformers' own way to AWQ rearranges the weights, and wants that package.
        if (
            max_weight_bytes is not None or not importlib.util.find_spec("gptqmodel")
        ) and use_own_awq(config):
            arguments = arguments | {"config": config}
        if max_weight_bytes is None and str(target or "cpu") == "cpu":
            arguments = arguments | _quick_dtype(config, arguments)
    model = AutoModelForCausalLM.from_pretrained(name, **arguments)
    if arguments.get("gguf_file"):
        _follow_gguf(name, shared, model, tokenizer)
    if max_weight_bytes is not None:
        stream_weights(model, max_weight_bytes, target or "cpu")
    elif target is not None and "device_map" not in arguments:
        model = model.to(target)
    return model, tokenizer


def load_or_tell(
    name: str,
    device: str | None,
    arguments: dict[str, Any],
    max_weight_bytes: int | str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load as `load` does; errors of Transformers become one line.

    Raises:
        ConfigError: the model or the device does not exist, or the model cannot be loaded.
        OSError: a file of the model cannot be read.
    """
    try:
        return load(name, device, arguments, max_weight_bytes)
    except KVBoostError:
        raise
    # AssertionError: torch has no CUDA. The last three: what a damaged GGUF file causes.
    except (OSError, ValueError, AssertionError, struct.error, LookupError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of a file or a socket, and short
        raise ConfigError(f"model {name!r}: {_why(name, error)}") from error


def _why(name: str, error: Exception) -> str:
    path = Path(name).expanduser()
    is_bare = path.is_dir() and not (path / "config.json").exists()
    if is_bare and ".gguf" not in str(error):
        return "the folder has no config.json; if it has GGUF files, choose one with gguf_file"
    if _is_path(name) and not path.exists():
        return "there is no such folder or file"
    said = str(error).partition("\n")[0].strip()
    if said.endswith(":"):  # a list follows
        said = " ".join(str(error).split())
    said = said.rstrip(" .") or type(error).__name__
    if "trust_remote_code" in str(error):
        said += "; pass trust_remote_code=True if you trust it"
    if isinstance(error, OSError):
        said += "; pass a folder, a GGUF file, or a hub name while there is a connection"
    return said


def _is_path(name: str) -> bool:
    return name.startswith(("/", ".", "~")) or name.count("/") > 1


def _is_hub_reachable() -> bool:
    try:
        get_session().head(ENDPOINT, timeout=HF_HUB_ETAG_TIMEOUT)
    except Exception:  # of requests, httpx or httpx2, by version
        return False
    return True


def _split_gguf_path(name: str, arguments: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The path of a GGUF file as its folder and `gguf_file`; anything else as it is.

    Raises:
        ConfigError: there is no such file, or what reads it is not installed.
    """
    if name.endswith(".gguf") and not arguments.get("gguf_file"):
        if not Path(name).is_file():
            raise ConfigError(f"model={name!r}: there is no such file")
        name, arguments = str(Path(name).parent), {**arguments, "gguf_file": Path(name).name}
    if arguments.get("gguf_file"):
        missing = [each for each in ("gguf", "accelerate") if not importlib.util.find_spec(each)]
        if missing:
            raise ConfigError(
                missing_packages(f"gguf_file={arguments['gguf_file']!r}", " ".join(missing))
            )
        if Path(name).is_dir():
            # Transformers takes the weights of a file of this name in the working folder first.
            path = Path(name, arguments.get("subfolder") or "", arguments["gguf_file"])
            arguments = {**arguments, "gguf_file": str(path.absolute())}
    return name, arguments


def _follow_gguf(
    name: str,
    arguments: dict[str, Any],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Apply what Transformers does not read from the file: whether to add BOS, and end of turn."""
    where = {key: value for key, value in arguments.items() if key not in NOT_FOR_GGUF}
    metadata, _ = read_gguf_metadata(cached_file(name, arguments["gguf_file"], **where))
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token")
    if adds_bos is not None and adds_bos != tokenizer.add_bos_token:
        tokenizer.add_bos_token = adds_bos
    end_of_turn = metadata.get("tokenizer.ggml.eot_token_id")
    settings = model.generation_config
    known = settings.eos_token_id
    ends = known if isinstance(known, list) else [] if known is None else [known]
    if end_of_turn is not None and end_of_turn not in ends:
        settings.eos_token_id = [*ends, end_of_turn]


def _quick_dtype(config: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """What to load a model with on a CPU that would emulate the dtype of its weights."""
    is_chosen = arguments.get("dtype", "auto") != "auto" or "device_map" in arguments
    is_quantised = (
        getattr(config, "quantization_config", None) or "quantization_config" in arguments
    )
    stored = config.get_text_config().dtype
    if is_chosen or is_quantised or stored != torch.bfloat16 or has_bfloat16():
        return {}
    log.warning(
        "weights are bfloat16; this CPU has no bfloat16 instructions: using float32, "
        "twice the memory"
    )
    return {"dtype": torch.float32}


def limits(model: PreTrainedModel) -> tuple[int, int | None]:
    """The size of a model's vocabulary, and the most tokens that it reads, if it says so."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return num_embeddings(model), longest


def boundary_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of the tokens that end a line or a sentence."""
    ids = sorted(tokenizer.get_vocab().values())
    texts = tokenizer.batch_decode([[token] for token in ids])
    ends = ("\n", ".", "!", "?")
    return frozenset(token for token, text in zip(ids, texts, strict=True) if text.endswith(ends))
