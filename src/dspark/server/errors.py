"""What a client is told when something is wrong, in OpenAI's form.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

Every error leaves through here: what a route raises, a body that does not validate, an unknown
path, a bug. Status codes: 400 the request, 401 the key, 404 the path or the model, 413 the size of
the body, 429 a full queue, 503 a model that is not loaded yet, 500 this server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from dspark.errors import InvalidRequestError
from dspark.types import SamplingParams

RETRY_AFTER = {"Retry-After": "1"}
MAX_MESSAGE = 400
"""Characters of a message: it quotes what was sent, which may be long."""


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.kind, self.headers = kind, dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def response(self) -> Json:
        return Json(self.body, self.status, self.headers)


def dumps(value: Any) -> bytes:
    """JSON in UTF-8. Half a surrogate pair, which a client may send and an error may quote, has no
    UTF-8; the replacement is its JSON escape."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


class Json(Response):
    """A response with a JSON body."""

    media_type = "application/json"

    def __init__(
        self, value: Any, status_code: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(dumps(value), status_code, headers)


def loading(failed: bool) -> ApiError:
    """The model is not there yet, or will never be."""
    return ApiError(
        503,
        "the model could not be loaded" if failed else "the model is still being loaded",
        kind="service_unavailable",
        code="model_failed" if failed else "model_loading",
        headers=RETRY_AFTER,
    )


def queue_full(limit: int) -> ApiError:
    return ApiError(
        429,
        f"{limit} texts are being generated or wait already: try again later",
        kind="rate_limit_error",
        code="queue_full",
        headers=RETRY_AFTER,
    )


def of_engine(error: BaseException) -> ApiError:
    """What the engine raised, for a client: its own words if the request is wrong."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError):
        message = str(error)
        field = re.match(r"[a-z_]*", message)
        names = {f.name for f in fields(SamplingParams)}
        return ApiError(400, message, param=field[0] if field and field[0] in names else None)
    return ApiError(500, "the engine failed; the server's log says how", kind="server_error")


def of_validation(errors: list[Any]) -> ApiError:
    """The first thing that is wrong with a body, by the name of its field."""
    first = errors[0]
    context = first.get("ctx") or {}
    path = [str(p) for p in first["loc"] if p != "body"]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {context.get('error', first['msg'])}")
    if not path and first["type"] in ("model_attributes_type", "not_an_object"):
        return ApiError(
            400, "the body must be a JSON object, sent with Content-Type: application/json"
        )
    param = str(context.get("field") or ".".join(path)) or None
    message = str(first["msg"])
    if param and not message.startswith(param):
        message = f"{param}: {message}"
    return ApiError(400, _short(message), param=param and _short(param))


def _short(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 3] + "..."


def install(app: FastAPI) -> None:
    """Answer every error of `app` in OpenAI's form."""

    async def api(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response

    async def engine(request: Request, error: Exception) -> Response:
        return of_engine(error).response

    async def validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return of_validation(list(error.errors())).response

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = str(error.detail)
        if error.status_code == 404:
            message = f"there is no {request.method} {_short(request.url.path)}"
        return ApiError(error.status_code, message, headers=error.headers).response

    async def bug(request: Request, error: Exception) -> Response:
        return ApiError(
            500, "internal error; the server's log has it", kind="server_error"
        ).response

    app.add_exception_handler(ApiError, api)
    app.add_exception_handler(InvalidRequestError, engine)
    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, bug)
