"""Models. One decoder serves all families; a family translates its config and names its tensors.

`registry.py` lists the families, and imports one when it is used. `fallback/` serves architectures without a family.
"""
