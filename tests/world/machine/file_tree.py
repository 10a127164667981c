"""Names and contents on a simulated disk: what processes see, and what would survive a power failure.

Names are separate from contents. A change of names (a rename is one change) and a page of a file are pending until they
reach the medium. They may get there in any order; only changes of the same name keep theirs.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

PAGE_BYTES = 4096
#: The most links that a path may go through.
_MOST_LINKS = 40

#: Given the number of pending items, returns which of them, in their order, reach the medium.
Keep = Callable[[int], list[bool]]


def keep_all(number: int) -> list[bool]:
    """Keep everything, as a sync does."""
    return [True] * number


class Node:
    """What a name can refer to. number: its identity."""

    def __init__(self, number: int, unix_ns: int) -> None:
        self.number = number
        self.modified_ns = unix_ns


class File(Node):
    """A file. content: what processes read; medium: what they would read after a reboot; is_locked: by a writer."""

    def __init__(self, number: int, unix_ns: int) -> None:
        super().__init__(number, unix_ns)
        self.content = bytearray()
        self.medium = bytearray()
        self.is_locked = False
        self._pending: set[int] = set()

    def append(self, content: bytes, unix_ns: int) -> None:
        """Append to the page cache."""
        first = len(self.content) // PAGE_BYTES
        self.content += content
        self._pending.update(range(first, -(-len(self.content) // PAGE_BYTES)))
        self.modified_ns = unix_ns

    def truncate(self, num_bytes: int, unix_ns: int) -> None:
        """Cut the file off, or extend it with zeros."""
        if num_bytes > len(self.content):
            self.append(bytes(num_bytes - len(self.content)), unix_ns)
            return
        del self.content[num_bytes:]
        self._pending = {page for page in self._pending if page * PAGE_BYTES < num_bytes}
        self.modified_ns = unix_ns

    def persist(self, keep: Keep) -> None:
        """Bring the pending pages to the medium, then the length. What is not kept is lost, and no longer pending."""
        pages = sorted(self._pending)
        self._pending.clear()
        has_length = len(self.content) == len(self.medium)
        if not pages and has_length:
            return
        kept = keep(len(pages) + 1)
        for page, is_kept in zip(pages, kept, strict=False):
            if is_kept:
                start = page * PAGE_BYTES
                piece = self.content[start : start + PAGE_BYTES]
                self.medium += bytes(max(start - len(self.medium), 0))
                self.medium[start : start + len(piece)] = piece
        if kept[-1]:
            del self.medium[len(self.content) :]
            self.medium += bytes(len(self.content) - len(self.medium))

    def rot(self, bit: int) -> None:
        """Flip one bit on the medium. Reads see it unless the page is pending."""
        at, mask = bit // 8 % len(self.medium), 1 << bit % 8
        self.medium[at] ^= mask
        if at < len(self.content) and at // PAGE_BYTES not in self._pending:
            self.content[at] ^= mask


class Folder(Node):
    """A folder. entries: what processes see; medium: what they would see after a reboot."""

    def __init__(self, number: int, unix_ns: int) -> None:
        super().__init__(number, unix_ns)
        self.entries: dict[str, Node] = {}
        self.medium: dict[str, Node] = {}


class Link(Node):
    """A symbolic link."""

    def __init__(self, number: int, unix_ns: int, target: str) -> None:
        super().__init__(number, unix_ns)
        self.target = target


class Place(NamedTuple):
    """Where a path leads. nodes: the root and each node on the way, None where there is nothing; names: those of all
    nodes but the root.
    """

    nodes: list[Node | None]
    names: list[str]

    @property
    def node(self) -> Node | None:
        """The node there, if any."""
        return self.nodes[-1]

    @property
    def folder(self) -> Folder:
        """The folder that contains the place."""
        folder = self.nodes[max(len(self.nodes) - 2, 0)]
        assert isinstance(folder, Folder)
        return folder

    @property
    def path(self) -> Path:
        """The absolute path without links."""
        return Path("/", *self.names)


class _Entry(NamedTuple):
    """A change of a name in a folder. node: None if the name is removed."""

    folder: Folder
    name: str
    node: Node | None

    def put_into(self, entries: dict[str, Node]) -> None:
        if self.node is None:
            entries.pop(self.name, None)
        else:
            entries[self.name] = self.node


class FileTree:
    """A tree of names. Relative paths start at the root. Methods raise the same OSError as Linux."""

    def __init__(self, unix_ns: Callable[[], int]) -> None:
        self._unix_ns = unix_ns
        self._num_nodes = 0
        self._root = self.new_folder()
        #: Changes of names, each of which reaches the medium as a whole.
        self._pending: list[tuple[_Entry, ...]] = []

    def _number(self) -> int:
        self._num_nodes += 1
        return self._num_nodes

    def new_file(self) -> File:
        """A new file, without a name."""
        return File(self._number(), self._unix_ns())

    def new_folder(self) -> Folder:
        """A new folder, without a name."""
        return Folder(self._number(), self._unix_ns())

    def new_link(self, target: str) -> Link:
        """A new link, without a name."""
        return Link(self._number(), self._unix_ns(), target)

    def place(self, path: Path, *, follows: bool = True, is_strict: bool = True) -> Place:
        """Where a path leads. follows: also follow a link at the end. is_strict: fail if something on the way is no
        folder.
        """
        place = Place([self._root], [])
        parts, num_links = [*reversed(path.parts)], 0
        while parts:
            part = parts.pop()
            if part == "/":
                place = Place([self._root], [])
                continue
            parent = place.node
            if is_strict and not isinstance(parent, Folder):
                raise error_of(errno.ENOENT if parent is None else errno.ENOTDIR, path)
            if part == "..":
                if place.names:
                    place.nodes.pop()
                    place.names.pop()
                continue
            node = parent.entries.get(part) if isinstance(parent, Folder) else None
            if isinstance(node, Link) and (follows or parts):
                num_links += 1
                if num_links > _MOST_LINKS:
                    raise error_of(errno.ELOOP, path)
                parts += reversed(Path(node.target).parts)
                continue
            place.nodes.append(node)
            place.names.append(part)
        return place

    def free_place(self, path: Path) -> Place:
        """Where a path leads. Fails if something is there."""
        place = self.place(path, follows=False)
        if place.node is not None:
            raise error_of(errno.EEXIST, path)
        return place

    def find(self, path: Path, *, follows: bool = True) -> Node:
        """The node at a path."""
        node = self.place(path, follows=follows).node
        if node is None:
            raise error_of(errno.ENOENT, path)
        return node

    def find_file(self, path: Path) -> File:
        """The file at a path."""
        node = self.find(path)
        if not isinstance(node, File):
            raise error_of(errno.EISDIR, path)
        return node

    def find_folder(self, path: Path) -> Folder:
        """The folder at a path."""
        node = self.find(path)
        if not isinstance(node, Folder):
            raise error_of(errno.ENOTDIR, path)
        return node

    def add(self, place: Place, node: Node) -> None:
        """Add a node under a name at a free place."""
        self._change(_Entry(place.folder, place.names[-1], node))

    def rename(self, path: Path, new: Path) -> None:
        """As rename(2)."""
        source, target = self.place(path, follows=False), self.place(new, follows=False)
        is_folder, replaced = isinstance(source.node, Folder), target.node
        if source.node is None:
            raise error_of(errno.ENOENT, path)
        if source.node is replaced:
            return
        if source.node in target.nodes:
            raise error_of(errno.EINVAL, path)
        if replaced in source.nodes or (is_folder and isinstance(replaced, Folder) and replaced.entries):
            raise error_of(errno.ENOTEMPTY, path)
        if replaced is not None and is_folder != isinstance(replaced, Folder):
            raise error_of(errno.ENOTDIR if is_folder else errno.EISDIR, path)
        self._change(
            _Entry(source.folder, source.names[-1], None), _Entry(target.folder, target.names[-1], source.node)
        )

    def unlink(self, path: Path) -> None:
        """As unlink(2)."""
        place = self.place(path, follows=False)
        if place.node is None:
            raise error_of(errno.ENOENT, path)
        if isinstance(place.node, Folder):
            raise error_of(errno.EISDIR, path)
        self._change(_Entry(place.folder, place.names[-1], None))

    def remove_folder(self, path: Path) -> None:
        """As rmdir(2)."""
        place = self.place(path, follows=False)
        if place.node is None:
            raise error_of(errno.ENOENT, path)
        if not isinstance(place.node, Folder):
            raise error_of(errno.ENOTDIR, path)
        if place.node.entries:
            raise error_of(errno.ENOTEMPTY, path)
        self._change(_Entry(place.folder, place.names[-1], None))

    def _change(self, *entries: _Entry) -> None:
        for entry in entries:
            entry.put_into(entry.folder.entries)
            entry.folder.modified_ns = self._unix_ns()
        self._pending.append(entries)

    def files(self) -> list[File]:
        """All files that have names, each once."""
        return list({file.number: file for file in self._nodes(self._root) if isinstance(file, File)}.values())

    def _nodes(self, folder: Folder) -> Iterator[Node]:
        for node in folder.entries.values():
            yield node
            if isinstance(node, Folder):
                yield from self._nodes(node)

    def write_back(self) -> None:
        """Bring everything pending to the medium, as sync(2) does."""
        self._persist_names(keep_all)
        for file in self.files():
            file.persist(keep_all)

    def sync_folder(self, folder: Folder) -> None:
        """Bring the pending names in a folder to the medium, with what a change of them has to come after."""
        names, kept = set[tuple[int, str]](), []
        for change in reversed(self._pending):
            own = {(entry.folder.number, entry.name) for entry in change}
            is_kept = any(number == folder.number for number, _ in own) or not names.isdisjoint(own)
            names |= own if is_kept else set()
            kept.append(is_kept)
        pending = [*zip(self._pending, reversed(kept), strict=True)]
        self._pending = [change for change, is_kept in pending if is_kept]
        self._persist_names(keep_all)
        self._pending = [change for change, is_kept in pending if not is_kept]

    def reboot(self, keep_names: Keep, keep_pages: Keep) -> None:
        """Lose all pending changes and pages that are not kept."""
        self._persist_names(keep_names)
        self._restore(self._root)
        for file in self.files():
            file.persist(keep_pages)
            file.content[:] = file.medium

    def _persist_names(self, keep: Keep) -> None:
        lost: set[tuple[int, str]] = set()
        for change, is_kept in zip(self._pending, keep(len(self._pending)), strict=True):
            names = {(entry.folder.number, entry.name) for entry in change}
            if is_kept and lost.isdisjoint(names):
                for entry in change:
                    entry.put_into(entry.folder.medium)
            else:
                # A later change of the same name is lost with it.
                lost |= names
        self._pending.clear()

    def _restore(self, folder: Folder) -> None:
        folder.entries = dict(folder.medium)
        for node in folder.entries.values():
            if isinstance(node, Folder):
                self._restore(node)


def error_of(code: int, path: Path | None = None) -> OSError:
    """The OSError for an errno, of Python's matching subclass."""
    return OSError(code, os.strerror(code)) if path is None else OSError(code, os.strerror(code), str(path))
