from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import msgspec
import pytest
from anyio.abc import ByteStream
from anyio.streams.tls import TLSStream

from dsec.edge.network.policy import Span
from dsec.edge.network.warden.messages import Credential, Reach
from tests.unit.edge.warden.test_client_hello import made, names, real_hello, records
from tests.unit.edge.warden.world import ALL, ME, OTHER, World, allow, assigned, until_eof

GOOD, BAD, SHARED = "203.0.113.10", "203.0.113.66", "203.0.113.80"
SECRET = "s3cret-value"
KEY = Credential(host="api.example", header="Authorization", value=SECRET)


@pytest.fixture
async def world(world: World) -> World:
    world.server.has("good.example", A=[GOOD])
    world.server.has("other.example", A=[BAD])
    world.server.has("api.example", A=["203.0.113.30"])
    world.server.has("shared.example", A=[SHARED])
    return world


@asynccontextmanager
async def tls(
    world: World, server: str | None, address: str, port: int = 443, source: str = ME
) -> AsyncIterator[ByteStream]:
    world.wants(address, port)
    async with await world.connect(source=source) as stream, secured(world, stream, server) as tls:
        yield tls


@asynccontextmanager
async def secured(
    world: World, stream: ByteStream, server: str | None
) -> AsyncIterator[ByteStream]:
    context = world.authority.client()
    if server is None:
        context.check_hostname = False
    with anyio.fail_after(20):
        wrapped = await TLSStream.wrap(
            stream,
            server_side=False,
            hostname=server,
            ssl_context=context,
            standard_compatible=False,
        )
    async with wrapped:
        yield wrapped


class Answer(msgspec.Struct):
    status: int
    body: bytes

    @property
    def echoed(self) -> dict[str, object]:
        found: dict[str, object] = msgspec.json.decode(self.body)
        return found

    def header(self, name: str) -> list[str]:
        headers = self.echoed["headers"]
        assert isinstance(headers, list)
        return [v for k, v in headers if k == name]


async def get(stream: ByteStream, head: str, *headers: str, body: bytes = b"") -> Answer:
    lines = "\r\n".join([head, *headers, "", ""])
    await stream.send(lines.encode("latin-1") + body)
    return await answer(stream)


async def answer(stream: ByteStream) -> Answer:
    data = b""
    with anyio.fail_after(20):
        while b"\r\n\r\n" not in data:
            data += await stream.receive()
        head, _, body = data.partition(b"\r\n\r\n")
        size = next(
            int(line.split(b":")[1])
            for line in head.lower().split(b"\r\n")
            if line.startswith(b"content-length")
        )
        while len(body) < size:
            body += await stream.receive()
    return Answer(int(head.split()[1]), body)


async def until_reset(stream: ByteStream) -> None:
    with anyio.fail_after(20):
        while True:
            await stream.receive()


async def refused(world: World, data: bytes, address: str, port: int = 443) -> bytes:
    """What a connection that begins with these bytes gets; nothing is dialled for it."""
    before = len(world.sites.dialled)
    world.wants(address, port)
    async with await world.connect() as stream:
        await stream.send(data)
        got = await until_eof(stream)
    assert len(world.sites.dialled) == before
    return got


# TLS


async def test_tls_to_an_allowed_name_at_its_address(world: World) -> None:
    await world.guests.assign(assigned(allow("good.example")))
    await world.ask("good.example")
    async with tls(world, "good.example", GOOD) as stream:
        assert (await get(stream, "GET /x HTTP/1.1", "Host: good.example")).status == 200
    assert [(str(t.addresses[0]), t.port, t.tls) for t in world.sites.dialled] == [
        (GOOD, 443, False)
    ]
    assert world.reasons() == {}


async def test_tls_with_a_hello_in_small_pieces(world: World) -> None:
    await world.guests.assign(assigned(allow("good.example")))
    await world.ask("good.example")
    world.wants(GOOD, 443)
    hello = records(real_hello("good.example")[5:], 100)
    async with await world.connect() as stream:
        for at in range(0, len(hello), 50):
            await stream.send(hello[at : at + 50])
        with anyio.fail_after(20):
            assert (await stream.receive(1))[0] == 22  # the server's hello


async def test_tls_for_a_name_nobody_allowed(world: World) -> None:
    await world.guests.assign(assigned(allow("good.example")))
    await world.ask("good.example")
    alert = await refused(world, real_hello("other.example"), GOOD)
    assert alert == bytes((21, 3, 1, 0, 2, 2, 49))
    assert [(e.reason, e.name, e.address, e.port, e.protocol) for e in world.denied()] == [
        ("name", "other.example", GOOD, 443, "tcp")
    ]


async def test_tls_for_an_allowed_name_at_anothers_address(world: World) -> None:
    await world.guests.assign(assigned(allow("good.example"), allow("other.example")))
    async with tls(world, "good.example", GOOD) as stream:
        await stream.send(b"GET /")
    await refused(world, real_hello("good.example"), BAD)
    assert world.reasons() == {"host_mismatch": 1}


async def test_tls_at_a_port_that_the_name_is_not_allowed_on(world: World) -> None:
    rules = allow("good.example"), allow("shared.example", Span("tcp", 80, 80))
    await world.guests.assign(assigned(*rules))
    async with tls(world, "good.example", GOOD):
        pass
    await refused(world, real_hello("shared.example"), SHARED)
    assert world.reasons() == {"name": 1}


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(made(names(b"good.example") + names(b"good.example")), id="two names"),
        pytest.param(made(names(b"good.example\x00x")), id="NUL"),
        pytest.param(b"\x16\x03\x01\x00\x00", id="empty record"),
        pytest.param(b"SSH-2.0-x\r\n", id="ssh"),
        pytest.param(b"\x80\x2e\x01\x00\x02", id="SSL 2"),
        pytest.param(b"\x00" * 100, id="zeros"),
    ],
)
async def test_what_cannot_be_understood_is_denied(world: World, data: bytes) -> None:
    await world.guests.assign(assigned(allow("good.example")))
    async with tls(world, "good.example", GOOD):
        pass
    await refused(world, data, GOOD)
    assert world.reasons() == {"malformed": 1}


async def test_silence_is_denied_after_a_while(world: World) -> None:
    world.limited(head_s=0.05)
    await world.guests.assign(assigned(allow("good.example")))
    await refused(world, b"", GOOD)
    await refused(world, real_hello("good.example")[:-1], GOOD)
    assert world.reasons() == {"malformed": 2}


async def test_tls_without_a_name_is_for_those_the_address_was_given_for(world: World) -> None:
    await world.guests.assign(assigned(allow("good.example")))
    await world.ask("good.example")
    async with tls(world, None, GOOD) as stream:
        assert (await get(stream, "GET / HTTP/1.1", "Host: x")).status == 200
    await refused(world, real_hello(None), BAD)
    assert world.reasons() == {"malformed": 1}


async def test_an_address_that_is_allowed_itself_needs_no_name(world: World) -> None:
    networks = [Reach(network=f"{BAD}/32", spans=(Span("tcp", 443, 443),))]
    await world.guests.assign(assigned(allow("good.example"), networks=networks))
    async with tls(world, "other.example", BAD) as stream:
        assert (await get(stream, "GET / HTTP/1.1", "Host: x")).status == 200
    await refused(world, real_hello("other.example"), "203.0.113.67")
    assert world.reasons() == {"name": 1}


async def test_the_node_is_never_reached(world: World) -> None:
    networks = [Reach(network="203.0.113.0/24", spans=ALL)]
    await world.guests.assign(assigned(networks=networks))
    async with tls(world, "other.example", BAD):
        pass
    assert await refused(world, real_hello("other.example"), "203.0.113.200") == b""


async def test_a_stranger_is_not_served(world: World) -> None:
    await world.guests.assign(assigned(allow("good.example")))
    async with tls(world, "good.example", GOOD):
        pass
    world.wants(GOOD, 443)
    async with await world.connect(source=OTHER) as stream:
        assert await until_eof(stream) == b""
    assert len(world.sites.dialled) == 1


@pytest.mark.parametrize("kind", ["transparent", "proxy", "dns_tcp"])
async def test_clients_that_are_gone_at_once(world: World, kind: str) -> None:
    await world.guests.assign(assigned(allow("good.example")))
    for _ in range(100):
        with socket.create_connection((ME, world.ports[kind])) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await anyio.lowlevel.checkpoint()
    async with tls(world, "good.example", GOOD) as stream:
        assert (await get(stream, "GET / HTTP/1.1", "Host: x")).status == 200
    assert (await world.ask("good.example")).code == "NOERROR"


async def test_connections_of_a_sandbox_are_bounded(world: World) -> None:
    world.limited(connections=1)
    await world.guests.assign(assigned(allow("good.example")))
    await world.guests.assign(assigned(allow("good.example"), address4=OTHER, sandbox="sb-2"))
    async with tls(world, "good.example", GOOD) as stream:
        assert (await get(stream, "GET / HTTP/1.1", "Host: x")).status == 200
        async with await world.connect() as second:
            assert await until_eof(second) == b""
        async with tls(world, "good.example", GOOD, source=OTHER):
            pass


async def test_an_end_of_one_direction_is_passed_on(world: World) -> None:
    networks = [Reach(network=f"{GOOD}/32", spans=ALL)]
    await world.guests.assign(assigned(networks=networks))
    world.wants(GOOD, 80)
    async with await world.connect("proxy") as stream:
        await stream.send(b"CONNECT 203.0.113.10:9000 HTTP/1.1\r\nHost: 203.0.113.10:9000\r\n\r\n")
        assert (await stream.receive()).startswith(b"HTTP/1.1 200")
        await stream.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await stream.send_eof()
        assert b"200" in await until_eof(stream)


# HTTP


async def test_every_request_of_a_connection_is_checked(world: World) -> None:
    world.server.has("good.example", A=[SHARED])
    world.server.has("other.example", A=[SHARED])
    await world.guests.assign(assigned(allow("good.example"), allow("shared.example")))
    world.wants(SHARED, 80)
    async with await world.connect() as stream:
        for host in ("good.example", "shared.example", "GOOD.example:80"):
            got = await get(stream, "GET /a?b HTTP/1.1", f"Host: {host}")
            assert (got.status, got.echoed["target"]) == (200, "/a?b")
        got = await get(stream, "GET / HTTP/1.1", "Host: other.example")
        assert got.status == 403
        assert await until_eof(stream) == b""
    assert len(world.sites.requests) == 3
    assert [(e.reason, e.name) for e in world.denied()] == [("name", "other.example")]


async def test_a_body_and_its_answer(world: World) -> None:
    await world.guests.assign(assigned(allow("good.example")))
    world.wants(GOOD, 80)
    async with await world.connect() as stream:
        for framing, body in (
            ("Content-Length: 5", b"hello"),
            ("Transfer-Encoding: chunked", b"3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"),
        ):
            got = await get(stream, "POST / HTTP/1.1", "Host: good.example", framing, body=body)
            assert got.echoed["body"] == "hello"
        large = b"x" * 3_000_000
        head = f"POST / HTTP/1.1\r\nHost: good.example\r\nContent-Length: {len(large)}\r\n\r\n"
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stream.send, head.encode() + large)
            assert len(str((await answer(stream)).echoed["body"])) == len(large)


@pytest.mark.parametrize(
    ("head", "headers"),
    [
        ("GET / HTTP/1.1", ["Host: good.example", "Host: other.example"]),
        ("GET / HTTP/1.1", ["Host: good.example, other.example"]),
        ("GET / HTTP/1.1", ["Host: good.example@other.example"]),
        ("GET / HTTP/1.1", ["Host: good.example:81"]),
        ("GET / HTTP/1.1", ["Host: good.example:http"]),
        ("GET / HTTP/1.1", ["Host: "]),
        ("GET / HTTP/1.1", []),
        ("GET / HTTP/1.0", []),
        ("GET http://other.example/ HTTP/1.1", ["Host: good.example"]),
        ("GET http://good.example@other.example/ HTTP/1.1", ["Host: good.example"]),
        ("GET ftp://good.example/ HTTP/1.1", ["Host: good.example"]),
        ("GET good.example HTTP/1.1", ["Host: good.example"]),
        ("CONNECT good.example:80 HTTP/1.1", ["Host: good.example"]),
        ("GET / HTTP/1.1", ["Host : good.example"]),
        ("GET / HTTP/1.1", ["Host: good.example", " folded: x"]),
        ("GET / HTTP/1.1", ["Host: good.example", "Content-Length: 1", "Content-Length: 2"]),
        ("GET / HTTP/1.1", ["Host: good.example", "Transfer-Encoding: gzip, chunked"]),
        ("GET / HTTP/9", ["Host: good.example"]),
    ],
)
async def test_requests_with_two_meanings(world: World, head: str, headers: Sequence[str]) -> None:
    await world.guests.assign(assigned(allow("good.example")))
    world.wants(GOOD, 80)
    async with await world.connect() as stream:
        assert (await get(stream, "GET / HTTP/1.1", "Host: good.example")).status == 200
    data = "\r\n".join([head, *headers, "", ""]).encode()
    got = await refused(world, data, GOOD, 80)
    assert got.split()[1:2] in ([b"400"], [b"405"], [b"501"])
    assert len(world.sites.requests) == 1


async def test_two_framings_become_one(world: World) -> None:
    await world.guests.assign(assigned(allow("good.example")))
    world.wants(GOOD, 80)
    both = "Content-Length: 50", "Transfer-Encoding: chunked"
    async with await world.connect() as stream:
        body = b"5\r\nhello\r\n0\r\n\r\n"
        got = await get(stream, "POST / HTTP/1.1", "Host: good.example", *both, body=body)
    assert got.echoed["body"] == "hello"
    assert (got.header("content-length"), got.header("transfer-encoding")) == ([], ["chunked"])


async def test_headers_about_the_connection_stay_here(world: World) -> None:
    await world.guests.assign(assigned(allow("good.example")))
    world.wants(GOOD, 80)
    async with await world.connect() as stream:
        got = await get(
            stream,
            "GET / HTTP/1.1",
            "Host: good.example",
            "Connection: x-mine, keep-alive",
            "X-Mine: 1",
            "X-Theirs: 2",
            "Proxy-Authorization: Basic eA==",
        )
    assert (got.header("x-mine"), got.header("x-theirs")) == ([], ["2"])
    assert got.header("proxy-authorization") == []


async def test_a_switch_to_another_protocol(world: World) -> None:
    await world.guests.assign(assigned(allow("good.example")))
    world.wants(GOOD, 80)
    async with await world.connect() as stream:
        await stream.send(
            b"GET /echo HTTP/1.1\r\nHost: good.example\r\nUpgrade: echo\r\nConnection: Upgrade\r\n\r\n"
        )
        data = b""
        with anyio.fail_after(20):
            while b"\r\n\r\n" not in data:
                data += await stream.receive()
            assert data.startswith(b"HTTP/1.1 101")
            await stream.send(b"\x00not http")
            assert await stream.receive() == b"\x00not http"


async def test_a_server_that_cannot_be_reached_says_nothing_of_this_host(world: World) -> None:
    world.sites.unreachable.add("good.example")
    await world.guests.assign(assigned(allow("good.example")))
    world.wants(GOOD, 80)
    async with await world.connect() as stream:
        got = await get(stream, "GET / HTTP/1.1", "Host: good.example")
    assert (got.status, b"10.1.2.3" in got.body) == (502, False)


async def test_a_server_that_closed_between_two_requests_is_connected_to_again(
    world: World,
) -> None:
    await world.guests.assign(assigned(allow("good.example")))
    world.wants(GOOD, 80)
    async with await world.connect() as stream:
        for _ in range(3):
            assert (await get(stream, "GET /last HTTP/1.1", "Host: good.example")).status == 200
            assert (await get(stream, "GET /stays HTTP/1.1", "Host: good.example")).status == 200
    assert len(world.sites.requests) == 6


async def test_an_upload_that_waits_to_be_asked_for(world: World) -> None:
    await world.guests.assign(assigned(allow("good.example")))
    world.wants(GOOD, 80)
    async with await world.connect() as stream:
        await stream.send(
            b"POST / HTTP/1.1\r\nHost: good.example\r\nExpect: 100-continue\r\n"
            b"Content-Length: 5\r\n\r\n"
        )
        with anyio.fail_after(20):
            assert (await stream.receive()).startswith(b"HTTP/1.1 100")
        await stream.send(b"hello")
        assert (await answer(stream)).echoed["body"] == "hello"


async def test_an_answer_to_a_head_request_has_no_body(world: World) -> None:
    await world.guests.assign(assigned(allow("good.example")))
    world.wants(GOOD, 80)
    async with await world.connect() as stream:
        await stream.send(b"HEAD / HTTP/1.1\r\nHost: good.example\r\n\r\n")
        with anyio.fail_after(20):
            head = await stream.receive()
        assert head.endswith(b"\r\n\r\n")
        assert b"Content-Length" in head or b"content-length" in head
        assert (await get(stream, "GET / HTTP/1.1", "Host: good.example")).status == 200


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_an_answer_that_breaks_off_does_not_look_whole(world: World, version: str) -> None:
    await world.guests.assign(assigned(allow("good.example")))
    world.wants(GOOD, 80)
    async with await world.connect() as stream:
        await stream.send(f"GET /cut HTTP/{version}\r\nHost: good.example\r\n\r\n".encode())
        with pytest.raises(anyio.BrokenResourceError):
            await until_reset(stream)


async def test_a_connection_that_breaks_off_does_not_look_whole(world: World) -> None:
    networks = [Reach(network=f"{GOOD}/32", spans=ALL)]
    await world.guests.assign(assigned(networks=networks))
    world.wants(GOOD, 80)
    async with await world.connect("proxy") as stream:
        await stream.send(b"CONNECT 203.0.113.10:9000 HTTP/1.1\r\nHost: 203.0.113.10:9000\r\n\r\n")
        assert (await stream.receive()).startswith(b"HTTP/1.1 200")
        await stream.send(b"GET /cut HTTP/1.1\r\nHost: x\r\n\r\n")
        with pytest.raises(anyio.BrokenResourceError):
            await until_reset(stream)


async def test_what_nobody_uses_is_ended(world: World) -> None:
    world.limited(idle_s=0.05)
    await world.guests.assign(assigned(allow("good.example")))
    async with tls(world, "good.example", GOOD) as stream:
        with anyio.fail_after(20), pytest.raises((anyio.BrokenResourceError, anyio.EndOfStream)):
            await stream.receive()
    assert len(world.sites.dialled) == 1


async def test_a_head_without_end(world: World) -> None:
    await world.guests.assign(assigned(allow("good.example")))
    world.wants(GOOD, 80)
    async with await world.connect() as stream:
        await stream.send(b"GET / HTTP/1.1\r\nHost: good.example\r\nX: " + b"x" * 200_000)
        assert b"400" in await until_eof(stream) or not world.sites.dialled


# The explicit proxy


async def test_connect_with_the_same_checks(world: World) -> None:
    await world.guests.assign(assigned(allow("good.example")))
    async with await world.connect("proxy") as stream:
        await stream.send(b"CONNECT good.example:443 HTTP/1.1\r\nHost: good.example:443\r\n\r\n")
        assert (await stream.receive()).startswith(b"HTTP/1.1 200")
        async with secured(world, stream, "good.example") as inner:
            assert (await get(inner, "GET / HTTP/1.1", "Host: x")).status == 200
    async with await world.connect("proxy") as stream:
        await stream.send(b"CONNECT good.example:443 HTTP/1.1\r\nHost: good.example:443\r\n\r\n")
        assert (await stream.receive()).startswith(b"HTTP/1.1 200")
        await stream.send(real_hello("other.example"))
        assert (await until_eof(stream))[:1] == b"\x15"
    assert world.reasons() == {"name": 1}


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("other.example:443", "name"),
        ("good.example:22", "name"),
        ("10.0.0.5:443", "rule"),
        ("169.254.169.254:80", "never"),
        ("[::1]:443", "never"),
        ("[::ffff:127.0.0.1]:443", "never"),
        ("203.0.113.200:443", "never"),
    ],
)
async def test_connect_to_what_is_not_allowed(world: World, target: str, reason: str) -> None:
    await world.guests.assign(assigned(allow("good.example")))
    async with await world.connect("proxy") as stream:
        await stream.send(b"CONNECT good.example:443 HTTP/1.1\r\nHost: good.example\r\n\r\n")
        assert (await stream.receive()).startswith(b"HTTP/1.1 200")
    async with await world.connect("proxy") as stream:
        await stream.send(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
        assert b" 403 " in await until_eof(stream)
    # The tunnel that ended without a word may have been noticed by now, as malformed.
    assert world.reasons() | {"malformed": 0} == {reason: 1, "malformed": 0}


@pytest.mark.parametrize("target", ["good.example", "2130706433:80", "0x7f.1:80", "a b:80", ":80"])
async def test_connect_to_what_is_no_host(world: World, target: str) -> None:
    await world.guests.assign(assigned(allow("good.example"), allow("*", *ALL)))
    async with await world.connect("proxy") as stream:
        await stream.send(f"CONNECT {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert b" 400 " in await until_eof(stream)
    assert world.sites.dialled == []


async def test_a_whole_url(world: World) -> None:
    await world.guests.assign(assigned(allow("good.example")))
    async with await world.connect("proxy") as stream:
        got = await get(stream, "GET http://good.example/p?q HTTP/1.1", "Host: good.example")
        assert (got.echoed["target"], got.header("host")) == ("/p?q", ["good.example"])
        got = await get(stream, "GET http://other.example/ HTTP/1.1", "Host: other.example")
        assert got.status == 403
    assert world.reasons() == {"name": 1}


# Credentials


@pytest.mark.parametrize("kind", ["transparent", "proxy"])
async def test_a_credential_is_set_over_verified_tls(world: World, kind: str) -> None:
    await world.guests.assign(assigned(allow("api.example"), secrets=[KEY]))
    world.wants("203.0.113.30", 80)
    head = "GET / HTTP/1.1" if kind == "transparent" else "GET http://api.example/ HTTP/1.1"
    async with await world.connect(kind) as stream:
        got = await get(
            stream, head, "Host: api.example", "authorization: mine", "AUTHORIZATION: mine too"
        )
    assert got.header("authorization") == [SECRET]
    assert [(t.port, t.tls, t.host) for t in world.sites.dialled] == [(443, True, "api.example")]


async def test_a_header_that_servers_take_for_the_same(world: World) -> None:
    key = Credential(host="api.example", header="X-Api-Key", value=SECRET)
    await world.guests.assign(assigned(allow("api.example"), secrets=[key]))
    world.wants("203.0.113.30", 80)
    async with await world.connect() as stream:
        got = await get(stream, "GET / HTTP/1.1", "Host: api.example", "X_Api_Key: mine")
    assert (got.header("x-api-key"), got.header("x_api_key")) == ([SECRET], [])


async def test_a_credential_rotates_on_a_live_connection(world: World) -> None:
    await world.guests.assign(assigned(allow("api.example"), secrets=[KEY]))
    world.wants("203.0.113.30", 80)
    async with await world.connect() as stream:
        assert (await get(stream, "GET / HTTP/1.1", "Host: api.example")).header(
            "authorization"
        ) == [SECRET]
        new = msgspec.structs.replace(KEY, value="next")
        await world.guests.assign(assigned(allow("api.example"), secrets=[new]))
        assert (await get(stream, "GET / HTTP/1.1", "Host: api.example")).header(
            "authorization"
        ) == ["next"]


async def test_a_credential_taken_away_ends_what_used_it(world: World) -> None:
    await world.guests.assign(assigned(allow("api.example"), secrets=[KEY]))
    world.wants("203.0.113.30", 80)
    async with await world.connect() as stream:
        assert (await get(stream, "GET / HTTP/1.1", "Host: api.example")).status == 200
        await world.guests.assign(assigned(allow("api.example")))
        assert await until_eof(stream) == b""
    async with await world.connect() as stream:
        got = await get(stream, "GET / HTTP/1.1", "Host: api.example")
    assert got.header("authorization") == []


async def test_a_credential_goes_to_no_other_host(world: World) -> None:
    everything = [Reach(network="0.0.0.0/0", spans=ALL)]
    plain = msgspec.structs.replace(KEY, scheme="http")
    rules = allow("api.example"), allow("good.example"), allow("*", *ALL)
    await world.guests.assign(assigned(*rules, networks=everything, secrets=[plain]))
    world.wants("203.0.113.30", 80)
    async with await world.connect() as stream:
        assert (await get(stream, "GET / HTTP/1.1", "Host: api.example")).header(
            "authorization"
        ) == [SECRET]
    world.wants(BAD, 80)  # an address of the attacker's, who lies about the host
    async with await world.connect() as stream:
        got = await get(stream, "GET / HTTP/1.1", "Host: api.example")
        assert (got.status, got.header("authorization")) == (200, [])
        got = await get(stream, "GET / HTTP/1.1", "Host: good.example")
        assert got.header("authorization") == []


async def test_a_server_that_is_not_who_it_should_be_gets_no_credential(world: World) -> None:
    world.server.has("forged.example", A=[BAD])
    forged = Credential(host="forged.example", header="Authorization", value=SECRET)
    rules = allow("api.example"), allow("forged.example")
    await world.guests.assign(assigned(*rules, secrets=[KEY, forged]))
    async with await world.connect("proxy") as stream:
        assert (
            await get(stream, "GET http://api.example/ HTTP/1.1", "Host: api.example")
        ).status == 200
        got = await get(stream, "GET http://forged.example/ HTTP/1.1", "Host: forged.example")
        assert got.status == 502
    assert len(world.sites.requests) == 1


async def test_a_credential_is_in_no_representation() -> None:
    assert SECRET not in f"{KEY!r} {KEY} {[KEY]} {assigned(secrets=[KEY])!r}"


# Narrowing


async def test_narrowing_cuts_what_is_no_longer_allowed_and_nothing_else(world: World) -> None:
    await world.guests.assign(assigned(allow("good.example"), allow("other.example")))
    async with (
        tls(world, "good.example", GOOD) as stays,
        tls(world, "other.example", BAD) as goes,
    ):
        for stream in (stays, goes):
            assert (await get(stream, "GET / HTTP/1.1", "Host: x")).status == 200
        await world.guests.assign(assigned(allow("good.example")))
        assert await until_eof(goes) == b""
        assert (await get(stays, "GET / HTTP/1.1", "Host: x")).status == 200
        world.guests.forget(ME)
        assert await until_eof(stays) == b""


async def test_narrowing_while_a_connection_is_being_made(world: World) -> None:
    arrived, go_on = anyio.Event(), anyio.Event()
    connect = world.sites.connect

    async def slowly(target: object) -> ByteStream:
        arrived.set()
        await go_on.wait()
        return await connect(target)  # type: ignore[arg-type]

    world.sites.connect = slowly  # type: ignore[method-assign]
    world.limited()
    await world.guests.assign(assigned(allow("good.example")))
    world.wants(GOOD, 443)
    async with await world.connect() as stream:
        await stream.send(real_hello("good.example"))
        await arrived.wait()
        await world.guests.assign(assigned())
        assert await until_eof(stream) == b""
    assert world.sites.dialled == []
    go_on.set()
