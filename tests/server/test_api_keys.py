"""API keys: files, limits, and the command that makes them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from kvboost.cli.main import main
from kvboost.errors import ConfigError
from kvboost.server.keys import Bucket, KeyRing, new_key, read_keys
from kvboost.server.problems import Problem

EMPTY = hashlib.sha256(b"").hexdigest()
DIGEST = hashlib.sha256(b"secret").hexdigest()


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_new_key_opens_what_its_entry_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", "new", "--tenant", 'a "b" é', "--name", "ci", "--admin"]) == 0
    printed = capsys.readouterr()
    key = printed.err.strip()
    (tmp_path / "keys.toml").write_text(printed.out, encoding="utf-8")
    assert key not in printed.out
    caller = KeyRing(read_keys(str(tmp_path / "keys.toml"))).caller(f"Bearer {key}")
    assert (caller.tenant, caller.name, caller.is_admin) == ('a "b" é', "ci", True)


def test_keys_are_never_the_same() -> None:
    assert new_key("a", "", is_admin=False)[0] != new_key("a", "", is_admin=False)[0]


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer wrong", "Basic secret", "secret"])
def test_anything_but_a_known_key_is_refused(header: str) -> None:
    ring = KeyRing([{"tenant": "a", "sha256": DIGEST}])
    assert ring.caller("bearer secret").tenant == "a"
    with pytest.raises(Problem) as refusal:
        ring.caller(header)
    assert refusal.value.status_code == 401


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected tables"),
        ("keys = 5", "expected tables"),
        ("[[keys]]\ntenant = 'a'", "sha256: expected"),
        (f"[[keys]]\nsha256 = '{DIGEST}'", "tenant is missing"),
        (f"[[keys]]\ntenant = 'a'\nsha256 = '{EMPTY}'", "an empty key"),
        (2 * f"[[keys]]\ntenant = 'a'\nsha256 = '{DIGEST}'\n", "two entries have the same key"),
        (f"[[keys]]\ntenant = 'a'\nsha256 = '{DIGEST[:-1]}x'", "64 hex digits"),
        (f"[[keys]]\ntenant = 5\nsha256 = '{DIGEST}'", "tenant=5"),
        (f"[[keys]]\ntenent = 'a'\nsha256 = '{DIGEST}'", "did you mean 'tenant'"),
        (f"[[keys]]\ntenant='a'\nsha256='{DIGEST}'\ntokens_per_minute = 0", "above 0"),
        ("[[keys", "key file"),
    ],
)
def test_a_wrong_file_of_keys_is_told(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "keys.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_keys(str(tmp_path / "keys.toml"))


def test_a_wrong_file_of_keys_does_not_spill_a_key(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text("[[keys]]\ntenant = 'a'\nsha256 = 'kvb-the-key-itself'")
    with pytest.raises(ConfigError, match="key 1: sha256") as refusal:
        read_keys(str(tmp_path / "keys.toml"))
    assert "itself" not in str(refusal.value)


def test_tenants_are_those_of_the_keys() -> None:
    keys = [{"tenant": tenant, "sha256": DIGEST} for tenant in ("b", "a", "b")]
    assert (KeyRing(keys).tenants, KeyRing().tenants) == (["a", "b"], [""])


def test_a_bucket_holds_a_minute_and_fills_evenly() -> None:
    clock = Clock()
    bucket = Bucket(60, clock)
    assert bucket.take(60) == 0
    assert bucket.take(5) == pytest.approx(5)
    clock.now_s += 4
    assert bucket.take(5) == pytest.approx(1)
    clock.now_s += 1
    assert bucket.take(5) == 0
    clock.now_s += 1000
    assert bucket.take(61) == pytest.approx(1)
    bucket.take(60)
    bucket.give_back(7)
    assert bucket.take(7) == 0
