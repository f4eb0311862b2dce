"""The page of `start --ui`: a conversation, and the figures of the server."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from fastapi import APIRouter, Response

_FILE = Path(__file__).with_name("index.html")
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


def page_router() -> APIRouter:
    """Return the route of the page, which may load nothing from elsewhere."""
    html = _FILE.read_text(encoding="utf-8")
    hashes = {
        kind: base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        for kind, content in _INLINE.findall(html)
    }
    policy = (
        f"default-src 'none'; script-src 'sha256-{hashes['script']}'; style-src 'sha256-{hashes['style']}';"
        " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    router = APIRouter()

    @router.get("/", include_in_schema=False)
    async def page() -> Response:
        headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
        return Response(html, media_type="text/html; charset=utf-8", headers=headers)

    return router
