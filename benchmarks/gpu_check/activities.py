"""What a device did in some steps, by torch's profiler: how many kernels a step has, and how long it idles between two.

Each step begins with one copy to the device (services/worker/transfers.py), so that copies tell steps apart.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

STEP_BEGINS = "Memcpy HtoD"
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
"""Beginnings of the names of the host's calls that give a device work."""


class Activity(NamedTuple):
    """A kernel or a copy on the device, or a call on the host. Times are seconds."""

    name: str
    begin: float
    end: float


class Activities(NamedTuple):
    """All of some steps, in the order of their beginnings."""

    on_host: list[Activity]
    on_device: list[Activity]

    @property
    def launches(self) -> int:
        """The host's calls that gave the device work."""
        return sum(activity.name.startswith(LAUNCHES) for activity in self.on_host)


def record_activities(steps: Callable[[], object], device: torch.device) -> Activities:
    """Run `steps` under the profiler, until the device has done them."""
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=kinds) as profiler:
        steps()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    all_activities = [
        (event.device_type, Activity(event.name, event.time_range.start / 1e6, event.time_range.end / 1e6))
        for event in events
    ]
    return Activities(
        [activity for kind, activity in all_activities if kind == DeviceType.CPU],
        [activity for kind, activity in all_activities if kind == DeviceType.CUDA],
    )


def idle_between_steps(on_device: Sequence[Activity]) -> list[float]:
    """Return how long the device had nothing to do, at each beginning of a step but the first.

    Counted is the time from the end of all earlier work to the step's copy, and from its end to the step's first
    kernel. Pauses between the kernels of a step are not.
    """
    idle = []
    busy_until = on_device[0].end if on_device else 0.0
    for previous, activity, following in zip(on_device, on_device[1:], on_device[2:], strict=False):
        busy_until = max(busy_until, previous.end)
        if activity.name.startswith(STEP_BEGINS):
            before = max(0.0, activity.begin - busy_until)
            after = max(0.0, following.begin - max(busy_until, activity.end))
            idle.append(before + after)
    return idle
