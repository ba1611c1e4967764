"""What every process agrees on: the wire, the parameters, the errors, text handling and configuration.

Imports nothing of ours from outside this package, and neither torch nor aiohttp.
"""
