from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from dsec.kit.serving import private_socket


def test_only_its_user_can_open_it_and_a_dead_ones_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "run/one.sock"
    with private_socket(path, 8):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with private_socket(path, 8) as listener, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        assert listener.getblocking() is False


def test_a_path_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="too long"):
        private_socket(tmp_path / ("x" * 120), 8)
