"""Objects that come with the program: an image has them in `LIBRARY`, so that its start compiles none of them.

Triton keeps what it has compiled in one folder, TRITON_CACHE_DIR. That must be writable, since a model may need objects
that nobody has compiled ahead, and it should outlive the container, so it lies in a volume, which hides what an image
has at that path. The image sets TRITON_CACHE_MANAGER to `kernels.gpu.object_cache:ObjectCache`, which reads both.
"""

import json
from pathlib import Path

from triton.runtime.cache import FileCacheManager

LIBRARY = Path(__file__).parent / "lib"
"""The folder that an image's build has filled, laid out as TRITON_CACHE_DIR: a folder a key. Nothing writes to it."""


class ObjectCache(FileCacheManager):  # type: ignore[misc]
    """What Triton keeps under one key: the hash of a kernel's source, types, constants and options, and of Triton."""

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return the paths of an object's files by their names, or None if it must be compiled.

        `filename` is that of the object's metadata. The image keeps no intermediate code, so a file may be missing.
        """
        group: dict[str, str] | None = super().get_group(filename)
        if group is not None:
            return group
        folder = LIBRARY / self.key
        listing = folder / f"__grp__{filename}"
        if not listing.exists():
            return None
        paths = {name: folder / name for name in json.loads(listing.read_text())["child_paths"]}
        return {name: str(path) for name, path in paths.items() if path.exists()}
