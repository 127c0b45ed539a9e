from __future__ import annotations

import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.edge.network.warden.client_hello import (
    MAX_HELLO_BYTES,
    MalformedHello,
    kind_of,
    read_hello,
)


def real_hello(server: str | None, **changes: object) -> bytes:
    context = ssl.create_default_context()
    context.check_hostname = False
    for name, value in changes.items():
        setattr(context, name, value)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_hostname=server)
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


def records(body: bytes, size: int) -> bytes:
    """A handshake message cut into records."""
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"\x16\x03\x01" + len(p).to_bytes(2, "big") + p for p in pieces)


HELLO = real_hello("pypi.example.org")
BODY = HELLO[5:]


def extension(kind: int, body: bytes) -> bytes:
    return kind.to_bytes(2, "big") + len(body).to_bytes(2, "big") + body


def names(*hosts: bytes, kind: int = 0) -> bytes:
    listed = b"".join(bytes([kind]) + len(h).to_bytes(2, "big") + h for h in hosts)
    return extension(0, len(listed).to_bytes(2, "big") + listed)


def made(extensions: bytes, *, version: bytes = b"\x03\x03", rest: bytes = b"") -> bytes:
    body = version + bytes(32) + b"\x00" + b"\x00\x02\x13\x01" + b"\x01\x00"
    body += len(extensions).to_bytes(2, "big") + extensions + rest
    return records(b"\x01" + len(body).to_bytes(3, "big") + body, 1 << 14)


@pytest.mark.parametrize(
    "changes",
    [{}, {"maximum_version": ssl.TLSVersion.TLSv1_2}, {"minimum_version": ssl.TLSVersion.TLSv1_3}],
)
def test_a_real_hello_names_its_server(changes: dict[str, object]) -> None:
    hello = read_hello(real_hello("PyPI.Example.org", **changes))
    assert hello is not None
    assert hello.server == "pypi.example.org"


def test_a_real_hello_without_a_server() -> None:
    hello = read_hello(real_hello(None))
    assert hello is not None
    assert hello.server is None


def test_every_truncation_waits_for_more() -> None:
    assert [read_hello(HELLO[:end]) for end in range(len(HELLO))] == [None] * len(HELLO)


@pytest.mark.parametrize("size", [10, 100, 250, len(BODY) - 1, len(BODY)])
def test_every_fragmentation_is_the_same_hello(size: int) -> None:
    data = records(BODY, size)
    assert read_hello(data) == read_hello(HELLO)
    assert [read_hello(data[:end]) for end in range(len(data))] == [None] * len(data)


def test_a_hello_in_too_many_records() -> None:
    with pytest.raises(MalformedHello):
        read_hello(records(BODY, 2))


def test_what_follows_in_later_records_does_not_matter() -> None:
    assert read_hello(HELLO + b"\x14\x03\x03\x00\x01\x01") == read_hello(HELLO)


def test_the_made_hello_is_one() -> None:
    hello = read_hello(made(names(b"a.example")))
    assert hello is not None
    assert hello.server == "a.example"


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(made(names(b"a.example") + names(b"b.example")), id="server name twice"),
        pytest.param(made(names(b"a.example", b"b.example")), id="two names"),
        pytest.param(made(names()), id="no name in the list"),
        pytest.param(made(names(b"a.example", kind=1)), id="another kind of name"),
        pytest.param(made(names(b"")), id="empty name"),
        pytest.param(made(names(b"a.example.")), id="final dot"),
        pytest.param(made(names(b"a..example")), id="empty label"),
        pytest.param(made(names(b"a.example\x00.evil")), id="NUL"),
        pytest.param(made(names(b"a.example\nevil")), id="newline"),
        pytest.param(made(names(b"a" * 254)), id="long name"),
        pytest.param(made(names("ä.example".encode())), id="not ASCII"),
        pytest.param(made(extension(0, b"\x00\x05\x00\x00\x01a\x00")), id="vector too short"),
        pytest.param(made(extension(0, b"\x00\xff\x00\x00\x01a")), id="vector too long"),
        pytest.param(made(names(b"a.example")[:-1]), id="extension too long"),
        pytest.param(made(names(b"a.example"), rest=b"x"), id="something after"),
        pytest.param(made(names(b"a.example"), version=b"\x02\x00"), id="version 2"),
        pytest.param(
            HELLO[:3] + (len(BODY) + 1).to_bytes(2, "big") + BODY + b"\x01", id="in record"
        ),
        pytest.param(b"\x16\x03\x01\x00\x00", id="empty record"),
        pytest.param(b"\x16\x03\x01\xff\xff", id="huge record"),
        pytest.param(b"\x16\x03\x01\x00\x04\x01\xff\xff\xff", id="huge message"),
        pytest.param(b"\x16\x03\x01\x00\x04\x02", id="server hello"),
        pytest.param(b"\x16\x02", id="no version"),
        pytest.param(HELLO[:100] + b"\x17" * 5 + HELLO[100:], id="shifted"),
    ],
)
def test_malformed(data: bytes) -> None:
    with pytest.raises(MalformedHello):
        read_hello(data)


def test_another_record_in_between() -> None:
    cut = records(BODY, 100)
    with pytest.raises(MalformedHello):
        read_hello(cut[:105] + b"\x17\x03\x03\x00\x01x" + cut[105:])


@given(st.binary(max_size=200), st.integers(0, len(HELLO)))
def test_any_bytes_are_understood_wait_or_are_malformed(data: bytes, at: int) -> None:
    for hostile in (data, HELLO[:at] + data, HELLO[:at] + data + HELLO[at:]):
        try:
            read_hello(hostile)
        except MalformedHello:
            continue


def test_it_does_not_wait_for_ever() -> None:
    body = b"\x01" + (MAX_HELLO_BYTES - 4).to_bytes(3, "big")
    data = records(body + bytes(MAX_HELLO_BYTES), 1 << 14)
    with pytest.raises(MalformedHello):
        read_hello(data)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", None),
        (b"\x16", "tls"),
        (b"G", None),
        (b"GET /", "http"),
        (b"PROPFIND /", "http"),
        (b"get /", "other"),
        (b"SSH-2.0-x", "other"),
        (b"\x80\x2e\x01\x03\x01", "other"),
        (b"A" * 30, "other"),
        (b" GET /", "other"),
        (b"\x00", "other"),
    ],
)
def test_kinds(data: bytes, kind: str | None) -> None:
    assert kind_of(data) == kind
