"""The page of `start --ui`: a conversation, and the figures of the server."""

from __future__ import annotations

import base64
import hashlib
import re
from html import escape
from pathlib import Path

from fastapi import APIRouter, Response

_FOLDER = Path(__file__).parent
_SCRIPT = re.compile(r'<script src="(\w+\.js)"></script>')
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


def page_router(start_again: str = "") -> APIRouter:
    """Return the route of the page, which may load nothing from elsewhere: its scripts are in the one file.

    `start_again` is the command that it names when the server is gone.
    """
    html = _SCRIPT.sub(
        lambda found: f"<script>\n{(_FOLDER / found[1]).read_text(encoding='utf-8')}</script>",
        (_FOLDER / "index.html").read_text(encoding="utf-8"),
    ).replace('name="start" content=""', f'name="start" content="{escape(start_again)}"')
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, content in _INLINE.findall(html):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    policy = (
        f"default-src 'none'; script-src {' '.join(hashes['script'])}; style-src {' '.join(hashes['style'])};"
        " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    router = APIRouter()

    @router.get("/", include_in_schema=False)
    async def page() -> Response:
        headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}
        return Response(html, media_type="text/html; charset=utf-8", headers=headers)

    return router
