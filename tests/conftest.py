"""What all tests share: a test that cannot run here fails, unless a checked-in list allows it."""

from __future__ import annotations

import os

import pytest

ALLOWED_SKIPS: dict[str, str] = {
    "tests/kernel/test_stores": "S3: ./dev test builds the server s3s-fs where Rust is 1.92 or newer",
    "tests/vm": "guests: QEMU and a kernel for them come with ./dev test, where the mirror has them",
}
"""Node id prefix -> why it may be skipped on a host that cannot run it. Reviewed like code."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("needs_root") and os.geteuid() != 0:
            item.add_marker(pytest.mark.usefixtures("refuse_without_root"))


@pytest.fixture
def refuse_without_root(request: pytest.FixtureRequest) -> None:
    for prefix, reason in ALLOWED_SKIPS.items():
        if request.node.nodeid.startswith(prefix):
            pytest.skip(reason)
    pytest.fail("needs root; a skip would have to be listed in tests/conftest.py")
