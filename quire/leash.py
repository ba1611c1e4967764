"""Runs a module as a program that cannot outlive its parent: `python -m quire.leash PARENT MODULE ...`.

The kernel kills it when its parent is gone, however the parent went, from before the module's first import on.
"""

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """Tie this process to PARENT, then be MODULE with the rest of `argv`."""
    parent, module, *rest = argv
    tie_to(int(parent))
    sys.argv = [module, *rest]  # runpy puts the module's path into its first place
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def tie_to(parent: int) -> None:
    """Have this process killed when `parent` ends; exits at once if it has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it went before the kernel was told
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
