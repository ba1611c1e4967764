"""`HeldCompiler`: a compiler of grammars that waits until a test lets it go on."""

import threading
from collections.abc import Callable
from concurrent.futures import Future

from llguidance import LLMatcher

from shared.text.grammars import Compiled, GrammarCompiler
from shared.text.tokenizer import Tokenizer


class HeldCompiler(GrammarCompiler):
    """Notes what it compiles. What `start` asks for is not compiled before `may_go_on` is set."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.compiled: list[str] = []
        self.begun = threading.Semaphore(0)
        self.may_go_on = threading.Event()

    def matcher(self, grammar: str) -> LLMatcher:
        self.compiled.append(grammar)
        return super().matcher(grammar)

    def start(self, grammar: str, is_needed: Callable[[], bool]) -> Future[Compiled | None]:
        def is_begun() -> bool:
            self.begun.release()
            assert self.may_go_on.wait(60)
            if is_needed():
                self.compiled.append(grammar)
                return True
            return False

        return super().start(grammar, is_begun)
