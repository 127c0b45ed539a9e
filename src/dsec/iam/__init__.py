"""Decides who may do what: principals, keys, projects. Pure functions over given facts.

Start reading at `decide.py`. `directory.py` says what a store of these facts must offer; it is
implemented in `dsec.store`.
"""
