"""Decides where: (fleet view, request) -> node, or an explained refusal. Pure."""
