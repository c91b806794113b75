"""Fixtures that fail a test which leaks a process group, a thread, a variable or a file."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed

#: Written by libraries for themselves, once a process.
_LIBRARY_VARIABLES = {"KMP_INIT_AT_FORK", "KMP_DUPLICATE_LIB_OK", "PYTEST_CURRENT_TEST"}
_IGNORED = {
    ".git",
    ".venv",
    "__pycache__",
    ".pytest_cache",
    ".hypothesis",
    ".mypy_cache",
    ".ruff_cache",
}
_ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def leaks_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail on what a test leaves behind."""
    environment = dict(os.environ)
    threads = set(threading.enumerate())
    files = _files()
    yield
    initialised = torch.distributed.is_initialized()
    if initialised:
        torch.distributed.destroy_process_group()
    assert not initialised, "the test left a process group"
    changed = {
        name
        for name in {*environment, *os.environ}
        if environment.get(name) != os.environ.get(name) and name not in _LIBRARY_VARIABLES
    }
    assert not changed, f"the test changed environment variables: {changed}"
    left = [thread for thread in threading.enumerate() if thread not in threads]
    for thread in left:
        thread.join(timeout=5)
    left = [thread for thread in left if thread.is_alive()]
    assert not left, f"the test left threads: {left}"
    assert _files() == files, f"the test wrote outside tmp_path: {_files() ^ files}"


def _files() -> set[str]:
    """Return the files of the checkout, but for caches."""
    found = set()
    for folder, folders, names in os.walk(_ROOT):
        folders[:] = [name for name in folders if name not in _IGNORED]
        if Path(folder) == _ROOT / "egs_demo":
            folders[:] = [n for n in folders if n not in ("data", "dump", "exp", "downloads")]
        found.update(os.path.join(folder, name) for name in names)
    return found
