"""What the OpenAPI document says is what the running server does: Schemathesis tries to differ."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import httpx
import pytest

from servers import KVBoostServer, find_program

pytestmark = pytest.mark.servers


def test_responses_are_as_documented(guarded: KVBoostServer, tmp_path: Path) -> None:
    num_examples = os.environ.get("KVBOOST_TEST_DOCUMENTED", "10")  # of each path
    command = [find_program("schemathesis"), "run", f"{guarded.url}/openapi.json", "--no-color"]
    command += ["--header", f"Authorization: Bearer {guarded.api_key}"]
    command += ["--max-examples", num_examples, "--generation-deterministic"]
    # Which parameters exclude each other no schema can say.
    command += ["--exclude-checks", "positive_data_acceptance", "--warnings", "off"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    assert guarded.num_requests() == 0


def test_the_document_says_all_that_may_come(guarded: KVBoostServer) -> None:
    document = httpx.get(f"{guarded.url}/openapi.json").json()
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert not {"default", "422"} & set(operation["responses"]), path
            contents = operation["responses"]["200"]["content"].values()
            assert all(each.get("schema") or each.get("itemSchema") for each in contents), path
