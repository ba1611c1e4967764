"""Models that have no family here: transformers' own modelling code, with its attention replaced by ours.

transformers builds the model and computes all of it but attention, whose keys and values live in the paged cache like
those of any other model. The tokens of a step go in as one sequence with their positions. That is right only for a
model whose tokens see each other in attention alone. So each model is checked on a few tokens before it is served
(`sanity_check.py`), and refused if it keeps state elsewhere. No code of a checkpoint is ever run.
"""
