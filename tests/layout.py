"""Which tests belong to which module: `eventlm/x/y.py` has `tests/x/test_y.py`, and maybe `tests/x/test_y_more.py`."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Folders of product modules. eventlm's links to the last three are not followed.
PRODUCT = ("eventlm", "kernels", "policies", "replay")
#: For each module without tests of its own, the files that test it.
TESTED_ELSEWHERE: dict[str, list[str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def modules() -> list[str]:
    """Paths of the product's modules, relative to the root, without packages' `__init__`."""
    paths = [path for name in PRODUCT for path in sorted((ROOT / name).rglob("*.py"))]
    return [
        str(path.relative_to(ROOT))
        for path in paths
        if path.name != "__init__.py" and not any(part.is_symlink() for part in path.parents)
    ]


def twins(module: str) -> list[str]:
    """The test files of a module's name, relative to the root.

    `test_y_more.py` belongs to `y`, unless there is a module `y_more`, whose twin it is.
    """
    path = Path(module)
    folder = ROOT / "tests" / Path(*path.parts[path.parts[0] == "eventlm" : -1])
    siblings = {each.stem for each in (ROOT / path).parent.glob("*.py")}
    found = []
    for test in sorted(folder.glob(f"test_{path.stem}*.py")):
        name = test.stem.removeprefix("test_")
        owner = max((each for each in siblings if name == each or name.startswith(f"{each}_")), key=len, default="")
        if owner == path.stem:
            found.append(str(test.relative_to(ROOT)))
    return found


def tests_of(module: str) -> list[str]:
    """The files that test a module."""
    return twins(module) or TESTED_ELSEWHERE.get(module, [])
