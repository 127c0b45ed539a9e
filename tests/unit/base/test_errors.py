"""The error table is one: codes are unique, and an error survives a round trip."""

from __future__ import annotations

import pytest

from dsec.base.errors import (
    ERRORS,
    DsecError,
    InternalError,
    NotFound,
    SandboxError,
    Unavailable,
    error_from,
)
from dsec.kit.http import error_body


@pytest.mark.parametrize("code", sorted(ERRORS))
def test_an_error_survives_the_wire(code: str) -> None:
    sent = ERRORS[code]("because", kind="sandbox", step=None)
    body = error_body(sent).error
    back = error_from(body.code, body.message, body.details, sent.http_status)
    assert type(back) is ERRORS[code]
    assert back.message == "because"
    assert back.details == {"kind": "sandbox"}
    assert body.retryable == ERRORS[code].retryable


def test_codes_are_unique() -> None:
    classes = set(ERRORS.values())
    assert len(classes) == len(ERRORS)
    assert {cls.code for cls in classes} == set(ERRORS)


@pytest.mark.parametrize(
    ("status", "family"),
    [
        (404, NotFound),
        (410, SandboxError),
        (503, Unavailable),
        (500, InternalError),
        (418, InternalError),
    ],
)
def test_an_unknown_code_falls_back_to_its_family(status: int, family: type[DsecError]) -> None:
    assert type(error_from("from_the_future", "x", {}, status)) is family


def test_details_may_have_any_name() -> None:
    details = {"message": "m", "self": "s", "code": "c"}
    error = error_from("conflict", "busy", details, 409)
    assert (error.message, error.details) == ("busy", details)
