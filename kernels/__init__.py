"""Tensor operations of the forward pass and of sampling: tensors in, tensors out, nothing known of requests.

`load.py` chooses the implementations; `reference/` has one in plain torch for every operation. This file stays
without code and without a version: another distribution of the same name exists, and libraries that probe for it
would otherwise take this package for theirs.
"""
