"""Tensor operations of the forward pass and of sampling. They know nothing of requests.

`ops.py` declares the operations, `load.py` chooses a device's, and `reference/` has all of them in plain torch. This
file must have no code and no version: there is another distribution called `kernels`, and libraries that probe for it
would take this package for that one.
"""
