"""Where models come from: the hub, a local folder or file, or the embedded model."""
