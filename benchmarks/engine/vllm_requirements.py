"""Prints what the wheel in a folder requires, torch aside: `python vllm_requirements.py FOLDER`."""

from __future__ import annotations

import sys
import zipfile
from email import message_from_bytes
from pathlib import Path


def main() -> None:
    (path,) = Path(sys.argv[1]).glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(wheel.read(name))
    for requirement in metadata.get_all("Requires-Dist", []):
        if "extra ==" not in requirement and not requirement.startswith("torch"):
            print(requirement)


if __name__ == "__main__":
    main()
