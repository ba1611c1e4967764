"""Finds the files of a model: on Hugging Face's hub, in a local folder or file, or in the embedded model."""
