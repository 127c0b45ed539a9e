"""The families of rules, one file each. To add a rule, make a `Rule` and have a family yield it."""

from __future__ import annotations

from dsec.images.lint.rule import Family, Rule
from dsec.images.lint.rules import answers, git, layers, packages, privilege, secrets, size, users

FAMILIES: tuple[Family, ...] = (
    git.FAMILY,
    answers.FAMILY,
    secrets.FAMILY,
    privilege.FAMILY,
    users.FAMILY,
    packages.FAMILY,
    layers.FAMILY,
    size.FAMILY,
)
RULES: tuple[Rule, ...] = tuple(rule for family in FAMILIES for rule in family.rules)
"""All rules of the house, in the order of the documentation."""
