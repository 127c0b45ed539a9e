"""Plumbing every process needs; knows no product noun."""
