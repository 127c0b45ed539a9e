"""The two bytes after a chunk must be CR LF, however they arrive."""

import sys

sys.path.insert(0, __file__.rpartition("/")[0])
from grading import Grader

grader = Grader.from_argv()
READ = r"""
import h11
HEAD = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
def read(*pieces):
    server = h11.Connection(our_role=h11.SERVER)
    server.receive_data(HEAD)
    server.next_event()
    body, pieces = b"", list(pieces)
    while True:
        event = server.next_event()
        if event is h11.NEED_DATA:
            if not pieces:
                return [body.decode(), "more"]
            server.receive_data(pieces.pop(0))
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            return [body.decode(), "end", [[k.decode(), v.decode()] for k, v in event.headers]]
def refused(*pieces):
    try:
        return read(*pieces)
    except h11.RemoteProtocolError:
        return "refused"
def singly(data):
    return [data[i:i + 1] for i in range(len(data))]
"""

BAD = [
    b"5\r\nhelloXX0\r\n\r\n",
    b"5\r\nhello\n\n0\r\n\r\n",
    b"5\r\nhello\rX0\r\n\r\n",
    b"5\r\nhelloX\n0\r\n\r\n",
    b"1\r\na\r\n5\r\nhello\n\r0\r\n\r\n",
]
GOOD = b"5\r\nhello\r\n6;x=y\r\n world\r\n0\r\nSome: trailer\r\n\r\n"
READS_AS = ["hello world", "end", [["some", "trailer"]]]

grader.check(
    "refuses other bytes in one piece",
    READ + f"result = [refused(b) for b in {BAD!r}]",
    expect=["refused"] * len(BAD),
)
grader.check(
    "refuses other bytes one at a time",
    READ + f"result = [refused(*singly(b)) for b in {BAD!r}]",
    expect=["refused"] * len(BAD),
)
grader.check(
    "refuses them cut after the chunk and between the two",
    READ
    + r"""
result = [
    refused(b"5\r\nhello", b"XX", b"0\r\n\r\n"),
    refused(b"5\r\nhello\r", b"X0\r\n\r\n"),
    refused(b"5\r\nhel", b"loX", b"X0\r\n\r\n"),
]
""",
    expect=["refused"] * 3,
)
grader.check(
    "good bodies, at every cut",
    READ
    + f"""
good = {GOOD!r}
results = [read(good), read(*singly(good))] + [read(good[:i], good[i:]) for i in range(1, len(good))]
result = [len(results), all(r == {READS_AS!r} for r in results), results[0]]
""",
    expect=[len(GOOD) + 1, True, READS_AS],
)
grader.check(
    "an unfinished body waits for more",
    READ + r"result = [read(b'5\r\nhello'), read(b'5\r\nhello\r')]",
    expect=[["hello", "more"], ["hello", "more"]],
)

grader.finish()
