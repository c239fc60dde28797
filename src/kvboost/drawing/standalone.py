"""A drawing as a file of its own, with colours for light and dark pages."""

from collections.abc import Mapping

# An image in a page of somebody else's has no style sheet but its own.
_STYLE = """
:root {{ --ink: #1c1e21; --soft: #555b63; --grid: #e6e7e3; --paper: #fdfdfb;
  {light} }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e4e6ea; --soft: #a3aab4; --grid: #2a2e36;
  --paper: #14161a; {dark} }} }}
svg {{ font: 11px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; background: var(--paper); }}
text {{ fill: var(--ink); }} .tick, .axis {{ fill: var(--soft); font-size: 10px; }}
.grid {{ stroke: var(--grid); }} .mark, .leader {{ stroke: var(--soft); }}
.stroke {{ fill: none; stroke-width: 1.8; }}
{classes}
"""


def standalone(drawn: str, colours: Mapping[str, tuple[str, str]], width: int) -> str:
    """Return a drawing as a file of its own.

    Args:
        drawn: The drawing (SVG).
        colours: For each class the colour on a light and on a dark page.
        width: In pixels, where it is shown.
    """
    style = _STYLE.format(
        light=" ".join(f"--{name}: {light};" for name, (light, _) in colours.items()),
        dark=" ".join(f"--{name}: {dark};" for name, (_, dark) in colours.items()),
        classes="\n".join(
            f".fill.{name} {{ fill: var(--{name}); }} .stroke.{name} {{ stroke: var(--{name}); }}"
            for name in colours
        ),
    )
    opening, rest = drawn.split(">", 1)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" '
    return f"{opening.replace('<svg ', head, 1)}><style>{style}</style>{rest}\n"
