"""Reads Git repositories from their raw files, without running git on what may be hostile.

`repository.py` finds them and knows refs and logs; `objects.py` finds every commit and tag, loose
or packed (`packs.py`). Sizes, counts and the bytes inflated are bounded.
"""
