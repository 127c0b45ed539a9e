"""Vocabulary: error tree, ids, quantities, states, clock. Standard library only, no input or output.

Start reading at `errors.py`, then `states.py`.
"""
