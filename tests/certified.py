"""Models that are certified once: that takes longer than most of what is asked of them then."""

from __future__ import annotations

from functools import cache
from typing import Any

from kvboost.models import install
from kvboost.models.hf import HFModel, _fit_tokens_to_rows
from tiny_models import SUPPORTED, build

MEASURED = (
    "_geometry",
    "_rotations",
    "_position_limit",
    "pack_refusal",
    "_fingerprint",
    "_numerics",
)
_known: dict[tuple[Any, ...], tuple[str, dict[str, Any]]] = {}


@cache
def tiny_model(name: str) -> HFModel:
    """One for all tests of a process that do no more than run it."""
    return HFModel(build(*SUPPORTED[name]))


class KnownModel(HFModel):
    """Certifies the first model of a folder and dtype; later ones are taken to be like it.

    Stands for `HFModel` where the same model is loaded again and again: to certify one is fourteen
    forwards, to load it none.
    """

    def _certify(self) -> None:
        model = self.model
        key = (model.config._name_or_path, model.dtype, model.config._attn_implementation)
        if key not in _known:
            super()._certify()
            measured = {name: getattr(self, name) for name in MEASURED}
            _known[key] = model.config._attn_implementation, measured
            return
        implementation, measured = _known[key]
        vars(self).update(measured)
        self._hook = model.register_forward_pre_hook(_fit_tokens_to_rows, with_kwargs=True)
        install.switch(model, implementation)
