"""Tests the service with a scripted runner, without sockets. The system tests have real ones."""

from services.worker.config import WorkerConfig
from services.worker.service import Service
from shared.protocol import Configure, Epoch
from tests.scripted_worker import Script, ScriptedRunner


class LoggingRunner(ScriptedRunner):
    """Notes in `calls` that it was configured."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__(Script())
        self.calls = calls

    def configure(self, message: Configure) -> None:
        self.calls.append("configure")


def test_on_configured_is_called_once_after_the_first_configuration() -> None:
    """Threads are pinned then: earlier, the sockets' threads would inherit a single CPU."""
    calls: list[str] = []
    service = Service(WorkerConfig(), LoggingRunner(calls), on_configured=lambda: calls.append("configured"))
    for count in (1, 2):
        service.configure(Configure(Epoch("test", count), 16, 8, 4, 64, 128))
    assert calls == ["configure", "configured", "configure"]
