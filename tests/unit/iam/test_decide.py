"""Who may do what where."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.base.errors import NotFound, PermissionDenied, Unauthenticated
from dsec.base.ids import PrincipalId, ProjectId
from dsec.iam.decide import decide, permissions_in
from dsec.iam.keys import digest_of, mint_key, well_formed
from dsec.iam.permissions import OWNER, READER, Permission
from dsec.iam.principals import Grant, KeyFacts, Principal
from dsec.iam.projects import ROOT, ProjectTree

A, A1, A2, B = (ProjectId(name) for name in ("a", "a1", "a2", "b"))
TREE = ProjectTree({ROOT: None, A: ROOT, A1: A, A2: A, B: ROOT})


def principal(*grants: Grant) -> Principal:
    return Principal(PrincipalId("p"), "p", "agent", A, grants)


@pytest.mark.parametrize(
    ("project", "visible"), [(ROOT, False), (A, True), (A1, True), (A2, True), (B, False)]
)
def test_a_grant_holds_in_its_project_and_below(project: ProjectId, *, visible: bool) -> None:
    who = principal(Grant(A, OWNER))
    if visible:
        decide(who, Permission.SANDBOX_CREATE, project, TREE)
    else:
        with pytest.raises(NotFound):
            decide(who, Permission.SANDBOX_CREATE, project, TREE)


def test_visible_but_not_allowed_is_a_denial() -> None:
    who = principal(Grant(A, READER))
    with pytest.raises(PermissionDenied) as denied:
        decide(who, Permission.SANDBOX_STOP, A1, TREE)
    assert denied.value.details == {"permission": "sandbox:stop"}


def test_grants_add_up_along_the_chain() -> None:
    who = principal(Grant(A, READER), Grant(A1, frozenset({Permission.SANDBOX_CREATE})))
    assert permissions_in(who, A1, TREE) == READER | {Permission.SANDBOX_CREATE}
    assert permissions_in(who, A2, TREE) == READER
    assert permissions_in(who, B, TREE) is None


def test_a_project_that_does_not_exist_is_not_visible_to_anyone() -> None:
    with pytest.raises(NotFound):
        decide(principal(Grant(ROOT, OWNER)), Permission.SANDBOX_READ, ProjectId("x"), TREE)


def test_what_is_refused_is_named_alike() -> None:
    who = principal(Grant(A, OWNER))
    with pytest.raises(NotFound) as foreign:
        decide(who, Permission.SANDBOX_READ, B, TREE, "sandbox sbx1")
    assert foreign.value.message == "no sandbox sbx1"
    assert foreign.value.details == {"kind": "sandbox"}


def test_the_tree_below() -> None:
    assert TREE.below(A) == {A, A1, A2}
    assert TREE.below(ROOT) == {ROOT, A, A1, A2, B}
    assert TREE.below(ProjectId("x")) == frozenset()


def test_a_damaged_tree_ends() -> None:
    ring = ProjectTree({A: B, B: A})
    assert list(ring.chain(A)) == [A, B]


@given(st.sampled_from([ROOT, A, A1, A2, B]), st.sampled_from([ROOT, A, A1, A2, B]))
def test_below_and_chain_agree(one: ProjectId, other: ProjectId) -> None:
    assert (one in TREE.below(other)) == (other in TREE.chain(one))


def test_keys() -> None:
    key = mint_key()
    assert well_formed(key)
    assert well_formed("e2b_" + "0" * 40)
    assert len(digest_of(key)) == 32
    assert mint_key() != key


@pytest.mark.parametrize(
    "text",
    [
        "",
        "dsec_",
        "dsec_" + "0" * 39,
        "dsec_" + "0" * 41,
        "dsec_" + "A" * 40,
        "dsec_" + "0" * 40 + "\n",
        "dsec_" + "\u0660" * 40,
        "x" * 45,
    ],
)
def test_what_is_no_key(text: str) -> None:
    assert not well_formed(text)
    with pytest.raises(Unauthenticated):
        digest_of(text)


def test_keys_end() -> None:
    who = principal()
    assert KeyFacts(who).usable(1e12)
    assert not KeyFacts(who, expires_at=10.0).usable(10.0)
    assert KeyFacts(who, expires_at=10.0).usable(9.9)
    assert not KeyFacts(who, revoked_at=5.0).usable(1.0)


def test_permissions_are_scope_and_action() -> None:
    assert all(p.count(":") == 1 for p in Permission)
    assert READER < OWNER
