"""How the site is built: `just site`. Its source is the repository, so links are as on GitHub."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

import kvboost  # noqa: E402

project = "KVBoost"
author = "the KVBoost authors"
project_copyright = author
release = version = kvboost.__version__

root_doc = "docs/index"
include_patterns = ["docs/**.md", "*.md", "benchmarks/report/report.md"]
exclude_patterns = [".*", "build", "src", "tests"]
smartquotes = False  # flags have two dashes
default_role = "code"  # docstrings write `names` as Markdown does
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "sphinx_design",
]

nitpicky = True
nitpick_ignore_regex = [("py:class", r"[\w.\[\]]+")]  # types of signatures that have no entry

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

autoclass_content = "both"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = False

html_theme = "furo"
html_title = "KVBoost"
html_logo = html_favicon = "_static/logo.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["_extra"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#0b6e63",
        "color-brand-content": "#0b6e63",
    },
    "dark_css_variables": {
        "color-brand-primary": "#5fc9bb",
        "color-brand-content": "#5fc9bb",
    },
}
pygments_style = "friendly"
pygments_dark_style = "github-dark"

linkcheck_ignore = [r"https?://(127\.0\.0\.1|localhost)"]


def read_docstring(
    app: Sphinx, what: str, name: str, thing: object, options: Any, lines: list[str]
) -> None:
    """Read Google's style; as that of a function, since "a: b" of an attribute would be a type."""
    config = Config(napoleon_use_rtype=False)
    lines[:] = GoogleDocstring(lines, config, app, "function", name, thing, options).lines()


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", read_docstring)
