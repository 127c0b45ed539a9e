"""A proxy between a store and its server that misbehaves as it is told."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

import aiohttp
import anyio
from aiohttp import web
from yarl import URL

Fault = Literal["hang", "truncate", "flip", "drip", "too-much", "cut", "500", "507", "403"]
_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length"})


@dataclass
class Proxy:
    """Passes requests on; those of a method that is to fail, with a fault, a number of times."""

    address: str = ""
    fault: Fault | None = None
    method: str = "GET"
    times: int = 1 << 30
    after: int = 0
    """Requests of the method that are let through first."""
    faults: int = 0
    requests: int = 0
    peers: set[int] = field(default_factory=set)
    """Ports that connected: one for each connection."""
    _upstream: str = ""
    _client: aiohttp.ClientSession | None = None

    def misbehave(
        self, fault: Fault, method: str = "GET", times: int = 1 << 30, after: int = 0
    ) -> None:
        self.fault, self.method, self.times, self.after = fault, method, times, after
        self.faults = 0

    def behave(self) -> None:
        self.fault = None

    def _due(self, method: str) -> Fault | None:
        if self.fault is None or method != self.method or self.faults >= self.times:
            return None
        if self.after > 0:
            self.after -= 1
            return None
        self.faults += 1
        return self.fault

    async def handle(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        self.requests += 1
        self.peers.add(request.transport.get_extra_info("peername")[1])
        fault = self._due(request.method)
        if fault == "cut":
            await request.content.readany()
            request.transport.abort()
            return web.Response()
        if fault in ("500", "507", "403"):
            await request.read()
            return web.Response(status=int(fault), text="no")
        if fault == "hang" and request.method == "HEAD":
            await anyio.sleep_forever()
        status, headers, body = await self._pass_on(request)
        if fault is None or request.method == "HEAD":
            return _whole(request, status, headers, body)
        return await _spoiled(request, fault, status, headers, body)

    async def _pass_on(self, request: web.Request) -> tuple[int, dict[str, str], bytes]:
        assert self._client is not None
        url = URL(f"http://{self._upstream}{request.raw_path}", encoded=True)
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP}
        body = await request.read()
        async with self._client.request(
            request.method,
            url,
            headers=headers,
            data=io.BytesIO(body) if body else None,
            allow_redirects=False,
        ) as answer:
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in _HOP}
            if request.method == "HEAD" and "Content-Length" in answer.headers:
                kept["Content-Length"] = answer.headers["Content-Length"]
            return answer.status, kept, await answer.read()


def _whole(
    request: web.Request, status: int, headers: dict[str, str], body: bytes
) -> web.StreamResponse:
    if request.method == "HEAD":
        return web.Response(status=status, headers=headers)
    return web.Response(status=status, headers=headers, body=body)


async def _spoiled(
    request: web.Request, fault: Fault, status: int, headers: dict[str, str], body: bytes
) -> web.StreamResponse:
    if fault == "flip":
        body = bytes([body[0] ^ 1]) + body[1:]
        return web.Response(status=status, headers=headers, body=body)
    response = web.StreamResponse(status=status, headers=headers)
    response.content_length = len(body)
    if fault == "too-much":
        body += b"x" * 1000
        response.content_length = len(body)
    if fault == "hang" and not body:
        await anyio.sleep_forever()  # headers alone would be the whole answer
    await response.prepare(request)
    if fault == "too-much":
        await response.write(body)
    elif fault == "truncate":
        await response.write(body[: len(body) // 2])
        assert request.transport is not None
        request.transport.close()
    elif fault == "drip":
        for at in range(len(body)):
            await response.write(body[at : at + 1])
            await anyio.sleep(0.05)
    else:
        await anyio.sleep_forever()
    return response


@asynccontextmanager
async def proxy(upstream: str) -> AsyncIterator[Proxy]:
    """A proxy before host:port, which at first behaves."""
    made = Proxy(_upstream=upstream)
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", made.handle)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    async with aiohttp.ClientSession(
        auto_decompress=False,
        skip_auto_headers=["User-Agent", "Accept", "Accept-Encoding", "Content-Type"],
    ) as client:
        made._client = client
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        made.address = f"{host}:{port}"
        try:
            yield made
        finally:
            await runner.cleanup()
