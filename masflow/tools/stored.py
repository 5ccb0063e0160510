"""What is costly to make and never changes, kept in a cache folder that all processes share.

Knows nothing of what it keeps: a kind, a key that names the content, and three functions that make, save and
open it. An entry appears whole or not at all (written aside, then renamed), is made by one process while
others wait, and is made again when it was damaged. Where nothing can be written, it stays in memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

try:
    import fcntl
except (
    ImportError
):  # no such locks on Windows: two processes may then make the same entry, the first one stays
    fcntl = None

__all__ = ["CACHE", "Damaged", "cache_root", "content_key", "stored"]

T = TypeVar("T")

CACHE = "MASFLOW_CACHE"
"""Names the folder; `none` keeps everything in memory."""
MANIFEST = "manifest.json"
WAIT_S = 3600.0
"""For another process that makes the same entry; then this one makes its own."""
LOOK_S = 0.05


class Damaged(Exception):
    """An entry that isn't what was saved."""


def cache_root() -> Path | None:
    """The folder from MASFLOW_CACHE, else the user's cache; None where caching is off."""
    named = os.environ.get(CACHE, "").strip()
    if named.lower() == "none":
        return None
    if named:
        return Path(named).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    return (Path(base) if base else Path("~/.cache").expanduser()) / "masflow"


def content_key(files: list[Path], *settings: Any) -> str:
    """32 hexadecimal digits of SHA-256 over files' suffixes and contents, and settings as JSON."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for file in files:
        with file.open("rb") as opened:
            digest.update(f"\n{file.suffix} {hashlib.file_digest(opened, 'sha256').hexdigest()}".encode())
    return digest.hexdigest()[:32]


def stored(
    kind: str, key: str, make: Callable[[], T], save: Callable[[T, Path], None], load: Callable[[Path], T]
) -> T:
    """The entry of this key: opened if it is there and whole, else made, saved and opened.

    Args:
        save: writes what was made into an empty folder.
        load: opens such a folder; raises Damaged, OSError or ValueError for one that it can't use.
    Returns:
        What `load` gives; what `make` gave where nothing can be written, with a warning that says why.
    """
    root = cache_root()
    if root is None:
        return make()
    folder = root / kind / key
    found = _opened(folder, load)
    if found is not None:
        return found
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder.with_name(f".{key}.lock")) as is_alone:
            found = _opened(folder, load)
            if is_alone:
                _clear(folder)
            return found if found is not None else _made(folder, make, save, load)
    except _Unwritable as error:
        _notice(f"{error.reason}; the {kind} stays in this process's memory")
        return error.made
    except OSError as error:
        _notice(
            f"the cache {root} can't be used ({error.strerror}); the {kind} stays in this process's memory"
        )
        return make()


class _Unwritable(Exception):
    """Made, but not saved."""

    def __init__(self, made: Any, reason: str):
        super().__init__(reason)
        self.made, self.reason = made, reason


def _made(
    folder: Path, make: Callable[[], T], save: Callable[[T, Path], None], load: Callable[[Path], T]
) -> T:
    aside = folder.with_name(f".{folder.name}-{os.getpid()}-{time.time_ns()}")
    aside.mkdir()  # before costly work, not after it
    try:
        made = make()
        try:
            save(made, aside)
            _seal(aside)
            _put(aside, folder)
        except OSError as error:
            reason = f"the cache {folder.parent} can't be written ({error.strerror})"
            raise _Unwritable(made, reason) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    found = _opened(folder, load)
    return made if found is None else found


def _clear(folder: Path) -> None:
    """Remove what a process left that ended in the middle; only for who is alone with this entry."""
    for left in folder.parent.glob(f".{folder.name}-*"):
        shutil.rmtree(left, ignore_errors=True)


def _put(aside: Path, folder: Path) -> None:
    """Give the finished folder its name; an entry that another process put there meanwhile stays."""
    try:
        aside.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _opened(folder: Path, load: Callable[[Path], T]) -> T | None:
    """The entry, or None where there is none; a damaged one is moved away."""
    if not folder.is_dir():
        return None
    try:
        _check(folder)
        return load(folder)
    except (Damaged, OSError, ValueError, KeyError) as error:
        _notice(f"the cached {folder} is damaged ({error}) and is made again")
        _move_away(folder)
        return None


def _move_away(folder: Path) -> None:
    """Processes that have it open keep their maps: its files live until they are closed."""
    with suppress(OSError):
        gone = Path(tempfile.mkdtemp(prefix=".damaged-", dir=folder.parent))
        folder.rename(gone / folder.name)
        shutil.rmtree(gone, ignore_errors=True)


def _seal(folder: Path) -> None:
    """Write down sizes, times and digests, and bring everything to the disk before it gets its name."""
    entries = {}
    for file in sorted(folder.iterdir()):
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
            os.fsync(opened.fileno())
        entries[file.name] = {"stat": _stat(file), "sha256": digest}
    with (folder / MANIFEST).open("w", encoding="utf-8") as out:
        json.dump(entries, out)
        out.flush()
        os.fsync(out.fileno())


def _check(folder: Path) -> None:
    """A file that was touched since it was sealed is read and compared; others only looked at.

    Raises:
        Damaged: a file is missing or has other contents.
    """
    try:
        entries = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        for name, entry in entries.items():
            file = folder / name
            if _stat(file) == entry["stat"]:
                continue
            with file.open("rb") as opened:
                if hashlib.file_digest(opened, "sha256").hexdigest() != entry["sha256"]:
                    raise Damaged(f"{name} has other contents")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise Damaged(f"{type(error).__name__}: {error}") from None


def _stat(file: Path) -> list[int]:
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino]


@contextmanager
def _alone(lock: Path) -> Iterator[bool]:
    """Held by one process; the system lets go of it when that process ends, however it ends. False where it
    couldn't be had."""
    if fcntl is None:
        yield False
        return
    with lock.open("a") as file:
        end = time.monotonic() + WAIT_S
        is_mine = False
        while not is_mine and time.monotonic() < end:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_mine = True
            except BlockingIOError:
                time.sleep(LOOK_S)
            except OSError:  # a file system without locks
                break
        yield is_mine


def _notice(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)
