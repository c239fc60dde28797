"""The digest of an adapter says the same on every machine."""

from __future__ import annotations

from kvboost.models.fingerprint import said_by


def test_the_order_of_sets_does_not_count() -> None:
    one, other = {0, 8}, {8, 0}  # in the same bucket: the order is that of their making
    assert str(one) != str(other)
    assert said_by({"target_modules": one}) == said_by({"target_modules": other})
    assert said_by({"target_modules": one}) != said_by({"target_modules": {0, 9}})


def test_settings_count_unless_they_only_say_where_it_comes_from() -> None:
    assert said_by({"use_dora": True}) != said_by({"use_dora": False})
    assert said_by({"r": 4, "base_model_name_or_path": "here"}) == said_by(
        {"r": 4, "revision": "there"}
    )
