"""The command where the server's libraries are not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "call",
    [
        "from kvboost.cli.main import main; sys.exit(main(['serve', '--model', 'm']))",
        "from kvboost.cli.main import main; sys.exit(main(['keys', 'new', '--tenant', 'a']))",
        "from kvboost.server.__main__ import main; sys.exit(main())",
    ],
)
def test_the_command_names_the_extra_that_is_missing(call: str) -> None:
    missing = dict.fromkeys(["fastapi", "pydantic", "starlette", "tomli", "uvicorn"])
    program = f"""
import sys
sys.modules |= {missing}
{call}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install fastapi" in done.stderr
    assert "Traceback" not in done.stderr
