"""PEFT adapters of a model: loaded side by side, identified by weights, switched per forward."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvboost.config import hint
from kvboost.errors import ConfigError, KVBoostError, UnsupportedModel, missing_packages
from kvboost.models.fingerprint import adapter_digest, adapter_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Attributes that select the adapter of a PEFT layer.
STATE = ("_active_adapter", "_disable_adapters")
# Initialisations of LoRA that leave the base weights unchanged.
HARMLESS_STARTS = (True, False, None, "gaussian", "orthogonal")


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter, or the base model. A new adapter under an old name is another object."""

    name: str = ""  # for callers; empty: none, the base model
    slot: str = ""  # its name in PEFT's layers
    digest: bytes = b""  # of its weights and settings, whatever its name


class Adapters:
    """The adapters of a model. `find` and `names` on any thread, the rest on the engine's."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Take over the adapters that `model` already has.

        Raises:
            UnsupportedModel: it is in a state that cannot be switched.
        """
        self._model = model
        self._numbers = itertools.count()
        self._trainable = [each for each in model.parameters() if each.requires_grad]
        self._look_at_layers()
        self._first_layers, self._first_state = self._layers, self._state()
        configs = dict(getattr(model, "peft_config", {}))
        for config in configs.values():
            _check(config)
        self._known = {name: Adapter(name, name, adapter_digest(model, name)) for name in configs}
        self._first_slots = set(configs)
        self.base = Adapter()
        self.default = self._active()
        self.defect = ""  # why the model can be used no more

    @property
    def names(self) -> list[str]:
        """Names of all adapters, sorted."""
        return sorted(self._known)

    @property
    def all(self) -> list[Adapter]:
        """Everything the model can run under, the base model first."""
        return [self.base, *self._known.values()]

    def find(self, name: str | None) -> Adapter:
        """An adapter by name; None: the one the model came with, an empty name: the base model.

        Raises:
            ConfigError: there is none of this name.
        """
        if not name:
            return self.default if name is None else self.base
        adapter = self._known.get(name)
        if adapter is None:
            known = ", ".join(map(repr, self.names)) or "none is loaded"
            raise ConfigError(f"unknown adapter {name!r} ({known}){hint(name, self.names)}")
        return adapter

    def load(self, name: str, folder: str, check: Callable[[], None]) -> None:
        """Load an adapter; it replaces one of the same name.

        `check` is called with the new one active, and raises if it cannot be used.

        Raises:
            ConfigError: it cannot be used with this model, or PEFT is not installed.
        """
        self._check_name(name)
        slot = f"kvboost{next(self._numbers)}"
        try:
            with _without_warnings():
                _load(self._model, folder, slot)
            _check_copies(self._model, slot)
            adapter = Adapter(name, slot, adapter_digest(self._model, slot))
            self._look_at_layers()
            self._set(adapter)
            check()
        except Exception as error:  # PEFT may raise anything for unsuitable files and models
            self._delete(slot)
            raise ConfigError(f"adapter {name!r} of {folder}: {error}") from error
        replaced = self._known.get(name)
        self._known[name] = adapter
        if replaced is not None:
            self._delete(replaced.slot)

    def unload(self, name: str) -> None:
        """Forget an adapter; requests that still run under it end with an error.

        Raises:
            ConfigError: there is none of this name, or it is what the model came with.
        """
        adapter = self.find(name)
        self._check_name(name)
        del self._known[name]
        self._delete(adapter.slot)

    def use(self, adapter: Adapter) -> None:
        """Let the next forward run under an adapter.

        PEFT's own switch takes 6 to 20 ms for a model of 30 layers, so it is used once per adapter.
        Afterwards its result is set directly (0.06 ms), also if somebody else has switched
        meanwhile.
        """
        if self.defect:
            raise KVBoostError(self.defect)
        if not self._layers:
            return
        if adapter not in self._states:
            if adapter is not self.base and self._known.get(adapter.name) is not adapter:
                raise KVBoostError(f"the adapter {adapter.name!r} was unloaded meanwhile")
            self._set(adapter)
            self._states[adapter] = self._state()
        _restore(self._layers, self._states[adapter])

    def release(self) -> None:
        """Restore the model as it was."""
        for adapter in self._known.values():
            if adapter.slot not in self._first_slots:
                self._delete(adapter.slot)
        layers = adapter_layers(self._model)
        new = [path for path, layer in layers.items() if layer not in self._first_layers]
        for path in new:
            if not any(path.startswith(f"{other}.") for other in new):
                self._model.set_submodule(path, _inside(layers[path]))
        _restore(self._first_layers, self._first_state)
        for parameter in self._trainable:
            parameter.requires_grad_()

    def _active(self) -> Adapter:
        """The adapter that was active when the model came."""
        if any(getattr(layer, "merged_adapters", ()) for layer in self._layers):
            raise UnsupportedModel("an adapter is merged into its weights; unmerge it first")
        enabled = [layer for layer in self._layers if not layer.disable_adapters]
        active = {name for layer in enabled for name in layer.active_adapters} & {*self._known}
        if len(active) > 1:
            raise UnsupportedModel(f"several adapters are active at once: {sorted(active)}")
        return self._known[active.pop()] if active else self.base

    def _check_name(self, name: str) -> None:
        if not name:
            raise ConfigError("an adapter needs a name that is not empty")
        if name == self.default.name:
            raise ConfigError(
                f"adapter {name!r} is part of the loaded model; it cannot be replaced or removed"
            )

    def _look_at_layers(self) -> None:
        self._layers = [*adapter_layers(self._model).values()]
        self._states: dict[Adapter, list[dict[str, Any]]] = {}

    def _state(self) -> list[dict[str, Any]]:
        return [{name: layer.__dict__[name] for name in STATE} for layer in self._layers]

    def _set(self, adapter: Adapter) -> None:
        from peft.functional import set_adapter  # noqa: PLC0415  (an extra)

        if adapter is not self.base:
            set_adapter(self._model, adapter.slot, inference_mode=True)
        for layer in self._layers:  # some of PEFT's fail under an adapter that is not theirs
            layer.enable_adapters(adapter.slot in layer._get_available_adapters())  # noqa: SLF001

    def _delete(self, slot: str) -> None:
        """Remove an adapter from the layers, also one that was only partly loaded."""
        config = getattr(self._model, "peft_config", {}).pop(slot, None)
        if config is not None:
            from peft.functional import delete_adapter  # noqa: PLC0415

            with _without_warnings():
                delete_adapter(self._model, slot, f"{config.peft_type.value.lower()}_")
            if not self._model.peft_config:
                del self._model.peft_config
        self._look_at_layers()


def unwrapped(model: Any) -> PreTrainedModel:
    """The model inside a `PeftModel`, whose layers are in it.

    Raises:
        UnsupportedModel: an adapter that is no layer.
    """
    if not hasattr(model, "get_base_model"):
        return model
    for config in model.peft_config.values():
        _check(config)
    return model.get_base_model()


def _load(model: PreTrainedModel, folder: str, slot: str) -> None:
    """By PEFT itself: Transformers' `load_adapter` leaves out the magnitudes of DoRA (5.22)."""
    try:
        import peft  # noqa: PLC0415  (an extra)
    except ImportError as error:
        raise ConfigError(missing_packages("it", "peft")) from error
    config = peft.PeftConfig.from_pretrained(folder)
    _check(config)
    if getattr(config, "layer_replication", None):
        raise UnsupportedModel("it repeats layers of the base model")
    if (start := getattr(config, "init_lora_weights", None)) not in HARMLESS_STARTS:
        raise UnsupportedModel(f"it changes the base model's weights (init_lora_weights={start!r})")
    config.inference_mode = True
    saved = peft.load_peft_weights(folder, device=str(model.device))
    peft.inject_adapter_in_model(config, model, slot)
    weights = {name.removeprefix("base_model.model."): each for name, each in saved.items()}
    loaded = peft.set_peft_model_state_dict(model, weights, adapter_name=slot)
    missing = [name for name in loaded.missing_keys if slot in name.split(".")]
    for what, names in (("lacks", missing), ("has, for no layer,", loaded.unexpected_keys)):
        if names:
            raise UnsupportedModel(f"it {what} {len(names)} tensors, for example {min(names)}")


def _check(config: Any) -> None:
    if config.is_prompt_learning:
        kind = config.peft_type.value
        raise UnsupportedModel(f"{kind} puts K/V of its own before prompts; only layers are reused")
    if getattr(config, "alora_invocation_tokens", None):
        raise UnsupportedModel(
            "it begins to work at certain tokens (aLoRA), which keys do not tell"
        )


def _check_copies(model: PreTrainedModel, slot: str) -> None:
    """Refuse copies of layers that compute with other weights than their own.

    A layer that is streamed in parts, or prepacked, has a `forward` of its own, which PEFT's copy
    (`modules_to_save`) takes over with the weights of the original.
    """
    for layer in adapter_layers(model).values():
        copies = getattr(layer, "modules_to_save", {})
        if slot in copies and any("forward" in vars(each) for each in copies[slot].modules()):
            raise UnsupportedModel("it replaces a layer whose weights are streamed or prepacked")


def num_embeddings(model: PreTrainedModel) -> int:
    """Size of a model's input embedding, inside PEFT's wrappers."""
    embedding: Any = model.get_input_embeddings()
    while hasattr(embedding, "adapter_layer_names"):
        embedding = _inside(embedding)
    return int(embedding.num_embeddings)


def _inside(layer: Any) -> Any:
    """The layer that a PEFT layer wraps."""
    return layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer.original_module


def _restore(layers: list[Any], state: list[dict[str, Any]]) -> None:
    for layer, values in zip(layers, state, strict=True):
        layer.__dict__.update(values)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """PEFT warns of a second adapter, of tied weights, and of what becomes active when one goes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
