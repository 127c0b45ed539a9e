"""Users and groups as an image's files name them."""

from __future__ import annotations

from dataclasses import dataclass

from dsec.images.lint.environment import Environment


@dataclass(frozen=True, slots=True)
class Account:
    """A line of /etc/passwd."""

    name: str
    uid: int
    gid: int
    home: str
    shell: str

    @property
    def logs_in(self) -> bool:
        """Whether it is somebody's, rather than a service's."""
        return 1000 <= self.uid < 65534 and not self.shell.endswith(("nologin", "false"))


def accounts(env: Environment) -> list[Account] | None:
    """The accounts, or None if there is no /etc/passwd; lines that are none are left out."""
    text = env.text(b"/etc/passwd")
    if text is None:
        return None
    return [account for line in text.splitlines() if (account := _account(line))]


def _account(line: str) -> Account | None:
    fields = line.split(":")
    if len(fields) != 7 or not (is_number(fields[2]) and is_number(fields[3])):
        return None
    return Account(fields[0], int(fields[2]), int(fields[3]), fields[5], fields[6])


def groups(env: Environment) -> dict[str, int] | None:
    """Group ids by name, or None if there is no /etc/group."""
    text = env.text(b"/etc/group")
    if text is None:
        return None
    lines = [line.split(":") for line in text.splitlines()]
    return {f[0]: int(f[2]) for f in lines if len(f) == 4 and is_number(f[2])}


def is_number(text: str) -> bool:
    """Whether it is a plain decimal number of a sensible length."""
    return text.isascii() and text.isdigit() and len(text) <= 10
