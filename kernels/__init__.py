"""Tensor operations of the forward pass and of sampling: tensors in, tensors out, nothing known of requests.

`ops.py` says which there are; `load.py` chooses a device's; `reference/` has all of them in plain torch. This file
stays without code and without a version: another distribution of the same name exists, and libraries that probe for
it would otherwise take this package for theirs.
"""
