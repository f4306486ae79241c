"""The web application of ``skirl serve-reward``: what a request must be, and what it is answered."""

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skirl.records import FinishReason, RewardSample

__all__ = ["Scores", "make_app", "parse_request"]

Scores = Callable[[Sequence[RewardSample]], Awaitable[list[Any]]]
"""Samples of a request -> what stands for each in the answer."""

BODY_TIMEOUT_S = 60.0


class _Sample(BaseModel):
    """One sample of a request; the text is enough."""

    model_config = ConfigDict(extra="forbid")

    text: str
    id: str = "request"
    index: int = 0
    transcript: str | None = None
    language: str | None = None
    response_ids: list[int] = []
    finish_reason: FinishReason = "stop"
    reference: str | None = None
    reference_language: str | None = None
    seconds: float = 0.0
    row: dict[str, Any] = {}
    messages: list[dict[str, str]] = []
    num_turns: Annotated[int, Field(ge=1)] = 1
    scores: dict[str, float] = {}

    def record(self) -> RewardSample:
        return RewardSample(
            **self.model_dump(exclude={"transcript", "response_ids", "messages"}),
            transcript=self.text if self.transcript is None else self.transcript,
            response_ids=tuple(self.response_ids),
            messages=tuple(self.messages),
        )


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")

    samples: list[_Sample]


def parse_request(body: str | bytes) -> list[RewardSample]:
    """The samples of a request's body. Raises pydantic's ValidationError."""
    return [sample.record() for sample in _Request.model_validate_json(body).samples]


def make_app(scores: Scores, token: str | None, max_body: int, hosts: list[str]) -> ASGIApp:
    """The application.

    Args:
        scores: what scores the samples of a request.
        token: that requests must bear; None asks for none.
        max_body: bytes of a request.
        hosts: names that a request may give as its host; "*" is any.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/score")
    async def score(request: _Request) -> JSONResponse:
        return JSONResponse({"scores": await scores([sample.record() for sample in request.samples])})

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return _error(400, f"the body is not JSON: {first['ctx']['error']}")
        field = ".".join(str(part) for part in first["loc"] if part != "body")
        return _error(422, f"{field or 'the body'}: {first['msg']}", field=field)

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> JSONResponse:
        return _error(error.status_code, f"{error.detail}; there is POST /score and GET /health")

    return TrustedHostMiddleware(_Guard(app, token, max_body), allowed_hosts=hosts)


def _error(status: int, message: str, **more: str) -> JSONResponse:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse({"error": message, **more}, status, headers)


class _Guard:
    """Lets a request through that bears the token and is not too long; before anything of it is parsed."""

    def __init__(self, app: ASGIApp, token: str | None, max_body: int) -> None:
        self._app, self._max_body = app, max_body
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/health":
            await self._app(scope, receive, send)
            return
        answer = self._refuse(dict(scope["headers"]), scope["method"])
        body = b""
        if answer is None:
            answer, body = await self._read(receive)
        if answer is not None:
            await answer(scope, receive, send)
            return
        await self._app(scope, _replay(body, receive), send)

    def _refuse(self, headers: dict[bytes, bytes], method: str) -> JSONResponse | None:
        given = headers.get(b"authorization", b"")
        if self._expected is not None and not hmac.compare_digest(given, self._expected):
            return _error(401, "the request does not bear the right token (Authorization: Bearer ...)")
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if method == "POST" and kind != b"application/json":  # a web page may send other types without asking
            return _error(415, "send JSON, with the header Content-Type: application/json")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body:
            return self._too_long()
        return None

    async def _read(self, receive: Receive) -> tuple[JSONResponse | None, bytes]:
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while True:
                    message = await receive()
                    body += message.get("body", b"")
                    if len(body) > self._max_body:
                        return self._too_long(), b""
                    if not message.get("more_body", False):
                        return None, bytes(body)
        except TimeoutError:
            return _error(408, f"the body did not come within {BODY_TIMEOUT_S:g} s"), b""

    def _too_long(self) -> JSONResponse:
        limit = f"{self._max_body} bytes (--max-body-mb)"
        return _error(413, f"the request is longer than {limit}: send fewer samples at once")


def _replay(body: bytes, receive: Receive) -> Receive:
    """Gives the body that was read already, then whatever comes."""
    rest: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return rest.pop() if rest else await receive()

    return replayed
