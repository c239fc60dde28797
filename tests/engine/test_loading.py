"""Models that cannot be loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_a_hub_name_without_a_hub_fails_at_once_and_in_a_line(tmp_path: Path) -> None:
    """In a process of its own: the hub's client reads its address when it is imported."""
    script = "from kvboost import KVBoost; KVBoost.from_pretrained('nobody/nothing')"
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", script]
    run = subprocess.run(
        command, env=os.environ | nowhere, capture_output=True, text=True, check=False
    )
    assert "Retrying" not in run.stderr
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("kvboost.errors.ConfigError: model 'nobody/nothing': ")
    assert "http://127.0.0.1:9" in last and "pass a folder" in last
