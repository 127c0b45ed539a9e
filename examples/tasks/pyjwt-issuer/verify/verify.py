"""`issuer=` must be compared whole, and lists of issuers must still work."""

import sys

sys.path.insert(0, __file__.rpartition("/")[0])
from grading import Grader

grader = Grader.from_argv()
DECODE = r"""
import jwt
key = "k" * 32
def decode(claims, issuer):
    token = jwt.encode(claims, key, algorithm="HS256")
    return jwt.decode(token, key, algorithms=["HS256"], issuer=issuer)
def accepts(claims, issuer):
    try:
        decode(claims, issuer)
    except jwt.exceptions.InvalidIssuerError:
        return False
    return True
"""

grader.check(
    "refuses a part of the issuer",
    DECODE
    + r"""
whole = "https://login.example.com"
parts = ["https://login", "example.com", "", "login", whole[1:], whole[:-1]]
result = [accepts({"iss": part}, whole) for part in parts]
""",
    expect=[False] * 6,
)
grader.check(
    "accepts the issuer itself",
    DECODE + r"result = [decode({'iss': i}, i) for i in ('a', 'https://x/')]",
    expect=[{"iss": "a"}, {"iss": "https://x/"}],
)
grader.check(
    "a list or tuple of issuers",
    DECODE
    + r"""
result = [
    accepts({"iss": iss}, issuers)
    for issuers in (["one", "two"], ("one", "two"))
    for iss in ("one", "two", "on", "three", "")
]
""",
    expect=[True, True, False, False, False] * 2,
)
grader.check(
    "a missing claim has its own error",
    DECODE + r"decode({'sub': 'x'}, 'a')",
    raises="jwt.exceptions.MissingRequiredClaimError",
)
grader.check(
    "no issuer asked for, none checked",
    DECODE + r"result = [accepts({'iss': 'x'}, None), accepts({}, None)]",
    expect=[True, True],
)

grader.finish()
