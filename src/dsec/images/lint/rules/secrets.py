"""Keys, tokens and passwords. Messages say where one is, never what it is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from dsec.images.lint.environment import Environment
from dsec.images.lint.rule import Family, Found, Rule, Scan
from dsec.images.overlaid import Entry

PRIVATE_KEY = Rule(
    "secret-private-key",
    "error",
    "A file holds a private key.",
    "Whoever runs in the environment, an agent included, can use it.",
    "Remove it, and replace the key: it was published with the image.",
)
CREDENTIALS = Rule(
    "secret-credentials",
    "error",
    "A file in which a tool keeps credentials has some: .netrc, .pypirc, .npmrc, .git-credentials, "
    ".docker/config.json, those of cloud providers, kubectl, Hugging Face, gh.",
    "Whoever runs in the environment, an agent included, can use them.",
    "Remove the file, and replace the credentials.",
)
TOKEN = Rule(
    "secret-token",
    "error",
    "A file holds what has the shape of a provider's token or access key.",
    "Whoever runs in the environment, an agent included, can use it.",
    "Remove it, and revoke the token.",
)
URL_PASSWORD = Rule(
    "secret-url",
    "warning",
    "A file outside of packages holds a URL with a user name and a password.",
    "Package indexes, remotes and databases are often configured so.",
    "Remove it, or give it to the command that needs it when the image is built.",
)
HISTORY = Rule(
    "secret-shell-history",
    "warning",
    "The history of a shell or another program that is typed into was kept.",
    "It holds what was typed: passwords, and often the solution.",
    "Remove it when the environment is built.",
)
ENVIRONMENT = Rule(
    "secret-environment",
    "error",
    "A variable of the image's configuration is named like a secret and has a value.",
    "Every process in every sandbox gets it.",
    "Give it to the one command that needs it, when it is run.",
)
IN_PACKAGE = Rule(
    "secret-in-package",
    "advice",
    "A package of a language holds a private key or a token.",
    "Most often it is an example or for its tests.",
    "Look at it once; disable this rule if it is one.",
)


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a secret looks like; the anchors are quick to search for."""

    rule: Rule
    name: str
    anchors: tuple[bytes, ...]
    pattern: re.Pattern[bytes]


_B = rb"(?<![0-9A-Za-z_/+-])"
_KEY = (
    rb"-----BEGIN (?:[A-Z0-9]{1,20} ){0,3}PRIVATE KEY(?: BLOCK)?-----"
    rb"(?:\s|\\n){1,4}(?:[A-Za-z-]{1,20}: [^\n\\]{0,80}(?:\s|\\n){1,4}){0,4}[A-Za-z0-9+/=]{16}"
)
_SHAPES = (
    _Shape(PRIVATE_KEY, "a private key", (b"PRIVATE KEY",), re.compile(_KEY)),
    _Shape(
        TOKEN,
        "an AWS access key",
        (b"AKIA", b"ASIA"),
        re.compile(_B + rb"A[KS]IA[0-9A-Z]{16}(?![0-9A-Za-z])"),
    ),
    _Shape(
        TOKEN,
        "an AWS secret key",
        (b"secret_access_key", b"SecretAccessKey", b"SECRET_ACCESS_KEY"),
        re.compile(rb"(?i:secret_?access_?key)[\"']?\s{0,4}[:=]\s{0,4}[\"']?[A-Za-z0-9/+]{40}\b"),
    ),
    _Shape(
        TOKEN,
        "a GitHub token",
        (b"ghp_", b"gho_", b"ghu_", b"ghs_", b"ghr_", b"github_pat_"),
        re.compile(_B + rb"(?:gh[pousr]_[0-9A-Za-z]{36}|github_pat_[0-9A-Za-z_]{60})"),
    ),
    _Shape(TOKEN, "a GitLab token", (b"glpat-",), re.compile(_B + rb"glpat-[0-9A-Za-z_-]{20}")),
    _Shape(TOKEN, "a Hugging Face token", (b"hf_",), re.compile(_B + rb"hf_[A-Za-z0-9]{34}\b")),
    _Shape(
        TOKEN,
        "a token of a model provider",
        (b"sk-",),
        re.compile(_B + rb"sk-(?:ant-|proj-|or-)?[0-9A-Za-z_-]{0,24}[0-9A-Za-z]{40}"),
    ),
    _Shape(TOKEN, "a Google key", (b"AIza",), re.compile(_B + rb"AIza[0-9A-Za-z_-]{35}")),
    _Shape(TOKEN, "a Slack token", (b"xox",), re.compile(_B + rb"xox[abprs]-[0-9A-Za-z-]{20}")),
    _Shape(
        TOKEN, "a package index's token", (b"pypi-AgE",), re.compile(_B + rb"pypi-AgE[\w-]{50}")
    ),
    _Shape(TOKEN, "an npm token", (b"npm_",), re.compile(_B + rb"npm_[0-9A-Za-z]{36}\b")),
)
_URL = re.compile(rb"\b[a-z][a-z0-9+]{1,12}://[^\s/:@\"'<>]{1,64}:([^\s/:@\"'<>]{3,128})@[\w\[]")
_PLACEHOLDER = re.compile(
    rb"[$%{}*]|^(pass(word|wd)?|secret|pw|pwd|token|x+|changeme|example|postgres|root|user|test)$",
    re.IGNORECASE,
)
_EXAMPLE = re.compile(rb"EXAMPLE|0{12}|1234567890|(?:x{8}|X{8})")
_TOOLS: tuple[tuple[bytes, re.Pattern[bytes]], ...] = (
    (b".netrc", re.compile(rb"\bpassword\s{1,20}\S")),
    (b".pypirc", re.compile(rb"^[ \t]*password[ \t]*[:=][ \t]*\S", re.MULTILINE)),
    (b".npmrc", re.compile(rb"_(?:authToken|auth|password)\s*=\s*[^\s$]")),
    (b".git-credentials", re.compile(rb"://[^\s:/]{1,256}:[^\s@/]{1,256}@")),
    (b".docker/config.json", re.compile(rb'"(?:auth|identitytoken|password)"\s*:\s*"[^"]')),
    (b"containers/auth.json", re.compile(rb'"auth"\s*:\s*"[^"]')),
    (b".aws/credentials", re.compile(rb"aws_(?:secret_access_key|session_token)\s*=\s*\S")),
    (b".kube/config", re.compile(rb"(?:token|client-key-data|password):\s*\S")),
    (b".azure/accessTokens.json", re.compile(rb"[Tt]oken")),
    (b".azure/msal_token_cache.json", re.compile(rb'"secret"')),
    (
        b"gcloud/application_default_credentials.json",
        re.compile(rb'"(?:refresh_token|private_key)"'),
    ),
    (b"gcloud/credentials.db", re.compile(rb".", re.DOTALL)),
    (b"huggingface/token", re.compile(rb"\S")),
    (b"huggingface/stored_tokens", re.compile(rb"\S")),
    (b"gh/hosts.yml", re.compile(rb"oauth_token:\s*\S")),
    (b".s3cfg", re.compile(rb"^secret_key\s*=\s*\S", re.MULTILINE)),
    (
        b".config/rclone/rclone.conf",
        re.compile(rb"^(?:pass|token|secret\w*)\s*=\s*\S", re.MULTILINE),
    ),
    (b".pgpass", re.compile(rb"^[^#\s:][^:\n]{0,255}(?::[^:\n]{0,255}){3}:[^:\n]", re.MULTILINE)),
    (b".cargo/credentials.toml", re.compile(rb"token\s*=\s*\S")),
)
_HISTORIES = re.compile(
    rb"\.(bash|zsh|ash|sh|python|psql|mysql|sqlite|node_repl|irb|rediscli)_?history|fish_history"
    rb"|\.ipython/profile_default/history\.sqlite"
)
_SECRET_NAME = re.compile(
    r"(^|_)(PASSWORD|PASSWD|SECRET|TOKEN|API_?KEY|ACCESS_KEY|PRIVATE_KEY|CREDENTIALS?)$"
)
_PACKAGES = re.compile(
    rb"/(lib/python3\.\d+|site-packages|dist-packages|node_modules|gems|go/pkg/mod)/"
)


def look(env: Environment) -> Iterator[Found]:
    """Judge what is known by its name."""
    for name, value in env.config.env.items():
        if _SECRET_NAME.search(name.upper()) and value:
            yield ENVIRONMENT.at(f"the variable {name} is set")
    for entry in env.files():
        if entry.inode.size and _HISTORIES.fullmatch(entry.name):
            yield HISTORY.at(f"{entry.inode.size} bytes of a history", entry)


def scan(env: Environment) -> Scan:
    """Judge what files hold; what the distribution's packages brought is known to all."""

    def judge(entry: Entry, content: bytes) -> Iterator[Found]:
        if entry.path in env.packaged:
            return
        packaged = _PACKAGES.search(entry.path) is not None
        yield from _tool(entry, content)
        yield from _shapes(entry, content, packaged=packaged)
        if not packaged:
            yield from _urls(entry, content)

    return judge


def _tool(entry: Entry, content: bytes) -> Iterator[Found]:
    for name, pattern in _TOOLS:
        if entry.path.endswith(b"/" + name) and pattern.search(content):
            yield CREDENTIALS.at("it has credentials", entry)


def _shapes(entry: Entry, content: bytes, *, packaged: bool) -> Iterator[Found]:
    for shape in _SHAPES:
        if not any(anchor in content for anchor in shape.anchors):
            continue
        match = _real(shape.pattern, content)
        if match is not None:
            rule = IN_PACKAGE if packaged else shape.rule
            readable = _readable(entry) if shape.rule is PRIVATE_KEY else ""
            yield rule.at(f"line {_line(content, match)} has {shape.name}{readable}", entry)


def _real(pattern: re.Pattern[bytes], content: bytes) -> re.Match[bytes] | None:
    """The first match that is no documentation's example."""
    return next((m for m in pattern.finditer(content) if not _EXAMPLE.search(m[0])), None)


def _readable(entry: Entry) -> str:
    return ", and all may read it" if entry.inode.mode & 0o004 else ""


def _urls(entry: Entry, content: bytes) -> Iterator[Found]:
    if b"://" not in content or b"@" not in content or b"\0" in content[:8192]:
        return
    for match in _URL.finditer(content):
        if not _PLACEHOLDER.search(match[1]):
            yield URL_PASSWORD.at(f"line {_line(content, match)} has a URL with a password", entry)
            return


def _line(content: bytes, match: re.Match[bytes]) -> int:
    return content.count(b"\n", 0, match.start()) + 1


FAMILY = Family(
    "secrets",
    (PRIVATE_KEY, CREDENTIALS, TOKEN, URL_PASSWORD, HISTORY, ENVIRONMENT, IN_PACKAGE),
    look,
    scan,
)
