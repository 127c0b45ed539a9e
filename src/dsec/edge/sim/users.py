"""Users and groups, read from the sandbox's own /etc/passwd and /etc/group."""

from __future__ import annotations

from dataclasses import dataclass

from dsec.edge.sim.errors import not_found


@dataclass(frozen=True, kw_only=True)
class Who:
    """On whose behalf something is done."""

    uid: int = 0
    gid: int = 0
    groups: frozenset[int] = frozenset()
    name: str = "root"
    home: str = "/"

    def may(self, mode: int, owner: int, group: int, want: int) -> bool:
        """Whether permission bits allow `want` (4 read, 2 write, 1 execute or search)."""
        if self.uid == 0:
            return want != 1 or bool(mode & 0o111)
        if self.uid == owner:
            return (mode >> 6) & want == want
        if group == self.gid or group in self.groups:
            return (mode >> 3) & want == want
        return mode & want == want


ROOT = Who()


class Accounts:
    """Two tables as text, looked up anew each time: a sandbox may edit them."""

    def __init__(self, passwd: bytes, group: bytes) -> None:
        self._users = _rows(passwd, 7)
        self._groups = _rows(group, 4)

    def find(self, text: str) -> Who:
        """Look up `name`, `number`, either with `:group`.

        Raises:
            AetherError: `not_found`, kind `user` or `group`.
        """
        user, _, group = text.partition(":")
        row = self._user_row(user)
        if row is None:
            if not user.isdigit():
                raise not_found("user", f"no user {user!r} in /etc/passwd")
            row = [user, "x", user, user, "", "/", ""]
        gid = self._group_id(group) if group else int(row[3])
        name = row[0]
        extra = frozenset(int(g[2]) for g in self._groups if name in g[3].split(","))
        return Who(uid=int(row[2]), gid=gid, groups=extra | {gid}, name=name, home=row[5] or "/")

    def user_name(self, uid: int) -> str:
        """Name of a user id, or ""."""
        return next((row[0] for row in self._users if row[2] == str(uid)), "")

    def group_name(self, gid: int) -> str:
        """Name of a group id, or ""."""
        return next((row[0] for row in self._groups if row[2] == str(gid)), "")

    def _user_row(self, user: str) -> list[str] | None:
        by_name = next((row for row in self._users if row[0] == user), None)
        return by_name or next((row for row in self._users if row[2] == user), None)

    def _group_id(self, group: str) -> int:
        for row in self._groups:
            if group in (row[0], row[2]):
                return int(row[2])
        if group.isdigit():
            return int(group)
        raise not_found("group", f"no group {group!r} in /etc/group")


def _rows(text: bytes, columns: int) -> list[list[str]]:
    rows = [line.split(":") for line in text.decode("utf-8", "replace").splitlines()]
    return [row for row in rows if len(row) >= columns and row[2].isdigit()]
