"""Users that files and the image's configuration refer to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator

from dsec.images.lint.accounts import Account, accounts, groups, is_number
from dsec.images.lint.environment import Environment
from dsec.images.lint.rule import Family, Found, Rule
from dsec.images.overlaid import Entry

NO_PASSWD = Rule(
    "users-no-passwd",
    "warning",
    "There is no /etc/passwd.",
    "Users have no names or homes; ssh, git, pip and many others fail.",
    "Take a base image that has one, or add it.",
)
UNKNOWN_OWNER = Rule(
    "users-unknown-owner",
    "warning",
    "Files belong to a user or group that /etc/passwd or /etc/group does not have.",
    "Often the builder's own id: the user meant cannot write there, and git refuses the directory.",
    "`chown` them when the environment is built, or add the user.",
)
CONFIG_USER = Rule(
    "users-config-user",
    "error",
    "The user or group that the image's configuration runs as does not exist.",
    "Commands cannot be started as it.",
    "Add it with useradd, or name another.",
)
CONFIG_NUMBER = Rule(
    "users-config-number",
    "advice",
    "The image's configuration runs as a number that /etc/passwd does not have.",
    "Programs that ask who they are fail: there is no name and no home.",
    "Add a user with this number.",
)
NO_NON_ROOT = Rule(
    "no-non-root-user",
    "advice",
    "There is no user but root and those of services.",
    "Tools that refuse to run as root cannot be used, and nothing is protected from the agent.",
    "`useradd --create-home agent`.",
)
HOME = Rule(
    "users-home-missing",
    "warning",
    "The home directory of a user is missing or belongs to somebody else.",
    "Shells, caches and configuration files of tools fail.",
    "`useradd --create-home`, or chown it.",
)


def look(env: Environment) -> Iterator[Found]:
    """Judge owners, accounts and the configuration."""
    known = accounts(env)
    if known is None:
        yield NO_PASSWD.at("there is no /etc/passwd")
        return
    named = groups(env) or {}
    yield from _owners(env, known, named.values())
    yield from _config(env, known, named)
    if not any(account.logs_in for account in known):
        yield NO_NON_ROOT.at("all users are root's or services'")
    for account in known:
        if account.logs_in or account.name == env.config.user.partition(":")[0]:
            yield from _home(env, account)


def _owners(env: Environment, known: list[Account], gids: Collection[int]) -> Iterator[Found]:
    uids = {account.uid for account in known}
    strange: dict[str, list[Entry]] = defaultdict(list)
    for entry in env.entries.values():
        if entry.inode.uid not in uids:
            strange[f"user {entry.inode.uid}"].append(entry)
        if entry.inode.gid not in gids:
            strange[f"group {entry.inode.gid}"].append(entry)
    for who, entries in strange.items():
        more = f", as do {len(entries) - 1} others" if len(entries) > 1 else ""
        yield UNKNOWN_OWNER.at(f"it belongs to {who}, who is not known{more}", entries[0])


def _config(env: Environment, known: list[Account], named: dict[str, int]) -> Iterator[Found]:
    user, _, group = env.config.user.partition(":")
    if is_number(user):
        if int(user) not in {account.uid for account in known}:
            yield CONFIG_NUMBER.at(f"the image runs as user {user}")
    elif user and user not in {account.name for account in known}:
        yield CONFIG_USER.at(f"the image runs as user {user!r}, who does not exist")
    if group and not is_number(group) and group not in named:
        yield CONFIG_USER.at(f"the image runs as group {group!r}, which does not exist")


def _home(env: Environment, account: Account) -> Iterator[Found]:
    home = env.find(account.home.encode("utf-8", "replace"))
    if home is None or not home.inode.is_dir:
        yield HOME.at(f"{account.home} of user {account.name} is missing")
    elif home.inode.uid != account.uid and account.uid != 0:
        yield HOME.at(f"{account.name}'s home belongs to user {home.inode.uid}", home)


FAMILY = Family(
    "users", (NO_PASSWD, UNKNOWN_OWNER, CONFIG_USER, CONFIG_NUMBER, NO_NON_ROOT, HOME), look
)
