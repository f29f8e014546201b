"""Guards in front of all routes (the name of the host, the key, the size of the body), and what they are given: API
keys in a file, and the TLS certificate of the server."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import os
import ssl
from collections.abc import Collection, Sequence
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tiermoe.errors import ConfigError
from tiermoe.serve.dialects import Refused, error_body, retry_after
from tiermoe.serve.intake import Intake, Share, too_large

LOOPBACK = ("localhost", "127.0.0.1", "::1")
_OPEN = ("/", "/health", "/metrics")  # asked without a key
_BODY_S = 60  # for a body to come
_DRAINING_S = 10  # of reading a body that is refused, so that the client reads why


class Hosts:
    """Names of a server without a key, as clients may call it. A web page whose name is made to point to this machine
    (DNS rebinding) would pass every other check of a browser.

    names: in addition to the loopback's; '*' is any. host: address that the server listens on; if that is every
    address, any address will do, since a rebound name is none."""

    def __init__(self, host: str, names: Collection[str] = ()) -> None:
        self._names = {*LOOPBACK, host.lower(), *map(_name, names)}
        self._addresses = _is_address(host) and ipaddress.ip_address(host).is_unspecified

    def __contains__(self, header: str) -> bool:
        """header: `Host`, with a port or without."""
        name = _name(header)
        return name in self._names or "*" in self._names or (self._addresses and _is_address(name))


def _name(host: str) -> str:
    """The name of a host, without a port and without the brackets of an IPv6 address."""
    host = host.strip().lower()
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def _is_address(name: str) -> bool:
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return False


def refusal(path: str, error: Refused) -> JSONResponse:
    """The answer to a refused request, in the shape of the dialect that its path speaks."""
    return JSONResponse(error_body(path, error), error.status, retry_after(error))


async def until_left(receive: Receive) -> None:
    """Waits until the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Guard:
    """ASGI middleware that refuses requests before they reach a route.

    keys: one of which a client must have; empty: none is needed. hosts: what `Host` may be; None: anything."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], hosts: Hosts | None, intake: Intake) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._hosts = hosts
        self._intake = intake

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        incoming, refusal = _Incoming(receive), None
        with Share(self._intake) as share:
            try:
                self._check(scope, Headers(scope=scope))
                body = await _whole(incoming, share)
            except Refused as error:
                refusal = error
            else:
                if body is not None:
                    await self._app(scope, _again(body, receive), send)
        if refusal is not None:  # which takes a while, and holds nothing
            await self._refuse(refusal, scope, incoming, send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Refused for what is known before the body."""
        host = headers.get("host", "")
        if self._hosts is not None and host not in self._hosts:
            raise Refused(403, f"this server is not called '{host}'; --allowed-hosts names what it is called")
        if not self._knows(scope, headers):
            raise Refused(401, "the API key is missing or wrong", kind="authentication_error", code="invalid_api_key")
        length = headers.get("content-length")
        if length is not None and "transfer-encoding" in headers:
            raise Refused(400, "a request has Content-Length or Transfer-Encoding, not both")
        if length is not None and length.isdecimal() and int(length) > self._intake.largest_body:
            raise too_large(self._intake.largest_body)

    def _knows(self, scope: Scope, headers: Headers) -> bool:
        if not self._keys or scope["path"] in _OPEN or scope["method"] == "OPTIONS":
            return True
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = headers.get("x-api-key") or (token.strip() if scheme.lower() == "bearer" else "")
        # a sum: `any` would end at the key that is right, and its time would say which
        return sum(hmac.compare_digest(given.encode(), key) for key in self._keys) > 0

    async def _refuse(self, error: Refused, scope: Scope, incoming: _Incoming, send: Send) -> None:
        """Answers with an error and reads on for a while: a connection that is closed with an unread body is reset, and
        the client never sees the answer."""
        answer = refusal(scope["path"], error)
        answer.headers["Connection"] = "close"
        await send({"type": "http.response.start", "status": answer.status_code, "headers": answer.raw_headers})
        await send({"type": "http.response.body", "body": answer.body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAINING_S):
                while not incoming.ended:
                    await incoming.part()
        await send({"type": "http.response.body", "body": b""})


class _Incoming:
    """A body that comes in parts."""

    def __init__(self, receive: Receive) -> None:
        self.ended = False  # whether all of it has come, or the client has left
        self.left = False  # whether the client has left
        self._receive = receive

    async def part(self) -> bytes:
        message = await self._receive()
        self.left = message["type"] == "http.disconnect"
        self.ended = not message.get("more_body", False)
        part: bytes = message.get("body", b"")
        return part


async def _whole(incoming: _Incoming, share: Share) -> bytes | None:
    """The body; None if the client leaves. Refused if it is too large, or takes too long."""
    parts = list[bytes]()
    try:
        async with asyncio.timeout(_BODY_S):
            while not incoming.ended:
                parts.append(await incoming.part())
                share.hold_part(parts[-1])
    except TimeoutError:
        raise Refused(408, f"the body has not come within {_BODY_S} seconds") from None
    if incoming.left:
        return None
    body = b"".join(parts)
    await share.hold_values(body)
    return body


def _again(body: bytes, receive: Receive) -> Receive:
    """Receiver of the body in one message, and of the messages after it."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


# --- files of keys and certificates ---


_OTHERS = 0o077  # bits of a mode that let others than the owner at a file


def read_keys(path: Path) -> list[str]:
    """The API keys of a file: one a line, without empty lines and those that begin with '#'.

    ConfigError if it cannot be read, others than its owner may read or write it, or it has no key, or one that no
    HTTP header can have."""
    try:
        with path.open("rb") as file:
            mode, data = os.fstat(file.fileno()).st_mode & 0o777, file.read()
    except OSError as error:
        raise ConfigError(f"cannot read the API keys in {path}: {error.strerror}") from error
    if mode & _OTHERS:
        raise ConfigError(f"others may read or write the API keys in {path} (mode {mode:o}); chmod 600 {path}")
    keys = list[str]()
    for number, line in enumerate(data.splitlines(), 1):
        key = line.strip()
        if not key or key.startswith(b"#"):
            continue
        if not all(33 <= byte <= 126 for byte in key):
            raise ConfigError(f"line {number} of {path} is no API key: visible ASCII characters alone, without blanks")
        keys.append(key.decode())
    if not keys:
        raise ConfigError(f"{path} has no API key; write one a line, or leave --api-key-file out")
    return keys


def check_certificate(certfile: Path, keyfile: Path | None) -> None:
    """ConfigError if the files are no certificate chain and its private key, in PEM and without a passphrase.
    keyfile: None if the certificate's file has the key too."""
    for what, path in (("certificate", certfile), ("private key", keyfile)):
        if path is None:
            continue
        try:
            path.open("rb").close()
        except OSError as error:
            raise ConfigError(f"cannot read the {what} {path}: {error.strerror}") from error
    private = keyfile or certfile

    def no_passphrase() -> str:
        raise ConfigError(f"the private key {private} has a passphrase; openssl pkey -in {private} -out KEY removes it")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, no_passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"the private key {private} is not that of the certificate {certfile}") from error
        named = f"{certfile} and {keyfile} are" if keyfile is not None else f"{certfile} is"
        where = "--ssl-certfile takes a certificate, --ssl-keyfile its private key"
        raise ConfigError(f"{named} no certificate with its private key in PEM; {where}") from error
