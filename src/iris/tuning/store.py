"""What was tuned on this machine: JSON files in the user's cache folder, and what a context knows of them.

One file an operation, ``<folder>/tuned/<operation>.json``::

    {"schema": 1, "records": {"<key>": {"query": {...}, "versions": {...}, "algorithm": "pull", "params": {...}, ...}}}

The key is the text of a :class:`Query` with the versions of Iris, Triton and PyTorch, so what was tuned with others is
kept and not used. Writers hold a lock, merge with what is there, and replace the file as a whole; readers need no lock.
Nothing here raises because of the folder: a file that cannot be read is set aside, one of a newer schema is left alone,
a folder that cannot be written is done without, each with a warning.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from iris import _env
from iris.runtime.logs import logger
from iris.tuning.query import Entry, Query

if TYPE_CHECKING:
    from iris.runtime.context import Iris
    from iris.runtime.groups import Group

SCHEMA = 1
# A writer holds the lock for milliseconds. Who holds it longer hangs, and nobody is to hang with him.
LOCK_SECONDS = 10.0
_PACKAGES = {"iris": "iris-kernels", "triton": "triton", "torch": "torch"}
_warned: set[str] = set()


@dataclass(frozen=True)
class Record(Entry):
    """An :class:`Entry` that was tuned on this machine.

    Attributes:
        default_key: :func:`config_key` of what would have run without tuning, which this was measured against.
        default_milliseconds: what that took; None when it could not be measured.
        candidates: what was tried: name and milliseconds, None for what failed.
        date: when, by UTC.
        host: name of the machine.
    """

    default_key: str = ""
    default_milliseconds: float | None = None
    candidates: tuple[tuple[str, float | None], ...] = ()
    date: str = ""
    host: str = ""


@dataclass(frozen=True)
class Saved:
    """A record as it lies in a file.

    Attributes:
        query: what it is for. record: what was found. versions: of the packages that it was found with.
    """

    query: Query
    record: Record
    versions: tuple[tuple[str, str], ...]


class Tuned:
    """What a context knows of tuned cases, the same on all of its ranks; ``ctx.service("tuned")``.

    What rank 0 found in its files is shared when the context is made. What is learnt later is known to the ranks of the
    group that learnt it, in this context, and to contexts that are made afterwards.
    """

    def __init__(self, ctx: Iris):
        self._ctx = ctx
        self._shared: dict[Query, Record] = {}
        self._learnt: dict[tuple[tuple[int, ...], Query], Record] = {}
        for saved in map(_saved, json.loads(ctx.shared.get("tuned") or "[]")):
            self._shared[saved.query] = saved.record

    def find(self, query: Query, members: Group) -> Record | None:
        """What is known of a case; None when it was not tuned. The same on all ranks of ``members``. Local."""
        return self._learnt.get((members.ranks, query)) or self._shared.get(query)

    def settled(self, query: Query, members: Group) -> bool:
        """Whether the group has tuned the case, or found it tuned, in this context: then it need not meet for that."""
        return (members.ranks, query) in self._learnt

    def settle(self, query: Query, members: Group, record: Record) -> None:
        """Remember that the group has found the case tuned; every rank of ``members`` calls it alike."""
        self._learnt[members.ranks, query] = record

    def forget(self) -> None:
        """Know nothing any more, in this context, so that cases are tuned anew; every rank calls it alike."""
        self._shared.clear()
        self._learnt.clear()
        self._ctx.agreement.forget_calls()

    def learn(self, query: Query, members: Group, entry: Entry, default_key: str) -> Path | None:
        """Remember what was found for a case; every rank of ``members`` calls it alike. The first of them saves it.

        Args:
            query: the case.
            members: the group that tuned it.
            entry: what was found.
            default_key: :func:`config_key` of what would have run without tuning.

        Returns:
            The file that it was saved in; None on the other ranks, and when it could not be saved.
        """
        record = as_record(entry, default_key)
        self.settle(query, members, record)
        return write(query.operation, {query: record}) if members.index == 0 else None


def shared_at_start(ctx: Iris) -> str:
    """What rank 0 shares when a context is made: the records for its architecture, as JSON.

    Nothing is tuned under the interpreter, so files are read there only when ``IRIS_CACHE_DIR`` names a folder.
    """
    if not ctx.target.compiled and not _env.get("IRIS_CACHE_DIR"):
        return "[]"
    here = dict(versions())
    return json.dumps(
        [_as_json(query, record, here) for query, record in read_all().items() if query.arch == ctx.target.arch]
    )


def folder() -> Path | None:
    """The user's cache folder for Iris, which need not exist: ``IRIS_CACHE_DIR``, or where the platform keeps caches.

    None where the user has no home.
    """
    named = _env.get("IRIS_CACHE_DIR")
    try:
        if named:
            return Path(named).expanduser().absolute()
        caches = Path(os.environ.get("XDG_CACHE_HOME") or "")
        if caches.is_absolute():  # the specification says to ignore others
            return caches / "iris"
        return Path.home() / ("Library/Caches/iris" if sys.platform == "darwin" else ".cache/iris")
    except RuntimeError:
        return None


def file_of(operation: str) -> Path | None:
    """The file of an operation's records, which need not exist; None without a cache folder."""
    place = folder()
    return place / "tuned" / f"{operation}.json" if place is not None else None


def unwritable() -> str:
    """Why nothing can be saved in the cache folder; empty when it can. Leaves nothing behind."""
    place = folder()
    if place is None:
        return "the user has no home; name a folder with IRIS_CACHE_DIR"
    there = next(parent for parent in (place / "tuned", *(place / "tuned").parents) if parent.exists())
    if not there.is_dir():
        return f"{there} is a file"
    if there != place / "tuned":
        return "" if os.access(there, os.W_OK | os.X_OK) else f"no folder can be made in {there}"
    try:
        with tempfile.TemporaryFile(dir=there):
            return ""
    except OSError as error:
        return str(error)


@cache
def versions() -> tuple[tuple[str, str], ...]:
    """The versions that a record depends on, by package."""
    found = {}
    for name, distribution in _PACKAGES.items():
        try:
            found[name] = metadata.version(distribution)
        except metadata.PackageNotFoundError:  # running from a source tree that is not installed
            found[name] = "0.0.0"
    return tuple(found.items())


def key_of(query: Query, of: Mapping[str, str] | None = None) -> str:
    """The text that a record is kept under: all fields of the query, and the versions, by default those here."""
    parts = [query.operation]
    for field in fields(query):
        value = getattr(query, field.name)
        if isinstance(value, tuple):
            parts += [f"{name}={given}" for name, given in value]
        elif field.name != "operation":
            parts.append(f"{field.name}={value}")
    return " ".join([*parts, *(f"{name}={version}" for name, version in (of or dict(versions())).items())])


def as_record(entry: Entry, default_key: str) -> Record:
    """``entry`` as a record: of now and here, unless it says when it was made."""
    known = {field.name: getattr(entry, field.name) for field in fields(entry)}
    if not isinstance(entry, Record) or not entry.date:
        known |= {"date": now(), "host": socket.gethostname()}
    return Record(**{**known, "default_key": default_key})


def now() -> str:
    """The time by UTC, to the second."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def read_all() -> dict[Query, Record]:
    """Every valid record that was made with the versions here."""
    here = versions()
    return {saved.query: saved.record for saved in saved_records() if saved.versions == here}


def saved_records() -> list[Saved]:
    """Every valid record of the user's cache, whatever versions it was made with."""
    place = folder()
    if place is None:
        return []
    try:
        paths = sorted((place / "tuned").glob("*.json"))
    except OSError as error:
        _warn_once(f"{place / 'tuned'} cannot be read, so nothing tuned is known: {error}")
        return []
    found = []
    for path in paths:
        for key, value in (_read(path) or {}).items():
            try:
                found.append(_saved(value))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                _warn_once(f"{path}: the record {key!r} is not valid and is not used: {error!r}")
    return found


def write(operation: str, records: Mapping[Query, Record]) -> Path | None:
    """Add records to the file of an operation, in place of those with the same key.

    Returns:
        The file; None when they could not be saved, of which a warning has told.
    """
    path = file_of(operation)
    if path is None:
        _warn_once("what was tuned is not saved: the user has no home; name a folder with IRIS_CACHE_DIR")
        return None
    here = dict(versions())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            known = _read(path, locked=True)
            if known is None:
                return None
            known.update({key_of(query): _as_json(query, record, here) for query, record in records.items()})
            _replace(path, {"schema": SCHEMA, "records": known})
    except Timeout:
        logger.warning(
            "%s.lock has been held for %g s, so what was tuned is not saved; end the process that holds it",
            path, LOCK_SECONDS,
        )  # fmt: skip
        return None
    except (OSError, NotImplementedError) as error:
        _warn_once(f"what was tuned is not saved, since {path} cannot be written: {error}", f"write {path.parent}")
        return None
    return path


def clear(operation: str | None = None) -> int:
    """Remove the records of an operation, or all; also those of other versions. Files of a newer schema stay.

    Returns:
        How many there were.

    Raises:
        OSError: a file cannot be removed.
    """
    place = folder()
    removed = 0
    for path in sorted((place / "tuned").glob("*.json" if operation is None else f"{operation}.json")) if place else ():
        with _locked(path):
            known = _read(path, locked=True)
            if known is not None:
                removed += len(known)
                path.unlink(missing_ok=True)
    return removed


def _locked(path: Path) -> FileLock:
    return FileLock(f"{path}.lock", timeout=LOCK_SECONDS)


def _read(path: Path, locked: bool = False) -> dict[str, Any] | None:
    """The records of a file by key, none where there is no file; None for one of a newer schema, which is not ours."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        _warn_once(f"{path} cannot be read, so what it holds is not known: {error}")
        return {}
    try:
        content = json.loads(text)
        schema, records = content["schema"], content["records"]
        if isinstance(schema, int) and schema > SCHEMA:
            _warn_once(
                f"{path} was written by a newer release (schema {schema}, known here: {SCHEMA}); it is left alone, so "
                "nothing is read from it or saved to it"
            )
            return None
        if schema != SCHEMA or not isinstance(records, dict):
            raise ValueError(f"schema {schema!r}, records of type {type(records).__name__}")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        if locked:
            _set_aside(path, error)
        else:
            # Somebody may have put a good file in its place meanwhile, so look again with the lock.
            with suppress(OSError, NotImplementedError), _locked(path):
                return _read(path, locked=True)
            _warn_once(f"{path} is not what Iris writes ({error!r}) and is not used")
        return {}
    return records


def _set_aside(path: Path, error: Exception) -> None:
    number = 1
    while (aside := path.with_name(f"{path.name}.corrupt-{number}")).exists():
        number += 1
    path.rename(aside)
    logger.warning("%s is not what Iris writes (%r); it has been moved to %s", path, error, aside)


def _replace(path: Path, content: dict[str, Any]) -> None:
    """Put ``content`` in the place of a file; whoever reads it sees the old or the new one, also after a crash."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _as_json(query: Query, record: Record, versions: Mapping[str, str]) -> dict[str, Any]:
    pairs = ("sizes", "options", "details")
    about = {field.name: getattr(query, field.name) for field in fields(query)}
    about |= {name: dict(about[name]) for name in pairs}
    found = {field.name: getattr(record, field.name) for field in fields(record)}
    found |= {"params": dict(record.params), "candidates": dict(record.candidates)}
    del found["sizes"]  # the query's
    return {"query": about, "versions": dict(versions), **found}


def _saved(value: Any) -> Saved:
    """A record from what :func:`_as_json` gave.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is no such thing.
    """
    about, found = dict(value["query"]), dict(value)
    texts = ("operation", "machine", "arch", "link", "dtype")
    about["sizes"] = tuple((str(name), int(size)) for name, size in about["sizes"].items())
    for name in ("options", "details"):
        about[name] = tuple((str(option), str(given)) for option, given in about[name].items())
    query = Query(**about)
    _require(query, texts, str)
    _require(query, ("world", "units"), int)
    del found["query"], found["versions"]
    candidates = tuple((str(name), ms if ms is None else float(ms)) for name, ms in found["candidates"].items())
    record = Record(**{**found, "sizes": query.sizes, "candidates": candidates})
    _require(record, ("name", "algorithm", "source", "default_key", "date", "host"), str)
    numbers = ("milliseconds", "torch_milliseconds", "speedup", "default_milliseconds")
    _require(record, [name for name in numbers if getattr(record, name) is not None], int | float)
    return Saved(query, record, tuple((str(name), str(version)) for name, version in value["versions"].items()))


def _require(given: Any, names: Any, kind: Any) -> None:
    for name in names:
        value = getattr(given, name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}")


def _warn_once(text: str, about: str | None = None) -> None:
    if (about or text) not in _warned:
        _warned.add(about or text)
        logger.warning("%s", text)
