"""One operation a file, in plain torch and written to be read.

They run on any device and are what other implementations are tested against. Each writes only to what it returns,
or to the cache that it is told to write. A row's result never depends on the values of other rows.
"""
