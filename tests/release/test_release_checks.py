"""What the check of a release says to releases that are wrong."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from check_release import (
    ROOT,
    Failed,
    check_changelog,
    check_tag,
    check_wheel,
    failed,
    judge_audit,
    version_of,
)


def test_a_changelog_of_this_version_with_a_date_is_right() -> None:
    check_changelog("# Changelog\n\n## [1.2.0] - 2026-01-31\n\n## [1.1.0] - 2025-12-01\n", "1.2.0")


@pytest.mark.parametrize(
    ("changelog", "reason"),
    [
        ("## [1.1.0] - 2026-01-31\n\n## [1.2.0] - 2026-01-01\n", "begins with 1.1.0"),
        ("## [1.2.0] - unreleased\n", "dated 'unreleased'"),
        ("nothing\n", "begins with None"),
    ],
)
def test_a_changelog_that_does_not_fit_is_told(changelog: str, reason: str) -> None:
    with pytest.raises(Failed, match=reason):
        check_changelog(changelog, "1.2.0")


def test_the_version_stands_in_one_place() -> None:
    assert f'"{version_of(ROOT)}"' not in (ROOT / "pyproject.toml").read_text()


def test_a_version_is_tagged_once(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", tmp_path, *who, *words], check=True, capture_output=True)

    git("init")
    git("commit", "--allow-empty", "-m", "one")
    check_tag(tmp_path, "1.0")
    git("tag", "v1.0")
    check_tag(tmp_path, "1.0")  # as in the workflow that the tag starts
    git("commit", "--allow-empty", "-m", "two")
    with pytest.raises(Failed, match=r"v1\.0 is another commit"):
        check_tag(tmp_path, "1.0")


def report(*dependencies: dict[str, object]) -> str:
    return json.dumps({"dependencies": dependencies})


FINE = {"name": "numpy", "version": "2.0", "vulns": []}
SKIPPED = {"name": "torch", "skip_reason": "not found"}


def test_an_audit_without_findings_is_right() -> None:
    judge_audit(report(FINE), "")


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (report(FINE, {"name": "jinja2", "vulns": [{"id": "CVE-1"}]}), "jinja2 CVE-1"),
        (report(FINE, SKIPPED), "not looked up: .*torch"),
        (report(SKIPPED, SKIPPED), "could not reach its service"),
        ("", "gave no report: no route"),
    ],
)
def test_an_audit_that_found_something_or_nothing_at_all_fails(said: str, reason: str) -> None:
    with pytest.raises(Failed, match=reason):
        judge_audit(said, "Traceback\nno route")


def test_a_step_that_fails_does_not_end_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = tmp_path / "a.whl"
    wheel.write_text("no archive")
    steps = {
        "wheel": lambda: check_wheel(wheel, ROOT, "1.0"),
        "report": lambda: json.loads("{"),
        "audit": lambda: judge_audit("{}", ""),
        "version": lambda: version_of(tmp_path),
    }
    assert all(failed(title, step) for title, step in steps.items())
    said = capsys.readouterr().out
    assert "wheel: FAILED: BadZipFile" in said
    assert "audit: FAILED: KeyError: 'dependencies'" in said
