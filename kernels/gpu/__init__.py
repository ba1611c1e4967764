"""Operations in Triton for NVIDIA GPUs; `ops.py` lists them. No other package imports triton.

A file has kernels and the functions that launch them: these check shapes, types and strides, choose a configuration
from a plain table by shape alone, and wait for nothing on the device. Formulas and rules stand with the functions of
the same names in `kernels/reference`. `launch.py` says how one source is run, interpreted and compiled ahead.
"""
