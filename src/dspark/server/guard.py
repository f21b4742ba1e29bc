"""What is refused before it is read: requests without the key, and bodies that are too large.

Plain ASGI rather than a route's business, so that it holds for every path, also for those that do
not exist. Without the key only /health answers, and the files of the page, which hold nothing of
this server; what the page asks for needs the key.
"""

from __future__ import annotations

import hmac

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dspark.server.errors import ApiError


class Guard:
    def __init__(
        self, app: ASGIApp, *, api_key: str | None, max_body: int, open_paths: frozenset[str]
    ) -> None:
        self._app, self._max_body, self._open_paths = app, max_body, open_paths
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self._refusal(scope["path"], headers)
        if refusal is not None:
            await refusal.response(scope, receive, send)
            return
        await self._app(scope, self._limited(receive), send)

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        if self._key is not None and path not in self._open_paths:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            right = hmac.compare_digest(given.strip().encode("latin-1"), self._key)
            if scheme.lower() != "bearer" or not right:
                return ApiError(
                    401,
                    "the API key is missing or wrong: send Authorization: Bearer KEY",
                    kind="authentication_error",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        length = headers.get("content-length", "0")
        if len(length) > 18 or (length.isdigit() and int(length) > self._max_body):
            return ApiError(413, self._too_large, code="body_too_large")
        return None

    @property
    def _too_large(self) -> str:
        return f"the body is larger than {self._max_body} bytes"

    def _limited(self, receive: Receive) -> Receive:
        """`receive` that counts, for a body that does not say its length."""
        seen = 0

        async def limited() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_body:
                raise HTTPException(413, self._too_large)
            return message

        return limited
