"""What a sandbox's work leaves behind that no other sandbox should start with. Pure.

A builder's keys must not reach whoever runs in what was built, and its history and logs may hold the
answer. So a difference is packed without them, unless the caller wants all of it: then it is the
packer's alone. The table is RULES; docs/reference/residue.md shows it to people.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from dsec.base.errors import InvalidRequest
from dsec.images.lint.patterns import MAX_PATTERN, glob_matcher

HOMES = ("/root", "/home/*")
MAX_READ_BYTES = 64 << 10
"""What is looked at of a file whose content decides."""

_KEY = (
    r"(?:\b_auth|[\"']auth[\"']|auth_?token|auth_?ident|token|passw(?:or)?d|passphrase"
    r"|secret(?:_?access)?(?:_?key)?|api_?key)"
)
_VALUE = r"(?![\"']?(?:true|false|null|none)\b)[\"']?[^\s\"'${\[<]"
_SECRET = (
    r"(?im)^(?![ \t]*[#;]).*?(?:"
    rf"{_KEY}[\"']?[ \t]*(?:=|:(?![-?+]))[ \t]*{_VALUE}"  # not ${TOKEN:-}
    rf"|:_(?:auth|authToken|password)[\"']?[ \t]+{_VALUE}"  # as yarn has it
    r"|<(?:password|passphrase)>\s*[^\s<$]"
    r"|://[^/\s:@\"'$]*:[^/\s@\"'$][^/\s@]*@"
    r"|https?://[^/\s:@\"'$]{16,}@"  # a token instead of a user
    r"|/t/[\w-]{8,}/"  # a channel of conda's
    r"|^[ \t-]*(?:u|user|proxy-user)\b[ \t=:]+[\"']?[^\s\"':$]+:[^\s\"'$]"  # curl's
    r"|authorization:[ \t]*(?:bearer|basic|token)[ \t]+[^\s\"'$]"
    r")"
)
"""Settings that have a value for something secret: not its name alone, a comment, or a variable."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of residue."""

    name: str
    reason: str
    globs: tuple[str, ...]
    """Over absolute paths; `X/**` means all that is in X, at any depth, and not X itself; `~` is the
    home of any user (HOMES)."""
    but: tuple[str, ...] = ()
    """Kept all the same."""
    says: str = ""
    """A regular expression; the files count only if their first 64 KiB match."""
    keeps_directories: bool = False
    """Programs fail without the directories, so those stay, empty."""
    always: bool = False
    """Left out of what is not cleaned, too."""


RULES: tuple[Rule, ...] = (
    Rule(
        "build-only",
        "Scratch of whatever ran; restored sandboxes begin with an empty one.",
        ("/tmp/**", "/var/tmp/**"),  # noqa: S108 - told of, not used
    ),
    Rule(
        "runtime",
        "Sockets, locks and process ids of processes that are not restored.",
        ("/run/**",),
        keeps_directories=True,
    ),
    Rule(
        "caches",
        "Can be had again, costs room, and tells what was fetched.",
        (
            "~/.cache/**",
            "**/.npm/_cacache/**",
            "**/.bun/install/cache/**",
            "/var/cache/man/**",
            "/var/cache/debconf/*-old",
        ),
        but=(
            "**/.cache/huggingface/**",
            "**/.cache/torch/**",
            "**/.cache/whisper/**",
            "**/.cache/clip/**",
            "**/.cache/kagglehub/**",
            "**/.cache/modelscope/**",
            "**/.cache/ms-playwright/**",
            "**/.cache/puppeteer/**",
            "**/.cache/selenium/**",
            "**/.cache/Cypress/**",
            "**/.cache/pypoetry/virtualenvs/**",
            "**/.cache/uv/archive-v0/**",
            "**/.cache/uv/environments-v2/**",
            "**/.cache/pre-commit/**",
            "**/.cache/R/**",
            "**/.cache/node/corepack/**",
            "**/.cache/prisma/**",
            "**/.cache/deno/**",
            "**/.cache/coursier/**",
            "**/.cache/bazel/**",
            "**/.cache/bazelisk/**",
        ),
    ),
    Rule(
        "package-caches",
        "Archives and lists of the system's package managers; they are fetched again.",
        (
            "/var/cache/apt/**",
            "/var/lib/apt/lists/**",
            "/var/cache/dnf/**",
            "/var/cache/yum/**",
            "/var/cache/apk/**",
            "/var/cache/pacman/**",
            "/var/cache/zypp/**",
        ),
        keeps_directories=True,
    ),
    Rule(
        "histories",
        "What was typed, with what was found out and the secrets in arguments.",
        (
            "**/.bash_history",
            "**/.zsh_history",
            "**/.zhistory",
            "**/.sh_history",
            "**/.ash_history",
            "**/.ksh_history",
            "**/.history",
            "**/fish/fish_history",
            "**/.python_history",
            "**/.ipython/profile_*/history.sqlite*",
            "**/.node_repl_history",
            "**/.irb_history",
            "**/.pry_history",
            "**/.psql_history",
            "**/.mysql_history",
            "**/.sqlite_history",
            "**/.rediscli_history",
            "**/.lesshst",
            "**/.Rhistory",
            "**/.gdb_history",
            "**/.duckdb_history",
            "**/.xonsh_history",
            "**/.mongosh/mongosh_repl_history",
            "**/.julia/logs/repl_history.jl",
            "**/.local/state/bash/history",
            "**/.local/state/less/history",
            "**/.local/share/atuin/**",
            "**/.bash_sessions/**",
            "**/.zsh_sessions/**",
            "**/nano/search_history",
            "**/.nano/search_history",
            "**/.wget-hsts",
            "**/.viminfo",
            "**/nvim/shada/*",
        ),
    ),
    Rule(
        "agents",
        "What agents were told, thought and did: the work itself, with its answer.",
        (
            "**/.claude.json",
            "**/.claude/projects/**",
            "**/.claude/todos/**",
            "**/.claude/file-history/**",
            "**/.claude/shell-snapshots/**",
            "**/.claude/history.jsonl",
            "**/.codex/sessions/**",
            "**/.codex/log/**",
            "**/.codex/history.jsonl",
            "**/.gemini/tmp/**",
            "**/.local/share/opencode/storage/**",
            "**/.local/share/opencode/log/**",
            "**/.local/share/goose/sessions/**",
            "**/.aider.chat.history.md",
            "**/.aider.input.history",
            "**/.aider.llm.history",
        ),
    ),
    Rule(
        "logs",
        "What programs wrote about the work.",
        ("/var/log/**", "**/.npm/_logs/**"),
        keeps_directories=True,
    ),
    Rule(
        "logs-elsewhere",
        "What programs wrote where they ran, or failed.",
        ("**/npm-debug.log", "**/yarn-error.log", "**/pip-log.txt", "**/nohup.out"),
    ),
    Rule(
        "keys",
        "Private keys of people: whoever has them is them.",
        (
            "**/.ssh/**/id_*",
            "**/.ssh/**/*.pem",
            "**/.ssh/**/*.key",
            "**/.config/sops/age/keys.txt",
            "**/.gnupg/private-keys-v1.d/**",
            "**/.gnupg/secring.gpg",
        ),
        but=("**/.ssh/**/*.pub",),
    ),
    Rule(
        "keys-of-any-name",
        "A private key under another name.",
        ("**/.ssh/*", "**/.ssh/**/*key*", "**/.ssh/**/*_rsa", "**/.ssh/**/*_ed25519"),
        says=r"-----BEGIN [A-Z ]*PRIVATE KEY",
    ),
    Rule(
        "keys-of-the-host",
        "Every sandbox is a host of its own: `ssh-keygen -A` makes it new ones.",
        ("/etc/ssh/ssh_host_*_key", "/etc/ssh/ssh_host_*_key.pub"),
    ),
    Rule(
        "credentials",
        "Tokens and passwords that programs keep for their user.",
        (
            "**/.git-credentials",
            "**/.config/git/credentials",
            "**/.pgpass",
            "**/.s3cfg",
            "**/.databrickscfg",
            "**/.vault-token",
            "**/.kaggle/kaggle.json",
            "**/.config/kaggle/kaggle.json",
            "**/.config/containers/auth.json",
            "**/.composer/auth.json",
            "**/.config/composer/auth.json",
            "**/.config/pypoetry/auth.toml",
            "**/.local/share/uv/credentials/**",
            "**/.local/share/python_keyring/**",
            "**/.local/share/keyrings/**",
            "**/.aws/credentials",
            "**/.aws/sso/cache/**",
            "**/.aws/cli/cache/**",
            "**/.azure/**",
            "**/.config/gcloud/**",
            "**/.config/gh/hosts.yml",
            "**/.config/hub",
            "**/.config/rclone/rclone.conf",
            "**/.kube/config",
            "**/.cargo/credentials",
            "**/.cargo/credentials.toml",
            "**/.gem/credentials",
            "**/.terraform.d/credentials.tfrc.json",
            "**/.cache/huggingface/token",
            "**/.cache/huggingface/stored_tokens",
            "**/.huggingface/token",
            "**/.codex/auth.json",
            "**/.claude/.credentials.json",
            "**/.gemini/oauth_creds.json",
            "**/.local/share/opencode/auth.json",
        ),
    ),
    Rule(
        "credentials-for-hosts",
        "Passwords by host, for many programs.",
        ("**/.netrc", "**/_netrc", "/etc/apt/auth.conf", "/etc/apt/auth.conf.d/*"),
        says=r"(?im)^(?![ \t]*#).*\bpassword\s+[^\s$]",
    ),
    Rule(
        "credentials-in-settings",
        "Settings that hold a token or password beside what is harmless.",
        (
            "**/.npmrc",
            "**/.yarnrc",
            "**/.yarnrc.yml",
            "**/.docker/config.json",
            "**/.aws/config",
            "**/.m2/settings.xml",
            "**/.gradle/gradle.properties",
            "**/pip.conf",
            "**/.condarc",
            "**/uv.toml",
            "**/.pypirc",
            "**/.my.cnf",
            "**/.boto",
            "**/.curlrc",
            "**/.wgetrc",
            "**/.terraformrc",
            "**/.config/glab-cli/config.yml",
        ),
        says=_SECRET,
    ),
    Rule(
        "editors",
        "Text of files that were open, saved and deleted text with it.",
        (
            "**/.*.sw?",
            "**/nvim/swap/**",
            "**/nvim/undo/**",
            "**/.*.un~",
            "**/*~",
            "**/.#*",
            "**/#*#",
            "**/.emacs.d/auto-save-list/**",
        ),
    ),
    Rule(
        "platform",
        "Every sandbox has a name of its own, written where an image has none.",
        ("/etc/hostname", "/etc/machine-id", "/var/lib/dbus/machine-id"),
        always=True,
    ),
    Rule(
        "platform-network",
        "As the platform writes them where an image has none; other ones are kept.",
        ("/etc/hosts", "/etc/resolv.conf"),
        says=r"\A(127\.0\.0\.1\tlocalhost\n::1\tlocalhost\n127\.0\.1\.1\t\S+\n"
        r"|nameserver 127\.0\.0\.1\n)\Z",
        always=True,
    ),
)


class Fate(Enum):
    """What becomes of an entry."""

    KEPT = "kept"
    CLEANED = "cleaned"
    """Left out; in a directory, all but deletions of what is below."""
    EMPTIED = "emptied"
    """Of a directory: as CLEANED, but the directories in it stay."""
    EXCLUDED = "excluded"
    """The caller wants what is below to stay as it is, deletions or not."""


@dataclass(frozen=True, slots=True)
class _Files:
    """Files of a rule, by a pattern over their whole path."""

    pattern: re.Pattern[bytes]
    says: re.Pattern[bytes] | None


class Sieve:
    """Decides what a packed difference holds."""

    def __init__(
        self, *, clean: bool, exclude: Sequence[str] = (), rules: Sequence[Rule] = RULES
    ) -> None:
        """Prepare.

        Args:
            clean: leave all residue out, and not only what is left out always.
            exclude: the caller's globs; what matches is left out with all below it.
            rules: what residue is.

        Raises:
            InvalidRequest: a glob cannot mean what it says.
        """
        self._excluded = [glob_matcher(_inside(glob), "exclude") for glob in exclude]
        rules = [rule for rule in rules if clean or rule.always]
        self._directories = [found for rule in rules if (found := _directories_of(rule))]
        self._kept = _any_of(glob.removesuffix("/**") for rule in rules for glob in rule.but)
        self._by_name: dict[bytes, list[_Files]] = {}
        self._by_parent: dict[bytes, list[_Files]] = {}
        self._others: list[_Files] = []
        """By neither."""
        odd = [self._add(glob, rule) for rule in rules for glob in _file_globs(rule)]
        self._other_name = _any_of(filter(None, odd))

    def _add(self, glob: str, rule: Rule) -> str:
        """Sort a glob in where it is found by name; what names it has, if it cannot be."""
        says = re.compile(rule.says.encode()) if rule.says else None
        files = _Files(re.compile(_translated(glob)), says)
        parent, _, name = glob.rpartition("/")
        parent = parent.rpartition("/")[2]
        if not _is_odd(name):
            self._by_name.setdefault(name.encode(), []).append(files)
        elif parent and not _is_odd(parent):
            self._by_parent.setdefault(parent.encode(), []).append(files)
        else:
            self._others.append(files)
            return name
        return ""

    def directory(self, path: bytes, above: Fate) -> Fate:
        """What becomes of what is in a directory, given that of what is in the one above it."""
        if self.excludes(path):
            return Fate.EXCLUDED
        if self._kept.fullmatch(path):
            return Fate.KEPT
        for pattern, fate in self._directories:
            if pattern.fullmatch(path):
                return fate
        return above

    def file(self, path: bytes, above: Fate, read: Callable[[], bytes]) -> Fate:
        """What becomes of anything but a directory or a deletion.

        Args:
            path: absolute.
            above: of what is in its directory.
            read: the file's beginning, at most `MAX_READ_BYTES`; asked for if that decides.
        """
        if self.excludes(path):
            return Fate.EXCLUDED
        if above is not Fate.KEPT or self._is_residue(path, read):
            return Fate.CLEANED
        return Fate.KEPT

    def excludes(self, path: bytes) -> bool:
        """Whether the caller's own globs match."""
        return any(matches(path) for matches in self._excluded)

    def _is_residue(self, path: bytes, read: Callable[[], bytes]) -> bool:
        found = [files for files in self._candidates(path) if files.pattern.fullmatch(path)]
        if not found or self._kept.fullmatch(path):
            return False
        if any(files.says is None for files in found):
            return True
        text = read()
        return any(files.says and files.says.search(text) for files in found)

    def _candidates(self, path: bytes) -> Iterator[_Files]:
        parent, _, name = path.rpartition(b"/")
        yield from self._by_name.get(name, ())
        yield from self._by_parent.get(parent.rpartition(b"/")[2], ())
        if self._other_name.fullmatch(name):
            yield from self._others


def _file_globs(rule: Rule) -> list[str]:
    return [glob for glob in rule.globs if not glob.endswith("/**")]


def _directories_of(rule: Rule) -> tuple[re.Pattern[bytes], Fate] | None:
    globs = [glob.removesuffix("/**") for glob in rule.globs if glob.endswith("/**")]
    fate = Fate.EMPTIED if rule.keeps_directories else Fate.CLEANED
    return (_any_of(globs), fate) if globs else None


def _is_odd(component: str) -> bool:
    """Whether it is more than a name."""
    return "*" in component or "?" in component


def check_excludes(globs: Sequence[str]) -> None:
    """See that the caller's globs can mean what they say.

    Raises:
        InvalidRequest: one can match no absolute path, or has what globs have elsewhere and not here.
    """
    for glob in globs:
        if fault := _fault(glob):
            raise InvalidRequest(f"exclude: {glob[:80]!r}: {fault}", place="exclude")


def _fault(glob: str) -> str:
    """What is odd about a glob; "" = nothing."""
    names = glob.removeprefix("/").removesuffix("/").split("/")
    if not glob.startswith(("/", "**")):
        return "it must begin with / (or with **/ for wherever it is)"
    if len(glob) > MAX_PATTERN:
        return f"it is longer than {MAX_PATTERN} characters"
    if odd := {"", ".", ".."}.intersection(names):
        return f"{odd.pop()!r} is no name: say the path it leads to"
    if "\0" in glob or any(sign in glob for sign in "[]{}"):
        return "it has no [...] and {...}; ? stands for any one character, these too"
    if any("**" in name and name != "**" for name in names):
        return "** crosses directories, and stands alone between slashes"
    return ""


def _inside(glob: str) -> str:
    """`X/**` means what is in X; to the matcher it would mean X too."""
    return f"{glob}/*" if glob.endswith("/**") else glob


def _any_of(globs: Iterable[str]) -> re.Pattern[bytes]:
    """Matches what any of them matches; nothing if there are none."""
    return re.compile(b"|".join(map(_translated, globs)) or b"(?!)")


def _translated(glob: str) -> bytes:
    """The house's own globs as regular expressions."""
    parts = [_component(part) for part in glob.split("/")]
    return b"/".join(parts).replace(b"\0/", b"(?:[^/]*/)*")


def _component(glob: str) -> bytes:
    if glob == "**":
        return b"\0"
    if glob == "~":
        return b"(?:" + b"|".join(map(_translated, HOMES)) + b")"
    escaped = re.escape(glob.encode())
    return escaped.replace(rb"\*", b"[^/]*").replace(rb"\?", b"[^/]")
