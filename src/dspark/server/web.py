"""The page at `/`: static files of this package, without a build step and without other hosts.

They are read once. A strict content policy holds the page to what it is: it loads nothing from
elsewhere, runs no inline script, and cannot be framed. The files know nothing about this server, so
they need no key; everything the page shows it asks for through the same routes as any client.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import Response

FOLDER = Path(__file__).with_name("page")
INDEX = "index.html"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Page:
    """The files by the path under which they are served."""

    def __init__(self, folder: Path = FOLDER) -> None:
        files = sorted(f for f in folder.iterdir() if f.suffix in KINDS)
        self._files = {
            "/" if f.name == INDEX else f"/page/{f.name}": (f.read_bytes(), KINDS[f.suffix])
            for f in files
        }

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(self._files)

    def install(self, app: FastAPI) -> None:
        """Add a route for each file."""
        for path, (content, kind) in self._files.items():
            app.add_api_route(
                path,
                _sender(content, kind),
                methods=["GET", "HEAD"],
                response_model=None,
                include_in_schema=False,
            )


def _sender(content: bytes, kind: str) -> Callable[[], Awaitable[Response]]:
    async def send() -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    return send
