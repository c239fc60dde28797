"""The site builds without a warning, and has what it should have."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pages import DOCS, ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", str(DOCS)]
    run = subprocess.run(
        [*command, str(ROOT), str(folder)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-5000:]
    return folder


def test_every_page_is_in_the_site_and_can_be_searched(site: Path) -> None:
    pages = [page.relative_to(ROOT).with_suffix("") for page in DOCS.rglob("*.md")]
    assert [str(page) for page in pages if not (site / f"{page}.html").exists()] == []
    index = (site / "searchindex.js").read_text()
    assert [str(page) for page in pages if f'"{page}"' not in index] == []


def test_the_address_of_the_site_leads_to_the_home_page(site: Path) -> None:
    (target,) = re.findall(r"url=([^\"]+)", (site / "index.html").read_text())
    assert (site / target).exists()


def test_the_report_of_the_benchmark_is_in_the_site(site: Path) -> None:
    page = (site / "docs" / "benchmarks.html").read_text()
    (link,) = {*re.findall(r'href="([^"]+/_downloads/[^"]+/report\.html)"', page)}
    copied = (site / "docs" / link).resolve()
    assert copied.read_bytes() == (ROOT / "benchmarks/report/report.html").read_bytes()


def test_docstrings_are_in_the_reference(site: Path) -> None:
    page = (site / "docs" / "reference" / "api.html").read_text()
    for name in ("generate", "warm", "stream", "verify_correctness"):
        assert f'id="kvboost.KVBoost.{name}"' in page
    assert 'id="kvboost.tiers.base.Tier.get"' in page
