"""The page at `/`: no scripts, nothing loaded from elsewhere, nothing that needs a key."""

from __future__ import annotations

from html import escape

from starlette.responses import HTMLResponse

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>KVBoost</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 38rem; margin: 3rem auto; padding: 0 1rem;
  color: #1c1c1e; background: #fff }}
h1 {{ margin-bottom: 0 }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1.5rem }}
dt {{ color: #6b6b70 }}
dd {{ margin: 0 }}
code {{ background: #f2f2f4; padding: .1rem .3rem; border-radius: .2rem }}
</style>
</head>
<body>
<h1>KVBoost</h1>
<p>An OpenAI-compatible server that reuses the KV cache across requests.</p>
<dl>
{facts}
</dl>
<p>Endpoints:</p>
<ul>
<li><a href="/health"><code>/health</code></a> and <a href="/ready"><code>/ready</code></a></li>
<li><a href="/v1/models"><code>/v1/models</code></a></li>
<li><a href="/metrics"><code>/metrics</code></a> for Prometheus</li>
<li>{api}: every path and body</li>
</ul>
<p>Clients of OpenAI's API use <code>/v1</code> as their base URL. The guide is
<code>docs/guides/server.md</code> in the project.</p>
</body>
</html>
"""


def page(model: str | None, version: str, api: str, *, is_ready: bool) -> HTMLResponse:
    """The public facts: no model name where that needs a key. `api`: path of the docs."""
    facts = {
        "Status": "ready" if is_ready else "shutting down",
        "Model": "shown to clients with an API key" if model is None else model,
        "Version": version,
    }
    rows = "\n".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in facts.items())
    link = f'<a href="{api}"><code>{api}</code></a>'
    return HTMLResponse(
        PAGE.format(facts=rows, api=link), headers={"Content-Security-Policy": POLICY}
    )
