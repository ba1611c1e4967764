"""`TensorNames`: the names under which a checkpoint keeps a model's tensors, since there are several conventions.

All that transformers takes is taken: tensors with or without the prefix of the whole model, one by one; a tied table
under the name of the head alone; all experts of a layer in one tensor; the newer and the older name of a module.
"""

from collections.abc import Iterable, Iterator

from services.worker.models.spec import WeightNames


class TensorNames:
    """The tensors of a checkpoint, by the names that a family has for them."""

    def __init__(self, stored: Iterable[str], names: WeightNames, *, tied: bool) -> None:
        self._family = names
        self._all = list(stored)
        self._stored: dict[str, str] = {}
        for prefix in names.prefixes:
            for name in self._all:
                if name.startswith(prefix):
                    self._stored.setdefault(self._plain(name.removeprefix(prefix)), name)
        self.embedding, self.head = f"{names.modules['embedding']}.weight", f"{names.head}.weight"
        fits = (prefix for prefix in names.prefixes if prefix + self.embedding in self._all)
        self._prefix = next(fits, names.prefixes[0])
        stacks = tuple(names.stacked_experts.values())
        self._has_stacks = any(name.endswith(stacks) for name in self._stored)
        if tied and self.head in self._stored:
            self._stored.setdefault(self.embedding, self._stored[self.head])

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def find(self, name: str) -> str:
        """Return the checkpoint's spelling of `name`; for a tensor that is not there, the one that it would have."""
        if name in self._stored:
            return self._stored[name]
        for theirs, ours in self._family.renamed.items():
            if ours in name and any(theirs in other for other in self._all):
                name = name.replace(ours, theirs)
        return name if name == self.head else self._prefix + name

    def is_stacked(self, stack: str, parts: Iterable[str]) -> bool:
        """Return whether one tensor `stack` holds the experts of a layer, and not tensors of their own, `parts`."""
        if stack in self._stored:
            return True
        return self._has_stacks and not any(part in self._stored for part in parts)

    def others(self, used: set[str]) -> Iterator[str]:
        """Yield the tensors that are not `used`, without those that are known to be no part of the decoder."""
        names = self._family
        for name in self._all:
            if name not in used and not name.endswith(names.ignored) and not name.startswith(names.unserved):
                yield name

    def _plain(self, name: str) -> str:
        for theirs, ours in self._family.renamed.items():
            name = name.replace(theirs, ours)
        return name
