"""The scheduler's core: queues, block tables, preemption and recovery, as pure functions of what comes in.

It imports the standard library, msgspec and the shared protocol; its rules stand at the head of scheduler.py.
"""

from services.scheduler.core.limits import NO_RESOURCES, Limits, WorkerResources, check_settings
from services.scheduler.core.scheduler import Scheduler

__all__ = ["NO_RESOURCES", "Limits", "Scheduler", "WorkerResources", "check_settings"]
