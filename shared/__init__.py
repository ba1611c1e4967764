"""Code that several processes share. It imports nothing else of Quire's, and neither torch nor aiohttp.

The modules at the top are what every process agrees on: the wire, the transport, parameters, errors, configuration.
Three packages are for those that read model files, which the scheduler does not: `text` (tokens to text and back) may
import `hub` (where a model comes from), which may import `gguf` (GGUF files as model folders). The scheduler's image
has none of the three.
"""
