"""Decides who may do what: principals, keys, projects. Pure functions over given facts."""
