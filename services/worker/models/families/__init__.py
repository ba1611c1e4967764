"""Model families: each translates its config.json and names its tensors."""
