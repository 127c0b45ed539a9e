"""Residue: what is left out of a packed difference, and what must not be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dsec.base.errors import InvalidRequest
from dsec.images.residue import HOMES, RULES, Fate, Rule, Sieve

PAGE = Path(__file__).parents[3] / "docs/reference/residue.md"


def fate(path: str, text: bytes = b"", sieve: Sieve | None = None) -> Fate:
    """Of a file (`~`: in root's home), its directories asked about first as whoever packs does."""
    path = path.replace("~/", "/root/") if path.startswith("~/") else path
    sieve = sieve or Sieve(clean=True)
    above = sieve.directory(b"/", Fate.KEPT)
    *parents, _ = path.encode().strip(b"/").split(b"/")
    for depth in range(1, len(parents) + 1):
        above = sieve.directory(b"/" + b"/".join(parents[:depth]), above)
        if above is Fate.EXCLUDED:
            return above
    return sieve.file(path.encode(), above, lambda: text)


def examples(glob: str) -> list[str]:
    """Paths that a glob matches: one, or one in each kind of home."""
    if glob.startswith("~/"):
        return [path for home in HOMES for path in examples(home + glob[1:])]
    path = re.sub(r"^\*\*/", "/home/me/project/", glob)
    path = path.replace("**", "a/b").replace("*", "any").replace("?", "p")
    assert path.startswith("/")
    return [path]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_glob_of_the_house_leaves_something_out(rule: Rule) -> None:
    text = b"url = https://user:secret@host password x -----BEGIN OPENSSH PRIVATE KEY-----"
    for glob in rule.globs:
        said = [b"nameserver 127.0.0.1\n"] if rule.name == "platform-network" else [text]
        for path in examples(glob):
            assert all(fate(path, each) is Fate.CLEANED for each in said), path
    for glob in rule.but:
        assert all(fate(path) is Fate.KEPT for path in examples(glob)), glob


@pytest.mark.parametrize(
    "path",
    [
        "/srv/main.py",
        "/srv/.bash_history.md",
        "/srv/tmp/file",
        "/srv/__pycache__/main.cpython-311.pyc",
        "/var/logs",
        "~/.ssh/known_hosts",
        "~/.ssh/id_ed25519.pub",
        "~/.cache/huggingface/hub/model",
        "~/.npmrc",
        "/etc/hosts",
        "/opt/cache/x",
        "/etc/ssl/private/key.pem",
        "~/.ssh/keys/deploy_key.pub",
        "~/.cache/pypoetry/virtualenvs/app-x-py3.11/bin/python",
        "~/.cache/uv/archive-v0/x/numpy/__init__.py",
        "~/.cache/pre-commit/repo/x",
        "~/.cache/node/corepack/v1/pnpm/9/bin/pnpm.cjs",
        "~/.cache/bazel/_bazel_root/x",
        "/srv/repo/tests/fixtures/.netrc",
        "/srv/repo/.claude/settings.json",
        "/srv/repo/CLAUDE.md",
    ],
)
def test_what_stays(path: str) -> None:
    assert fate(path, b"harmless = yes") is Fate.KEPT


def test_a_token_goes_from_among_models_that_stay() -> None:
    assert fate("~/.cache/huggingface/token") is Fate.CLEANED
    assert fate("~/.cache/huggingface/hub/model") is Fate.KEPT


def test_content_decides_where_a_name_does_not() -> None:
    assert fate("/srv/.npmrc", b"//host/:_authToken=x") is Fate.CLEANED
    assert fate("/srv/.npmrc", b"fund=false") is Fate.KEPT
    assert fate("~/.ssh/deploy", b"-----BEGIN RSA PRIVATE KEY-----") is Fate.CLEANED
    assert fate("/etc/hosts", b"127.0.0.1\tlocalhost\n::1\tlocalhost\n127.0.1.1\tbox\n") is (
        Fate.CLEANED
    )
    assert fate("/etc/hosts", b"127.0.0.1\tlocalhost\n10.0.0.1\tdatabase\n") is Fate.KEPT


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/srv/.npmrc", "; author: me\nengine-strict=true\nalways-auth=true\n"),
        ("/srv/.npmrc", "//host/:_authToken=${NPM_TOKEN}\n"),
        ("/srv/.npmrc", "#//host/:_authToken=abc\n"),
        ("/srv/.yarnrc.yml", 'yarnPath: x.cjs\nnpmAuthToken: "${NPM_TOKEN:-}"\n'),
        ("/srv/uv.toml", '# tokenizers\nextra = ["tokenizers"]\n'),
        ("/srv/uv.toml", 'url = "https://${USER}:${PASS}@host/simple"\n'),
        ("/srv/uv.toml", 'git = "ssh://git@github.com/a/b"\n'),
        ("~/.docker/config.json", '{"auths": {}, "credsStore": "desktop"}'),
        ("~/.aws/config", "[default]\nregion = x\nsso_registration_scopes = y\n"),
        ("~/.m2/settings.xml", "<password>${env.PASS}</password>"),
        ("~/.gradle/gradle.properties", "org.gradle.jvmargs=-Xmx2g\n"),
        ("~/.condarc", "channels:\n  - conda-forge\nadd_anaconda_token: true\n"),
        ("~/.pypirc", "[distutils]\nindex-servers = pypi\n"),
        ("~/.my.cnf", "[client]\npassword\nuser = me\n"),
        ("~/.curlrc", "user-agent = x\nlocation\n"),
    ],
)
def test_settings_that_name_secrets_and_hold_none_stay(path: str, text: str) -> None:
    assert fate(path, text.encode()) is Fate.KEPT


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/srv/.npmrc", "fund=false\n//host/:_authToken=npm_x\n"),
        ("/srv/.npmrc", "_auth = dTpw\n"),
        ("/srv/.npmrc", "//host/:_password=dTpw\n"),
        ("/srv/.yarnrc", '"//host/:_authToken" "x"\n'),
        ("/srv/.yarnrc.yml", 'npmAuthToken: "x"\n'),
        ("/srv/.yarnrc.yml", "npmAuthIdent: u:p\n"),
        ("/srv/uv.toml", 'url = "https://u:p@host/simple"\n'),
        ("/srv/uv.toml", 'url = "https://ghp_0123456789abcdef@host/simple"\n'),
        ("~/.docker/config.json", '{"auths": {"host": {"auth": "dTpw"}}}'),
        ("~/.docker/config.json", '{"auths": {"host": {"identitytoken": "x"}}}'),
        ("~/.aws/config", "[default]\naws_secret_access_key = x\n"),
        ("~/.aws/config", "aws_session_token=x\n"),
        ("~/.m2/settings.xml", "<server><password>x</password></server>"),
        ("~/.gradle/gradle.properties", "mavenPassword=x\n"),
        ("~/.condarc", "channels:\n  - https://host/t/ab-01234567/main\n"),
        ("~/.pypirc", "[pypi]\nusername = __token__\npassword = pypi-x\n"),
        ("~/.my.cnf", "[client]\npassword=x\n"),
        ("~/.boto", "gs_secret_access_key = x\n"),
        ("~/.curlrc", 'user = "me:x"\n'),
        ("~/.curlrc", "-u me:x\n"),
        ("~/.curlrc", 'header = "Authorization: Bearer x"\n'),
        ("~/.wgetrc", "http_password=x\n"),
        ("~/.terraformrc", 'credentials "host" {\n  token = "x"\n}\n'),
        ("~/.config/glab-cli/config.yml", "hosts:\n  gitlab.com:\n    token: glpat-x\n"),
        ("/srv/.netrc", "machine host\n  login me\n  password x\n"),
        ("/etc/apt/auth.conf.d/a.conf", "machine host login me password x\n"),
        ("~/.ssh/keys/deploy_key", "-----BEGIN OPENSSH PRIVATE KEY-----\n"),
        ("~/.local/share/nvim/swap/%srv%x.swp", "text"),
        ("/root/x.py~", "text"),
        ("~/.claude/projects/x/a.jsonl", "text"),
    ],
)
def test_secrets_go_with_what_holds_them(path: str, text: str) -> None:
    assert fate(path, text.encode()) is Fate.CLEANED


def test_without_cleaning_only_what_every_sandbox_has_of_its_own_goes() -> None:
    sieve = Sieve(clean=False)
    assert fate("~/.bash_history", sieve=sieve) is Fate.KEPT
    assert fate("/tmp/x", sieve=sieve) is Fate.KEPT
    assert fate("/etc/machine-id", sieve=sieve) is Fate.CLEANED


def test_directories_that_programs_need_stay() -> None:
    sieve = Sieve(clean=True)
    assert sieve.directory(b"/var/log", Fate.KEPT) is Fate.EMPTIED
    assert sieve.directory(b"/var/log/nginx", Fate.EMPTIED) is Fate.EMPTIED
    assert sieve.directory(b"/tmp", Fate.KEPT) is Fate.CLEANED


def test_the_callers_globs() -> None:
    sieve = Sieve(clean=False, exclude=["/data/**", "**/*.o", "build"])
    assert sieve.directory(b"/data", Fate.KEPT) is Fate.KEPT
    assert fate("/data/x/y", sieve=sieve) is Fate.EXCLUDED
    assert fate("/src/a.o", sieve=sieve) is Fate.EXCLUDED
    assert fate("/build/x", sieve=sieve) is Fate.EXCLUDED
    assert fate("/src/build", sieve=sieve) is Fate.KEPT
    with pytest.raises(InvalidRequest):
        Sieve(clean=False, exclude=["x" * 2000])


def test_the_page_says_what_the_code_does() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| (.*) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert [name for name, _, _ in rows] == [rule.name for rule in RULES]
    for (_, globs, reason), rule in zip(rows, RULES, strict=True):
        assert globs == shown(rule)
        assert reason == rule.reason


def shown(rule: Rule) -> str:
    """The cell of a rule's globs."""
    text = " ".join(f"`{glob}`" for glob in rule.globs)
    if rule.but:
        text += " but " + " ".join(f"`{glob}`" for glob in rule.but)
    if rule.says:
        text += ", if it says so"
    if rule.keeps_directories:
        text += "; directories stay"
    return text + ("; always" if rule.always else "")
