"""Makes a venv for each peer, apart from the repository's.

A stamp file holds what was installed, so that only a changed list installs again.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STAMP = ".installed"
SHOWN = 300  # characters of what a failed command said last


class Skipped(Exception):
    """A peer that cannot be installed or does not run here; the message says why."""


def pinned(package: str) -> str:
    """Return `package==version`, as the repository's own requirements have it."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return next(line.split(";")[0].strip() for line in lines if line.startswith(f"{package}=="))


def environment(folder: Path, *pip_calls: Sequence[str]) -> Path:
    """Return the folder of programs of a venv in which `pip` was called with each of `pip_calls`.

    Raise `Skipped` if one fails.
    """
    stamp, contents = folder / STAMP, json.dumps(pip_calls)
    if not stamp.exists() or stamp.read_text() != contents:
        print(f"Installing {folder.name} into {folder} (see {log(folder)})", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        call([sys.executable, "-m", "venv", str(folder)], log(folder))
        for step in pip_calls:
            call([str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", *step], log(folder))
        stamp.write_text(contents)
    return folder / "bin"


def version(programs: Path, package: str) -> str:
    """Return the installed version of a package in the environment with these programs."""
    ask = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.check_output([str(programs / "python"), "-c", ask], text=True).strip()


def log(folder: Path) -> Path:
    """Return the log of the installation into this folder."""
    return folder.parent / f"{folder.name}.install.log"


def call(argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> None:
    """Run a command, with its output appended to `log`. Raise `Skipped` if it fails."""
    with log.open("a") as file:
        file.write(f"+ {' '.join(argv)}\n")
        file.flush()
        try:
            done = subprocess.run(argv, stdout=file, stderr=subprocess.STDOUT, env=env, cwd=cwd, check=False)
        except OSError as error:
            raise Skipped(f"{argv[0]}: {error.strerror}") from error
    if done.returncode:
        said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise Skipped(f"{' '.join(argv[:6])} ... failed: {said[-1][:SHOWN]}")
