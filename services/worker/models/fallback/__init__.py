"""Models without a family: transformers' modelling code, with its attention replaced by Quire's.

transformers builds the model and computes all of it but attention, which uses the paged cache. All tokens of a step are
one sequence to transformers, with their positions. That is right only if attention is the only place where tokens of a
model see each other. So each model is checked on a few tokens before it is served (`sanity_check.py`), and refused if
it keeps state elsewhere. Code that comes with a checkpoint is never run.
"""
