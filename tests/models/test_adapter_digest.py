"""The digest of an adapter says the same on every machine."""

from __future__ import annotations

from typing import Any

import torch

from kvboost.models.fingerprint import adapter_digest


class Config:
    def __init__(self, **settings: Any) -> None:
        self.to_dict = lambda: settings


def digest(**settings: Any) -> bytes:
    model = torch.nn.Linear(2, 2)
    model.peft_config = {"name": Config(**settings)}
    return adapter_digest(model, "name")


def test_the_order_of_sets_does_not_count() -> None:
    one, other = {0, 8}, {8, 0}  # in the same bucket: the order is that of their making
    assert str(one) != str(other)
    assert digest(target_modules=one) == digest(target_modules=other)
    assert digest(target_modules=one) != digest(target_modules={0, 9})


def test_settings_count_unless_they_only_say_where_it_comes_from() -> None:
    assert digest(use_dora=True) != digest(use_dora=False)
    assert digest(r=4, base_model_name_or_path="here") == digest(r=4, revision="there")
