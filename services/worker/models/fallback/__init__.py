"""Models that have no family here: transformers' own modelling code, with its attention replaced by ours.

transformers builds the model and computes all of it but attention, whose keys and values live in the paged cache like
any other model's. A step's tokens go in as one sequence with their positions. That is right only for a model whose
tokens meet in attention alone, so each model is tried on a few tokens before it is served (`trial.py`); whatever
keeps state elsewhere is refused then. No code of a checkpoint is ever run.
"""
