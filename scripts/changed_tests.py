"""Run the tests of what changed since a commit: those of its folder, and those that import it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MARKS = "not vllm and not long"
QUICK = f"{MARKS} and not tiny and not model and not servers"
MOST_FILES = 30  # with models and servers; a change that reaches more runs the quick tests only


def changed_since(commit: str) -> list[Path]:
    """Changed and new files."""
    found = []
    for command in (f"diff --name-only --merge-base {commit}", "ls-files -o --exclude-standard"):
        done = subprocess.run(["git", *command.split()], cwd=ROOT, check=True, capture_output=True)
        found += done.stdout.decode().splitlines()
    return [Path(name) for name in found]


def tests_of(path: Path, sources: dict[Path, str]) -> set[Path]:
    """The test files in folders that are called as those of a changed file, and its importers."""
    if path.parent.name == "kvboost":  # what everything imports
        return set(sources)
    parts = path.with_suffix("").parts[1 if path.parts[0] in ("src", "tests", "scripts") else 0 :]
    folders = {"docs"} if path.suffix == ".md" else set(parts[:-1])
    module = r"(\.| import .*\b)".join(filter(None, (r"\.".join(parts[:-1]), parts[-1])))
    imports = re.compile(rf"\b(from|import) {module}\b")
    own = set(sources) & {path} or {each for each in sources if each.parts[1] in folders}
    return own | {each for each, text in sources.items() if imports.search(text)}


def main() -> int:
    """Choose and run; arguments: the commit, then those of pytest."""
    commit, *arguments = sys.argv[1:] or ["main"]
    files = [path.relative_to(ROOT) for path in sorted(ROOT.glob("tests/**/test_*.py"))]
    sources = {path: (ROOT / path).read_text() for path in files}
    chosen = set().union(*(tests_of(path, sources) for path in changed_since(commit)))
    print(f"{len(chosen)} of {len(files)} files of tests", flush=True)
    if not chosen:
        return 0
    marks = ["-m", MARKS if len(chosen) <= MOST_FILES else QUICK]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", *marks]
    return subprocess.call([*command, *map(str, sorted(chosen)), *arguments], cwd=ROOT)


if __name__ == "__main__":
    sys.exit(main())
