"""All operations in plain torch, written to be read. `ops.py` lists them.

They run on any device, and other implementations are tested against them. An operation writes only to its result, or to
the cache that is its argument. The result of a row never depends on other rows. `kernels/ops.py` has the shapes and
types of arguments; the formulas are here.
"""
