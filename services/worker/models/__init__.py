"""Model families. One decoder serves them all; a family is its config's translation and its tensors' names.

`registry.py` says which there are, and loads one when it is used. `fallback/` serves what has no family.
"""
