"""GET /docs: a page that shows `/openapi.json`, by Swagger UI. It works without a network.

Swagger UI's files come with a package of PyPI (swagger-ui-bundle-v2). The page's policy forbids browsers to fetch
anything from elsewhere, and to run other scripts.
"""

import base64
import hashlib
from pathlib import Path

from aiohttp import web
from swagger_ui_bundle import swagger_ui_path

FILES = frozenset({"swagger-ui.css", "swagger-ui-bundle.js", "favicon-32x32.png"})

SCRIPT = """
SwaggerUIBundle({url: "openapi.json", dom_id: "#swagger-ui", deepLinking: true, tryItOutEnabled: true});
"""

PAGE = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Quire</title>
<link rel="icon" href="docs/favicon-32x32.png">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script>{SCRIPT}</script>
</body>
</html>
"""
"""Its addresses are relative, since a proxy may publish it under any path."""

_DIGEST = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = (
    f"default-src 'self'; script-src 'self' 'sha256-{_DIGEST}'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; frame-ancestors 'none'"
)


async def show_docs(request: web.Request) -> web.Response:
    """Return a page that shows this description, and from which requests can be tried."""
    return web.Response(text=PAGE, content_type="text/html", headers={"Content-Security-Policy": POLICY})


async def show_file(request: web.Request) -> web.FileResponse:
    """Return one of the page's files. Raise 404 for others."""
    name = request.match_info["file"]
    if name not in FILES:
        raise web.HTTPNotFound
    return web.FileResponse(Path(swagger_ui_path) / name)
