"""The shape of the package is a promise; these tests keep it."""

import ast
import subprocess
import sys
from pathlib import Path

SRC = Path(__file__).parents[1] / "src" / "kvboost"
MAX_FILE_LINES = 400  # without docstrings
# docs/adr/0033-sizes.md
PARTS = {
    "server": "application",
    "cli": "application",
    "weights": "weights",
    "connectors": "connectors",
    "bench": "bench",
    "drawing": "bench",
    "analyze": "fleet",
    "probe": "probe",
    "fleet": "fleet",
    "routing": "fleet",
    "integrations": "integrations",
}
MAX_LINES = {
    "library": 11_985,
    "application": 5_970,
    "weights": 700,
    "connectors": 2_295,
    "bench": 4_670,
    "fleet": 1_775,
    "probe": 1_150,
    "integrations": 85,
}


def docstring_lines(source: str) -> set[int]:
    """Numbers of the lines that are docstrings, examples in them included."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def code_lines(path: Path) -> int:
    """Lines that are not blank, comment or docstring."""
    source = path.read_text()
    text = docstring_lines(source)
    return sum(
        1
        for number, line in enumerate(source.splitlines(), 1)
        if number not in text and line.strip() and not line.lstrip().startswith("#")
    )


def test_no_file_outgrows_one_sitting() -> None:
    sources = {str(path.relative_to(SRC)): path.read_text() for path in SRC.rglob("*.py")}
    lengths = {
        name: len(source.splitlines()) - len(docstring_lines(source))
        for name, source in sources.items()
    }
    assert {name: n for name, n in lengths.items() if n > MAX_FILE_LINES} == {}


def test_each_part_stays_within_its_budget() -> None:
    lines = dict.fromkeys(MAX_LINES, 0)
    for path in SRC.rglob("*.py"):
        lines[PARTS.get(path.relative_to(SRC).parts[0], "library")] += code_lines(path)
    assert {part: n for part, n in lines.items() if n > MAX_LINES[part]} == {}


def test_stages_sort_in_the_order_data_moves() -> None:
    stages = sorted(p.stem for p in (SRC / "reuse").iterdir() if not p.stem.startswith("__"))
    assert stages == ["chunks", "keys", "lookup", "place", "repair", "run", "store"]


def test_every_module_says_what_it_is_for() -> None:
    files = SRC.rglob("*.py")
    assert [str(path) for path in files if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_deciding_modules_load_without_torch() -> None:
    names = ["core", "config", "metrics", "reuse.chunks", "reuse.keys", "reuse.lookup"]
    names += ["reuse.run", "reuse.repair", "tiers.memory", "tiers.index"]
    names += ["policy.cost", "policy.guard", "connectors.vllm.scheduler_side"]
    imports = "; ".join(f"import kvboost.{name}" for name in names)
    check = f"import sys; {imports}; import kvboost; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_inner_packages_hold_a_docstring_only() -> None:
    entries = {SRC / "connectors/vllm/__init__.py", SRC / "probe/__init__.py"}  # of others' code
    inits = set(SRC.rglob("*/__init__.py")) - entries
    assert [str(path) for path in inits if len(ast.parse(path.read_text()).body) > 1] == []
