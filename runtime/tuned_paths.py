"""Where results of `kgen tune` are kept: one file a device."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path


def switched_off() -> bool:
    """Whether KGEN_TUNED=0 is set."""
    return os.environ.get("KGEN_TUNED") == "0"


def user_folder() -> Path:
    """The folder of the user's results: `$KGEN_TUNED` where that is a path, else in the user's configuration."""
    given = os.environ.get("KGEN_TUNED", "")
    if given not in ("", "0", "1"):
        return Path(given)
    import platformdirs  # only needed without the variable

    return Path(platformdirs.user_config_dir("kgen", appauthor=False)) / "tuned"


def file_name(device: str) -> str:
    """`nvidia_h200.json` for "NVIDIA H200"."""
    return (re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_") or "device") + ".json"


def user_path(device: str) -> Path | None:
    """The file of the user's results on the device of this name; None where no home folder is known."""
    try:
        return user_folder() / file_name(device)
    except RuntimeError:
        return None


@functools.cache
def read(path: Path | None) -> bytes | None:
    """What is in the file of the user's results, None where there is none. Read once a process, so that what names a
    stored call and what chose its schedules is one text, though another process may write a new one meanwhile."""
    try:
        return None if path is None else path.read_bytes()
    except OSError:
        return None


def shipped_path(device: str) -> Path:
    """The file of the results that come with kgen; it need not exist."""
    return Path(__file__).resolve().parent / "tuned_defaults" / file_name(device)
