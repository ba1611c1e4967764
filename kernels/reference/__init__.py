"""Every operation in plain torch, written to be read; `ops.py` lists them.

They run on any device, and the other implementations are tested against them. Each writes only to what it returns, or
to the cache that it is told to write. A row's result never depends on the values of other rows. Shapes and types of
the arguments stand in `kernels/ops.py`; the formulas stand here.
"""
