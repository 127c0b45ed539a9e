"""Every rule of the house finds what it is for; a usual image has no findings at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from dsec.base.quantity import GIB, MIB
from dsec.images.lint.environment import Surroundings
from dsec.images.lint.indexes import Indexes
from dsec.images.lint.rules import RULES
from dsec.images.lint.rules.privilege import capabilities
from dsec.images.records import ImageConfig
from tests.unit.images.lint.build import (
    CONFIG,
    KEY,
    STATUS,
    Sketch,
    capability,
    debian,
    environment,
    found,
    report,
)

DAY_S = 86400
AROUND = Surroundings(
    indexes=Indexes(apt=("packages.test", "mirror"), python=("packages.test", "mirror")),
    now_s=100 * DAY_S,
    answers=("return a + b  # fixed",),
)


@dataclass
class Case:
    """A usual image, changed."""

    image: Sketch = field(default_factory=debian)
    above: list[Sketch] = field(default_factory=list)
    config: ImageConfig = CONFIG


Change = Callable[[Case], None]
CASES: dict[str, tuple[Change, str]] = {}
"""By rule: what makes it fire, and where."""


def fires(rule: str, where: str) -> Callable[[Change], Change]:
    def keep(change: Change) -> Change:
        assert rule not in CASES
        CASES[rule] = (change, where)
        return change

    return keep


def is_for(rule: str, where: str, path: str, content: bytes = b"x", mode: int = 0o644) -> None:
    """A case that is one file."""

    @fires(rule, where)
    def change(case: Case) -> None:
        case.image.file(path, content, mode)


def _nothing(case: Case) -> None:
    """Its tests are elsewhere."""


IN_GIT = "test_git.py"
for by_git in ("future-objects", "future-refs", "dangling-refs", "remote", "unreadable"):
    CASES[f"git-{by_git}"] = (_nothing, IN_GIT)
is_for("history-other", "/app/.hg", "/app/.hg/store/00changelog.i")
is_for("answer-in-environment", "/app/x.pyc", "/app/x.pyc", b"\0\1return a + b  # fixed\0")
is_for("answer-file-name", "/app/solution.py", "/app/solution.py")
is_for("secret-private-key", "/home/agent/.ssh/id", "/home/agent/.ssh/id", KEY)
is_for(
    "secret-credentials",
    "/home/agent/.netrc",
    "/home/agent/.netrc",
    b"machine h login l password p1",
)
is_for("secret-token", "/app/.env", "/app/.env", b"GITHUB=ghp_" + b"a1B2" * 9)
is_for("secret-url", "/etc/pip.conf", "/etc/pip.conf", b"index-url = https://me:s3cr3t@mirror/x")
is_for("secret-shell-history", "/srv/.bash_history", "/srv/.bash_history", b"ls\n")
is_for(
    "secret-in-package",
    "/opt/v/lib/python3/site-packages/tornado/test/test.key",
    "/opt/v/lib/python3/site-packages/tornado/test/test.key",
    KEY,
)
is_for("setuid-unknown", "/opt/su", "/opt/su", mode=0o4755)
is_for("world-writable-system", "/usr/bin/x", "/usr/bin/x", mode=0o777)
is_for("pip-editable", "/opt/p.egg-link", "/opt/p.egg-link")
is_for("pip-no-record", "/opt/p-1.dist-info", "/opt/p-1.dist-info/METADATA")
is_for(
    "pip-index", "/etc/pip.conf", "/etc/pip.conf", b"[global]\nindex-url = https://evil/simple\n"
)
is_for(
    "apt-source",
    "/etc/apt/sources.list.d/v.sources",
    "/etc/apt/sources.list.d/v.sources",
    b"Types: deb\nURIs: http://packages.test/debian\n\nURIs: https://vendor/apt\n",
)
is_for(
    "pip-direct-url",
    "/opt/p-1.dist-info",
    "/opt/p-1.dist-info/direct_url.json",
    b'{"url": "https://u:pw@h/p.git", "vcs_info": {"vcs": "git", "commit_id": "abcdef"}}',
)
is_for(
    "apt-broken",
    "/var/lib/dpkg/status",
    "/var/lib/dpkg/status",
    STATUS.replace(b"ok installed", b"ok half-configured"),
)
is_for(
    "apt-held",
    "/var/lib/dpkg/status",
    "/var/lib/dpkg/status",
    STATUS.replace(b"install ok", b"hold ok"),
)


@fires("secret-environment", "")
def _variable(case: Case) -> None:
    case.config = ImageConfig(env={"HF_TOKEN": "x"})


@fires("file-capabilities", "/usr/bin/python3")
def _capable(case: Case) -> None:
    case.image.file("/usr/bin/python3").xattrs[b"security.capability"] = capability(1 << 21)


@fires("world-writable-no-sticky", "/tmp")
def _not_sticky(case: Case) -> None:
    case.image.dir("/tmp", 0o777)


@fires("users-no-passwd", "")
def _no_passwd(case: Case) -> None:
    del case.image.root.children[b"etc"].children[b"passwd"]


@fires("users-unknown-owner", "/app/data")
def _stranger(case: Case) -> None:
    case.image.file("/app/data", uid=501)


@fires("users-config-user", "")
def _no_such_user(case: Case) -> None:
    case.config = ImageConfig(user="ghost")


@fires("users-config-number", "")
def _no_such_number(case: Case) -> None:
    case.config = ImageConfig(user="4711:0")


@fires("no-non-root-user", "")
def _root_only(case: Case) -> None:
    case.image.file(
        "/etc/passwd", b"root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000::/:/bin/false"
    )


@fires("users-home-missing", "")
def _homeless(case: Case) -> None:
    del case.image.root.children[b"home"]


@fires("apt-foreign", "/var/lib/apt/lists")
def _foreign(case: Case) -> None:
    case.image.file("/var/lib/apt/lists/m_Packages", b"Package: dash\n").mtime_ns = (
        99 * DAY_S * 10**9
    )


@fires("apt-lists-old", "/var/lib/apt/lists")
def _old(case: Case) -> None:
    case.image.file("/var/lib/apt/lists/m_Packages", b"Package: bash\n")


@fires("toolkit-overrides", "/app/main.py")
def _override(case: Case) -> None:
    case.above.append(Sketch("toolkit t:1"))
    case.above[0].file("/app/main.py")


@fires("layer-directory-mode", "/")
def _mode(case: Case) -> None:
    case.above.append(Sketch("workspace w:1"))
    case.above[0].root.mode = 0o40700


@fires("size-total", "")
def _large(case: Case) -> None:
    for number in range(40):
        _sized(case, f"/opt/{number}", 250 * MIB)


@fires("size-big-file", "/opt/model")
def _big(case: Case) -> None:
    _sized(case, "/opt/model", 300 * MIB)


@fires("size-cache", "/home/agent/.cache")
def _cache(case: Case) -> None:
    _sized(case, "/home/agent/.cache/pip/x", 6 * MIB)


@fires("layers-many", "")
def _many(case: Case) -> None:
    case.above.extend(Sketch() for _ in range(20))


@fires("layers-shadowed", "")
def _shadowed(case: Case) -> None:
    _sized(case, "/opt/old/tar", 40 * MIB)
    case.above.append(Sketch())
    case.above[0].whiteout("/opt/old")


def _sized(case: Case, path: str, size: int) -> None:
    case.image.file(path).size = size


def test_every_rule_has_a_case() -> None:
    assert {rule.id for rule in RULES} == CASES.keys()


@pytest.mark.parametrize("rule", [r for r, (_, where) in CASES.items() if where != IN_GIT])
def test_fires(rule: str) -> None:
    change, where = CASES[rule]
    case = Case()
    change(case)
    env = environment(case.image, *case.above, config=case.config, around=AROUND)
    assert (rule, where) in found(env)


def test_a_usual_image_has_no_findings() -> None:
    assert report(environment(debian(), around=AROUND)).findings == []
    assert report(environment(debian(), Sketch("toolkit t:1"), around=AROUND)).findings == []


@pytest.mark.parametrize(
    "path",
    [
        "/app/test_patch.diff",
        "/app/gold_patch",
        "/app/reference_solution/x.py",
        "/task/FAIL_TO_PASS.json",
        "/hidden_tests",
    ],
)
def test_names_that_say_it(path: str) -> None:
    image = debian()
    image.file(path)
    assert "answer-in-environment" in dict(found(environment(image)))


@pytest.mark.parametrize(
    "path", ["/app/resolution.py", "/app/answering.py", "/usr/src/a.patch", "/app/.git/a.diff"]
)
def test_names_that_say_nothing(path: str) -> None:
    image = debian()
    image.file(path)
    assert (
        not {"answer-in-environment", "answer-file-name"} & dict(found(environment(image))).keys()
    )


def test_tests_named_in_a_file_or_given_by_name() -> None:
    image = debian()
    image.file("/app/task.json", b'{"FAIL_TO_PASS": ["t"]}')
    image.file("/app/tests/test_hidden.py", b"")
    env = environment(image, around=Surroundings(answers=("test_hidden.py", "abc")))
    assert found(env) == [
        ("answer-in-environment", "/app/task.json"),
        ("answer-in-environment", "/app/tests/test_hidden.py"),
    ]


SECRETS = {
    "AWS_ACCESS_KEY_ID=AKIA" + "QWERTYUIOPASDFGH": "secret-token",
    "aws_secret_access_key = " + "a" * 40: "secret-token",
    "hf_" + "abcdefghijklmnopqr" + "stuvwxyzABCDEFGH": "secret-token",
    "glpat-" + "abcdefghij0123456ABC": "secret-token",
    "sk-ant-" + "aB3" * 30: "secret-token",
    KEY.decode().replace("\n", "\\n"): "secret-private-key",
    "postgres://admin:hunter2@db/x": "secret-url",
}


@pytest.mark.parametrize("text", SECRETS)
def test_secrets_are_found_and_not_told(text: str) -> None:
    image = debian()
    image.file("/app/settings", b"one\n" + text.encode())
    (finding,) = report(environment(image)).findings
    assert (finding.rule, finding.path) == (SECRETS[text], "/app/settings")
    assert finding.message.startswith("line 2 ")
    assert text[-10:] not in finding.message


@pytest.mark.parametrize(
    "text",
    [
        "hf_hub_download and ghp_ and sk-learn, AIza",
        "http://user:pass@host https://{user}:{pw}@host",
        "-----BEGIN PUBLIC KEY-----\nMIIBIjANBgkqhkiG9w0BAQEF",
        "if line == '-----BEGIN RSA PRIVATE KEY-----': raise",
        "task-" + "0123456789abcdef" * 4,
    ],
)
def test_what_only_looks_like_a_secret(text: str) -> None:
    image = debian()
    image.file("/app/settings", text.encode())
    assert found(environment(image)) == []


def test_an_image_cannot_call_its_own_files_packaged() -> None:
    image = debian()
    image.file("/var/lib/dpkg/info/evil.list", b"/app/key\n/usr/local/key\n")
    image.file("/app/key", KEY)
    image.file("/usr/local/key", KEY)
    assert [path for _, path in found(environment(image))] == ["/app/key", "/usr/local/key"]


def test_passwords_in_urls_are_not_told() -> None:
    image = debian()
    CASES["pip-direct-url"][0](case := Case(image))
    text = str(report(environment(case.image)).findings)
    assert "h/p.git at abcdef" in text
    assert "pw@" not in text


def test_capabilities_by_name() -> None:
    assert capabilities(capability(1 << 21 | 1 << 40)) == {
        "cap_sys_admin",
        "cap_checkpoint_restore",
    }
    assert capabilities(b"") == capabilities(b"\1\0\0\2") == set()


def test_a_toolkit_that_deletes() -> None:
    kit = Sketch("toolkit t:1")
    kit.whiteout("/home/agent")
    findings = {f.rule: f for f in report(environment(debian(), kit)).findings}
    assert findings["toolkit-overrides"].message == "it deletes a directory of image"
    assert findings["toolkit-overrides"].layer == "toolkit t:1"
    assert "users-home-missing" in findings


def test_a_workspace_may_replace_files() -> None:
    workspace = Sketch("workspace w:1")
    workspace.file("/app/main.py")
    assert found(environment(debian(), workspace)) == []


def test_sizes_count_each_hard_link_once() -> None:
    image = debian()
    image.put("/opt/b", image.file("/opt/a", b"x" * 1000))
    one = debian()
    one.file("/opt/a", b"x" * 1000)
    assert report(environment(image)).size_bytes == report(environment(one)).size_bytes


def test_the_size_of_shadowed_layers_is_that_of_the_lower() -> None:
    case = Case()
    _shadowed(case)
    (finding,) = report(environment(case.image, *case.above)).findings
    assert finding.message.startswith("40.0 MiB")
    assert report(environment(case.image, *case.above)).size_bytes < GIB
