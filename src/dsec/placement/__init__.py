"""Decides where: (fleet view, request) -> node, or an explained refusal. Pure.

Start reading at `choose.py`; `overlay.py` counts what this process placed since its view of the
fleet was taken.
"""
