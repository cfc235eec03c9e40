"""Opening of files: outputs that no other user can redirect, inputs of any origin, and files whose code is run.

============ ==========================================================================================================
outputs      :func:`replacing`, :func:`write`, :func:`create`, :func:`append`: a file gets its name by a rename, or is
             opened only if it belongs to this user, so that a link or pipe that another user has put there is not used
inputs       :func:`open_input`, :func:`read`, :func:`parse_json`: a regular file of limited size; never a wait
code         :func:`why_not_trusted`: who else may have written a file
============ ==========================================================================================================

The folder of an output is opened step by step, and the file is made in the folder that was checked:

* A link is followed if this user or root has made it, or if it leads to a folder of the user who made it.
* In a folder in which everyone may write, such as /tmp, anyone may have made the next folder of the path. If another
  user has, the folder of the file must belong to this user or to root.
* Folders of a group, or of another user who lets this one write, are used as they are. So are folders in which everyone
  may write, with and without the sticky bit (volumes of Kubernetes have none): others may remove or replace files
  there, but can redirect none.

All failures are instances of ``OSError``, whose ``strerror`` has the reason and the remedy. This module imports only
the standard library: :mod:`torchmpi.cli.rank_start` loads it before torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import json
import os
import pwd
import re
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

StrPath = str | os.PathLike[str]
MOST_JSON_BYTES = 8 << 20
"""The largest JSON file that is read: tables of measurements, indexes and reports have some kilobytes."""
_MOST_LEVELS = 100
"""Of lists and objects inside each other in JSON."""
_MOST_LINKS = 40  # as the kernel
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_NEW = os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_POLL_SECONDS = 0.05
_JSON_PARTS = re.compile(r'"(?:[^"\\]|\\.)*"|([\[{])|([\]}])', re.DOTALL)


# --- outputs ---------------------------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """Where an output is written."""

    folder: int
    """A descriptor."""
    name: str
    is_special: bool
    """Whether the name is that of a device or pipe that is written to, and not replaced."""


@contextlib.contextmanager
def replacing(
    path: StrPath, *, mode: int = 0o666, make_folder: bool = False, is_durable: bool = False
) -> Iterator[BinaryIO]:
    """Context manager with a new file that takes the name `path` at the end; after an error the old file remains.

    The new file is locked until then, see :func:`remove_unfinished`.

    Args:
        path: The file. One that exists is replaced; links, pipes and files of others are not opened.
        mode: Permissions, of which the umask takes some away.
        make_folder: Whether to make the folder of the file, and those above it.
        is_durable: Whether to wait until the disk has the content.

    Raises:
        OSError: The file cannot be written, or another user may have chosen its folder.
    """
    with _place(path, make_folder=make_folder) as place:
        if place.is_special:
            with os.fdopen(_open_special(place, path), "wb") as file:
                yield file
            return
        part = f".{place.name}.{os.urandom(6).hex()}.tmp"
        with os.fdopen(os.open(part, os.O_RDWR | _NEW, mode, dir_fd=place.folder), "wb") as file:
            try:
                with contextlib.suppress(OSError):  # a file system without locks
                    fcntl.flock(file, fcntl.LOCK_EX)
                yield file
                file.flush()
                if is_durable:
                    os.fsync(file.fileno())
                if not _rename(part, place, path):
                    _overwrite(part, place, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(part, dir_fd=place.folder)
                raise


def write(path: StrPath, data: bytes | str, *, mode: int = 0o666, make_folder: bool = False) -> None:
    """Write a file as :func:`replacing` does: a reader finds the old content or the new one."""
    with replacing(path, mode=mode, make_folder=make_folder) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def create(path: StrPath, *, mode: int = 0o666) -> int:
    """Return the descriptor of a new, empty file, with the folders above it, to write and to read.

    Args:
        path: The file. One that exists is replaced; processes that have it open keep the old one.
        mode: Permissions, of which the umask takes some away.
    """
    with _place(path, make_folder=True) as place:
        if place.is_special:
            return _open_special(place, path)
        part = f".{place.name}.{os.urandom(6).hex()}.tmp"
        descriptor = os.open(part, os.O_RDWR | _NEW, mode, dir_fd=place.folder)
        try:
            if not _rename(part, place, path):
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), os.fspath(path))
        except BaseException:
            os.close(descriptor)
            os.unlink(part, dir_fd=place.folder)
            raise
        return descriptor


def append(path: StrPath, *, mode: int = 0o666) -> int:
    """Return the descriptor of a file at whose end is written; it and the folders above it are made if necessary.

    Raises:
        OSError: As of :func:`replacing`; or the file is a link or has a second name, or belongs neither to this user
            nor to the owner of the folder.
    """
    with _place(path, make_folder=True) as place:
        return _open_special(place, path) if place.is_special else _open_own(place, path, mode)


def make_folder(path: StrPath) -> None:
    """Make a folder for outputs, and those above it, unless it exists; raise if another user may have chosen it."""
    with _place(Path(path, "-"), make_folder=True):
        pass


def check_folder(path: StrPath) -> None:
    """Raise if another user may have chosen the folder at a path, or if there is none."""
    with _place(Path(path, "-"), make_folder=False):
        pass


def remove_unfinished(folder: Path, prefix: str) -> None:
    """Remove what :func:`replacing` has left in a folder of files with this prefix when its process was killed."""
    for path in folder.glob(f".{prefix}*.tmp"):
        with contextlib.suppress(OSError), open_lock(path, make=False) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an error if it is being written
            path.unlink()


@contextlib.contextmanager
def _place(path: StrPath, *, make_folder: bool) -> Iterator[_Place]:
    """Context manager with the folder of an output, which is not that of a stranger."""
    text = os.fspath(path)
    place = _walk(text, make_folder=make_folder)
    try:
        yield place
    finally:
        os.close(place.folder)


def _walk(path: str, *, make_folder: bool) -> _Place:
    """Open the folders of a path one after the other; `make_folder`: make those that are missing."""
    own = os.geteuid()
    parts = list(reversed(Path(path).parts))
    stranger, linking, num_links = "", set[int](), 0
    folder = os.open(".", _FOLDER)
    try:
        while parts:
            part = parts.pop()
            if part.startswith("/"):
                folder = _exchange(folder, os.open("/", _FOLDER))
                continue
            found = _status(part, folder)
            if found is None and parts and make_folder:
                with contextlib.suppress(FileExistsError):  # another rank has made it
                    os.mkdir(part, dir_fd=folder)
                found = _status(part, folder)
            is_link = found is not None and stat.S_ISLNK(found.st_mode)
            is_own = found is not None and found.st_uid in (0, own)
            if not parts and (not is_link or not is_own or _is_special(part, folder)):
                parts.append(part)
                break
            if found is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            if is_link and not is_own:
                linking.add(found.st_uid)
            if is_link:
                num_links += 1
                if num_links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                parts += reversed(Path(os.readlink(part, dir_fd=folder)).parts)
            above = os.fstat(folder)
            following = folder if is_link else os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
            owner = found.st_uid if is_link else os.fstat(following).st_uid
            if above.st_mode & stat.S_IWOTH and owner not in (0, own, above.st_uid):
                stranger = f"user {owner} has made {part} in a folder in which everyone may write"
            folder = _exchange(folder, following)
        if not parts:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        owner = os.fstat(folder).st_uid
        if stranger and owner not in (0, own):
            raise _refusal(path, f"{stranger}. Name a folder of user {own}")
        if linking - {owner}:
            raise _refusal(path, f"a link of user {min(linking - {owner})} leads to it. Name the folder itself")
        name = parts.pop()
        return _Place(folder, name, _is_special(name, folder))
    except OSError as error:
        os.close(folder)
        raise OSError(error.errno, error.strerror, path) from None
    except BaseException:
        os.close(folder)
        raise


def _exchange(folder: int, following: int) -> int:
    """Close a descriptor, unless it is the following one, which is returned."""
    if following != folder:
        os.close(folder)
    return following


def _status(name: str, folder: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _is_special(name: str, folder: int) -> bool:
    """Return whether a name is a device, or a pipe of this user, or a link of this user or root to one of anyone.

    Only root can make a device. What /dev/stdout leads to may belong to the user who has called sudo, and may be a
    file, which must not be replaced: the descriptor remains that of the old one.
    """
    found = _status(name, folder)
    is_own = found is not None and found.st_uid in (0, os.geteuid())
    if found is not None and is_own and stat.S_ISLNK(found.st_mode):
        try:
            if found.st_dev == os.stat("/proc").st_dev:
                return True
            found = os.stat(name, dir_fd=folder)
        except OSError:
            return False
    kind = 0 if found is None else stat.S_IFMT(found.st_mode)
    return kind == stat.S_IFCHR or (is_own and kind in (stat.S_IFIFO, stat.S_IFSOCK))


def _open_special(place: _Place, path: StrPath) -> int:
    """Open a device or pipe, or the file of a descriptor; a pipe that nobody reads is an error."""
    try:
        flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
        descriptor = os.open(place.name, flags, dir_fd=place.folder)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None
    os.set_blocking(descriptor, True)
    return descriptor


def _open_own(place: _Place, path: StrPath, mode: int) -> int:
    """Open a file to append to it, if it belongs to this user or to the owner of the folder, and has one name."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(place.name, flags, mode, dir_fd=place.folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise _refusal(path, "it is a link or pipe of another user. Remove it, or name another file") from None
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None
    found = os.fstat(descriptor)
    owners = (os.geteuid(), os.fstat(place.folder).st_uid)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1 or found.st_uid not in owners:
        os.close(descriptor)
        what = f"it is not a file of its own name that belongs to user {owners[0]}"
        raise _refusal(path, f"{what}. Remove it, or name another file")
    os.set_blocking(descriptor, True)
    return descriptor


def _overwrite(part: str, place: _Place, path: StrPath) -> None:
    """Put the content of a new file into the old one, which a container may have mounted and cannot be replaced."""
    descriptor = _open_own(place, path, 0o666)
    with os.fdopen(descriptor, "wb") as old, os.fdopen(os.open(part, os.O_RDONLY, dir_fd=place.folder), "rb") as new:
        os.ftruncate(descriptor, 0)
        shutil.copyfileobj(new, old)
    os.unlink(part, dir_fd=place.folder)


def _rename(part: str, place: _Place, path: StrPath) -> bool:
    """Give a new file its name; return whether that is possible, which it is not for a mounted file."""
    try:
        os.replace(part, place.name, src_dir_fd=place.folder, dst_dir_fd=place.folder)
        return True
    except PermissionError as error:  # in a folder with the sticky bit
        reason = f"what has this name belongs to another user ({error.strerror}). Name another file"
        raise _refusal(path, reason) from None
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None


def _refusal(path: StrPath, reason: str) -> PermissionError:
    return PermissionError(errno.EPERM, f"not used: {reason}", os.fspath(path))


# --- inputs ----------------------------------------------------------------------------------------------------------


def open_input(path: StrPath, most_bytes: int, *, is_changed: bool = False) -> BinaryIO:
    """Open a file to read it. Never waits: a pipe, a socket or a device is an error.

    Args:
        path: The file; links are followed.
        most_bytes: The most bytes that the file may have.
        is_changed: Whether to open it to write, too.

    Raises:
        OSError: It cannot be read, is not a regular file, or is larger.
    """
    flags = os.O_RDWR if is_changed else os.O_RDONLY
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
        if found.st_size > most_bytes:
            raise OSError(errno.EFBIG, f"larger than {most_bytes} bytes", os.fspath(path))
        return os.fdopen(descriptor, "rb+" if is_changed else "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read(path: StrPath, most_bytes: int) -> bytes:
    """Return the content of a file."""
    with open_input(path, most_bytes) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:  # written meanwhile
        raise OSError(errno.EFBIG, f"larger than {most_bytes} bytes", os.fspath(path))
    return data


def parse_json(data: bytes | str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: It is not JSON, or has more than 100 lists and objects inside each other.

    >>> parse_json(b'{"a": [1]}')
    {'a': [1]}
    """
    text = data if isinstance(data, str) else data.decode()
    if text.count("[") + text.count("{") > _MOST_LEVELS:  # the parser would need ever more stack
        level = 0
        for part in _JSON_PARTS.finditer(text):
            level += 1 if part[1] else -1 if part[2] else 0
            if level > _MOST_LEVELS:
                raise ValueError("too deeply nested")
    return json.loads(text)


def text_of(path: str | Path) -> str:
    """Return the text of a file of the kernel, without spaces around it; '' if it cannot be read.

    >>> text_of("/proc/self/missing")
    ''
    """
    try:
        return Path(path).read_bytes().decode(errors="replace").strip()
    except OSError:
        return ""


def printable(text: str) -> str:
    r"""Return a text of a file with escapes for characters that would control a terminal.

    >>> printable("rank 0\x1b[2J\n")
    'rank 0\\x1b[2J\\n'
    """
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


# --- code ------------------------------------------------------------------------------------------------------------


def why_not_trusted(found: os.stat_result, like: os.stat_result) -> str:
    """Return who else may have written a file or folder whose code is to be run; '' if nobody may have.

    Args:
        found: The file or folder.
        like: The folder of a program that is run anyway: its owner and group may write.
    """
    if found.st_uid not in (0, os.geteuid(), like.st_uid):
        return f"it belongs to user {found.st_uid}"
    writers = found.st_mode & _OTHERS_WRITE
    if found.st_gid == like.st_gid:
        writers &= ~like.st_mode
    if writers & stat.S_IWOTH:
        return "everyone may write to it"
    if writers & stat.S_IWGRP and not _is_private(found.st_gid):
        return f"group {found.st_gid} may write to it"
    return ""


def _is_private(group: int) -> bool:
    """Return whether a group has only this user, as the groups that many systems make with their users."""
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return user.pw_gid == group and user.pw_name == found.gr_name and set(found.gr_mem) <= {user.pw_name}


# --- locks -----------------------------------------------------------------------------------------------------------


def open_lock(path: StrPath, *, make: bool = True) -> BinaryIO:
    """Open a file to lock it, which no other user can open.

    Args:
        path: The file.
        make: Whether to make it if it does not exist.

    Raises:
        OSError: That is not possible, or the file belongs to another user or is a link.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # NFS locks only what is open to read and to write
    descriptor = os.open(path, flags | (os.O_CREAT if make else 0), 0o600)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise _refusal(path, "a lock is a file of this user. Remove it")
        if found.st_mode & 0o077 and make:
            os.fchmod(descriptor, 0o600)
        return os.fdopen(descriptor, "rb+")
    except BaseException:
        os.close(descriptor)
        raise


def lock(file: BinaryIO, operation: int, seconds: float) -> bool:
    """Lock a file; return whether that was possible within a time.

    Args:
        file: An open file.
        operation: ``fcntl.LOCK_EX`` or ``fcntl.LOCK_SH``.
        seconds: How long to wait while another process holds the lock.

    Raises:
        OSError: The file system has no locks.
    """
    limit = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, operation | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= limit:
                return False
        time.sleep(_POLL_SECONDS)
