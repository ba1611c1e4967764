"""Operations in C++; `ops.py` lists them, and `extension.py` loads the library that has them.

Arithmetic is in float32, whatever the types of weights and cache. `embedding` returns float32, so all activations of a
model are float32. The formulas are in `kernels/reference`, in functions of the same names.
"""
