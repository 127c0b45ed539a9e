"""Ways to more rights than the user of a command should have."""

from __future__ import annotations

import stat
import struct
from collections.abc import Iterator

from dsec.images.lint.environment import Environment
from dsec.images.lint.rule import Family, Found, Rule
from dsec.images.overlaid import Entry

SETUID = Rule(
    "setuid-unknown",
    "warning",
    "A program is setuid or setgid that the distribution does not make so.",
    "It gives its owner's rights to everybody in the sandbox, also over the files that grade them.",
    "`chmod ug-s` it, or disable this rule if the task is about it.",
)
CAPABILITIES = Rule(
    "file-capabilities",
    "warning",
    "A program has capabilities of its own beyond opening raw sockets and low ports.",
    "They make it root in part, for everybody.",
    "`setcap -r` it.",
)
WRITABLE_SYSTEM = Rule(
    "world-writable-system",
    "error",
    "A file or directory of the system, or of PATH, can be written by everybody.",
    "Whoever runs as another user can change what root, or the grader, will run.",
    "`chmod o-w` it.",
)
NO_STICKY = Rule(
    "world-writable-no-sticky",
    "warning",
    "A directory can be written by everybody and is not sticky.",
    "Everybody can delete and replace everybody's files in it.",
    "`chmod +t` it, as /tmp is, or `chmod o-w`.",
)

_KNOWN = frozenset(
    b"su sudo passwd mount umount newgrp sg chsh chfn gpasswd chage expiry pkexec crontab "
    b"newuidmap newgidmap fusermount fusermount3 unix_chkpwd unix_update ssh-keysign ssh-agent "
    b"dbus-daemon-launch-helper polkit-agent-helper-1 wall write bsd-write dotlockfile at ping "
    b"ping6 ntfs-3g mount.nfs mount.cifs utempter postdrop postqueue exim4 mlocate plocate locate "
    b"screen lockfile procmail sudoedit chromium-sandbox chrome-sandbox pppd "
    b"pam_extrausers_chkpwd pam_timestamp_check userhelper usernetctl staprun "
    b"gst-ptp-helper Xorg.wrap cockpit-session doas bbsuid camel-lock-helper-1.2".split()
)
_SYSTEM_BINARIES = (b"/bin/", b"/sbin/", b"/usr/bin/", b"/usr/sbin/", b"/usr/lib", b"/lib")
_SYSTEM = (b"/bin", b"/sbin", b"/lib", b"/lib32", b"/lib64", b"/usr", b"/etc", b"/boot", b"/root")
_HARMLESS = frozenset({"cap_net_raw", "cap_net_bind_service"})
_CAPABILITIES = [
    "chown",
    "dac_override",
    "dac_read_search",
    "fowner",
    "fsetid",
    "kill",
    "setgid",
    "setuid",
    "setpcap",
    "linux_immutable",
    "net_bind_service",
    "net_broadcast",
    "net_admin",
    "net_raw",
    "ipc_lock",
    "ipc_owner",
    "sys_module",
    "sys_rawio",
    "sys_chroot",
    "sys_ptrace",
    "sys_pacct",
    "sys_admin",
    "sys_boot",
    "sys_nice",
    "sys_resource",
    "sys_time",
    "sys_tty_config",
    "mknod",
    "lease",
    "audit_write",
    "audit_control",
    "setfcap",
    "mac_override",
    "mac_admin",
    "syslog",
    "wake_alarm",
    "block_suspend",
    "audit_read",
    "perfmon",
    "bpf",
    "checkpoint_restore",
]


def look(env: Environment) -> Iterator[Found]:
    """Judge modes and extended attributes."""
    system = (*_SYSTEM, *_search_path(env))
    for entry in env.entries.values():
        mode = entry.inode.mode
        if stat.S_ISREG(mode):
            yield from _program(entry)
        if mode & 0o002 and (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            yield from _writable(entry, system)


def _search_path(env: Environment) -> list[bytes]:
    directories = env.config.env.get("PATH", "").encode("utf-8", "replace").split(b":")
    found = (env.find(d) for d in directories if d.startswith(b"/") and d.strip(b"/"))
    return [entry.path for entry in found if entry is not None]


def _program(entry: Entry) -> Iterator[Found]:
    inode = entry.inode
    if inode.mode & (stat.S_ISUID | stat.S_ISGID) and not _is_known(entry):
        kinds = [f"setuid (user {inode.uid})"] if inode.mode & stat.S_ISUID else []
        kinds += [f"setgid (group {inode.gid})"] if inode.mode & stat.S_ISGID else []
        yield SETUID.at(" and ".join(kinds), entry)
    if raw := inode.xattrs.get(b"security.capability"):
        names = capabilities(raw)
        if not names <= _HARMLESS:
            yield CAPABILITIES.at(f"it has {', '.join(sorted(names))}", entry)


def _is_known(entry: Entry) -> bool:
    return entry.name in _KNOWN and entry.path.startswith(_SYSTEM_BINARIES)


def capabilities(raw: bytes) -> set[str]:
    """The permitted capabilities in a `security.capability` attribute, by name."""
    count = (len(raw) - 4) // 8
    words = struct.unpack_from(f"<{1 + 2 * count}I", raw) if count > 0 else (0,)
    permitted = sum(word << 32 * index for index, word in enumerate(words[1:5:2]))
    bits = (bit for bit in range(64) if permitted >> bit & 1)
    return {
        f"cap_{_CAPABILITIES[bit]}" if bit < len(_CAPABILITIES) else f"cap_{bit}" for bit in bits
    }


def _writable(entry: Entry, system: tuple[bytes, ...]) -> Iterator[Found]:
    sticky = entry.inode.is_dir and entry.inode.mode & stat.S_ISVTX
    if sticky:
        return
    if entry.path == b"/" or any(_within(entry.path, directory) for directory in system):
        yield WRITABLE_SYSTEM.at(f"its mode is {stat.S_IMODE(entry.inode.mode):04o}", entry)
    elif entry.inode.is_dir:
        yield NO_STICKY.at(f"its mode is {stat.S_IMODE(entry.inode.mode):04o}", entry)


def _within(path: bytes, directory: bytes) -> bool:
    return path == directory or path.startswith(directory + b"/")


FAMILY = Family("privilege", (SETUID, CAPABILITIES, WRITABLE_SYSTEM, NO_STICKY), look)
