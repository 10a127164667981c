"""Blocks of one replica: reference counts, the free list and the radix tree of content that can be hit.

A block is free (in no table, holds nothing), held (in `references` tables), or idle: in no table, but in the tree and
still to be hit. Idle blocks are taken back least recently used first. Block integers stand for chained hashes, so
a name stands for its whole path from the root and one dictionary holds the tree; each node knows its parent's name.

Why a leaf is always taken before its parent: a sequence holds a path of the tree from the root (it inserts and hits
only at the end of what it holds there), so a parent is held as long as its child is, and a release goes from the
deepest block up. Hence the order in which blocks fall idle is both least recently used and leaf first. "Used" is by
position in the log: blocks fall idle while an event is applied, in the order of events.

Of several KV groups, each has the same number of blocks, free and idle lists of its own, and the block numbers that
follow those of the group before. The tree is one, and a path goes from group to group. So a group that lacks blocks may
have to take back one whose children are idle in other groups. These can be hit no more and become free.
"""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_left
from collections import Counter, OrderedDict
from itertools import chain
from weakref import WeakValueDictionary

from msgspec import Struct

from eventlm.core.state.digest import MASK, to_hex
from eventlm.core.state.prefix_index import Holder
from eventlm.core.state.state_pool import StatePool

#: Parent of a first block.
ROOT = 0
#: A block of the tree, and its parent's name. A plain tuple, because one is made for every block that is filled.
Node = tuple[int, int]
_HELD, _ALLOCATED, _RELEASED, _INSERTED, _FLUSHED = range(5)
_MAX_CHANGES = 4096


class _Numbers:
    """Numbers below `num_blocks`, the largest first. An integer takes four times the memory of a reference to it, so
    pools of one size share them while any is there.
    """

    _by_size: WeakValueDictionary[int, _Numbers] = WeakValueDictionary()

    def __init__(self, num_blocks: int) -> None:
        self.descending = tuple(range(num_blocks - 1, -1, -1))

    @classmethod
    def of(cls, num_blocks: int) -> _Numbers:
        found = cls._by_size.get(num_blocks)
        if found is None:
            found = cls._by_size[num_blocks] = cls(num_blocks)
        return found


class PoolSnapshot(Struct, frozen=True, kw_only=True):
    """A pool without its references, which follow from the tables that hold its blocks."""

    #: Those of one group after the other, here and below.
    free: list[int]
    #: Idle blocks, least recently used first.
    idle: list[int]
    tree: dict[int, Node]
    digest: str


class BlockPool:
    """Block numbers 0 to num_blocks - 1, as many in each KV group. states: where copies of states hang on the tree's
    blocks. holder: who tells routers what the tree has.
    """

    __slots__ = (
        "_changes",
        "_children",
        "_digest",
        "_free",
        "_holder",
        "_idle",
        "_name",
        "_numbers",
        "_states",
        "blocks_per_group",
        "num_blocks",
        "num_groups",
        "references",
        "tree",
    )

    def __init__(
        self,
        blocks_per_group: int,
        states: StatePool | None = None,
        holder: Holder | None = None,
        *,
        num_groups: int = 1,
    ) -> None:
        self.blocks_per_group = blocks_per_group
        self.num_groups = num_groups
        self.num_blocks = blocks_per_group * num_groups
        self._states = states
        self._holder = holder
        self.tree: dict[int, Node] = {}
        self._numbers = _Numbers.of(self.num_blocks)
        self.reset()

    def reset(self) -> None:
        """Forget everything, as a worker does that starts anew."""
        self.references = [0] * self.num_blocks
        size, numbers = self.blocks_per_group, self._numbers.descending
        self._free = [list(numbers[-first - size : len(numbers) - first]) for first in range(0, self.num_blocks, size)]
        if self._holder is not None:
            self._holder.drop(self.tree)
        self.tree = {}
        #: Name of a block in the tree; 0 where it is not.
        self._name = [0] * self.num_blocks
        #: Idle blocks of each group, least recently used first.
        self._idle: list[OrderedDict[int, None]] = [OrderedDict() for _ in self._free]
        #: Of several groups, the names that follow a name in the tree.
        self._children: dict[int, list[int]] = {}
        self._digest = 0
        #: What the digest lacks.
        self._changes: list[int] = []

    @property
    def num_available(self) -> int:
        """Blocks that allocations can get: free and idle ones."""
        return sum(map(len, self._free)) + sum(map(len, self._idle))

    def available_in(self, group: int) -> int:
        """The same of one group."""
        return len(self._free[group]) + len(self._idle[group])

    def group_of(self, block: int) -> int:
        """The group that a block lies in."""
        return block // self.blocks_per_group

    def follow(self, names: list[int], max_blocks: int, path: list[Node]) -> None:
        """Make `path` the longest path in the tree that spells the first of `names`, at most `max_blocks` long.

        path: empty, or the result of an earlier call with the same names and no larger `max_blocks`. Only what has
        changed since is visited: a node is one object as long as it is in the tree, and so are the nodes above it, so
        a path is whole if its last node is.
        """
        tree = self.tree
        while path and tree.get(names[len(path) - 1]) is not path[-1]:
            path.pop()
        index = len(path)
        parent = names[index - 1] if index else ROOT
        while index < max_blocks:
            node = tree.get(names[index])
            # A name may come back under another parent, whose own name the engine's bounded table had lost.
            if node is None or node[1] != parent:
                return
            path.append(node)
            parent = names[index]
            index += 1

    @property
    def num_idle(self) -> int:
        """Blocks that can be hit and that no sequence holds."""
        return sum(map(len, self._idle))

    def idle_on(self, path: list[Node]) -> list[Node]:
        """The part of a path from the root that is idle, so that holding it leaves fewer blocks for allocations.

        It is the last one, because a parent is held as long as its child is.
        """
        references = self.references
        return path[bisect_left(path, True, key=lambda node: references[node[0]] == 0) :]

    def hold(self, blocks: list[int]) -> None:
        """One more table holds each of `blocks`, which are in the tree."""
        references = self.references
        for block in blocks:
            if references[block] == 0:
                del self._idle[block // self.blocks_per_group][block]
            references[block] += 1
        self._note(_HELD, blocks)

    def allocate(self, num_blocks: int, group: int = 0) -> list[int]:
        """Blocks of a group with one reference each. The caller has checked `available_in`.

        Free blocks go first; then cached blocks that no sequence holds are evicted, least recently used first.
        """
        references, free, idle = self.references, self._free[group], self._idle[group]
        blocks = free[: -num_blocks - 1 : -1]
        del free[len(free) - len(blocks) :]
        if self.num_groups == 1 and len(blocks) < num_blocks:
            taken = [idle.popitem(last=False)[0] for _ in range(num_blocks - len(blocks))]
            self._take_out(taken)
            blocks += taken
        while len(blocks) < num_blocks:
            if free:
                # What hung on a block that was taken back lay in this group too.
                blocks.append(free.pop())
                continue
            block, _ = idle.popitem(last=False)
            self._uproot(block)
            blocks.append(block)
        for block in blocks:
            references[block] = 1
        self._note(_ALLOCATED, blocks)
        return blocks

    def release(self, blocks: list[int]) -> None:
        """One table less holds each of `blocks`, in this order."""
        references, names, size = self.references, self._name, self.blocks_per_group
        idle, free = self._idle, self._free
        for block in blocks:
            references[block] = count = references[block] - 1
            if not count:
                if names[block]:
                    idle[block // size][block] = None
                else:
                    free[block // size].append(block)
        self._note(_RELEASED, blocks)

    def release_all(self, table: list[int]) -> None:
        """Release a whole table, deepest block first."""
        self.release(table[::-1])

    def flush(self) -> int:
        """Take every idle block out of the tree; returns how many. Held ones keep their whole path."""
        num_idle = 0
        for free, idle in zip(self._free, self._idle, strict=True):
            blocks = list(idle)
            self._take_out(blocks)
            idle.clear()
            # In the reverse order, so that the least recently used is the first to be allocated again.
            free += reversed(blocks)
            self._note(_FLUSHED, blocks)
            num_idle += len(blocks)
        return num_idle

    def _uproot(self, block: int) -> None:
        """Of several groups, take a block that is no longer idle out of the tree, and with it all that hangs on it,
        which is idle and of other groups.
        """
        name = self._name[block]
        self._take_out([block])
        names = self._children.pop(name, [])
        for child in names:
            names += self._children.pop(child, [])
        for child in names:
            below, _ = self.tree[child]
            group = below // self.blocks_per_group
            del self._idle[group][below]
            self._take_out([below])
            self._free[group].append(below)

    def _take_out(self, blocks: list[int]) -> None:
        """Take blocks out of the tree, and the copies that hang on them."""
        tree, name_of, children = self.tree, self._name, self._children
        names = [name_of[block] for block in blocks]
        for block, name in zip(blocks, names, strict=True):
            _, parent = tree.pop(name)
            name_of[block] = 0
            if parent in children:
                children[parent].remove(name)
                if not children[parent]:
                    del children[parent]
        if self._holder is not None:
            self._holder.drop(names)
        if self._states is not None:
            for name in names:
                self._states.drop(name)

    def insert(self, names: list[int], parent: int, blocks: list[int]) -> int:
        """Make the content of held blocks hittable, under names that go on a path from `parent`, up to the first that
        the tree has already. Returns how many.
        """
        tree, name_of, in_groups = self.tree, self._name, self.num_groups > 1
        num_blocks = 0
        for name, block in zip(names, blocks, strict=True):
            if name in tree:
                break
            tree[name] = (block, parent)
            if in_groups:
                self._children.setdefault(parent, []).append(name)
            name_of[block] = parent = name
            num_blocks += 1
        if self._holder is not None:
            self._holder.add(names[:num_blocks])
        self._note(_INSERTED, names[:num_blocks])
        return num_blocks

    def _note(self, kind: int, changed: list[int]) -> None:
        changes = self._changes
        changes += (kind, len(changed))
        changes += changed
        if len(changes) > _MAX_CHANGES:
            self._fold()

    def _fold(self) -> None:
        """Add the changes to the digest: a checksum of all there were, so that it does not matter when this is done.
        It stands for the order of the free and idle blocks too, which follow from the changes.
        """
        layout = f"<{len(self._changes)}Q"
        try:
            data = struct.pack(layout, *self._changes)
        except struct.error:
            # A trace that was made by hand may name its blocks by any integers.
            data = struct.pack(layout, *(change & MASK for change in self._changes))
        self._digest = zlib.crc32(data, self._digest)
        self._changes.clear()

    @property
    def digest(self) -> int:
        """32 bits that stand for the pool's history since its reset."""
        self._fold()
        return self._digest

    def snapshot(self) -> PoolSnapshot:
        """The pool as it is now; it shares the tree, so it is to be encoded before the pool changes."""
        free, idle = (list(chain.from_iterable(lists)) for lists in (self._free, self._idle))
        return PoolSnapshot(free=free, idle=idle, tree=self.tree, digest=to_hex(self.digest))

    def restore(self, taken: PoolSnapshot, tables: list[list[int]]) -> None:
        """Become the pool that the snapshot was taken of, given all tables that hold blocks of it.

        Raises IndexError for a block that the pool does not have.
        """
        self.reset()
        self.tree = taken.tree
        if self._holder is not None:
            self._holder.add(self.tree)
        for free in self._free:
            free.clear()
        for block in taken.free:
            self._free[block // self.blocks_per_group].append(block)
        for block in taken.idle:
            self._idle[block // self.blocks_per_group][block] = None
        for name, node in taken.tree.items():
            self._name[node[0]] = name
            if self.num_groups > 1:
                self._children.setdefault(node[1], []).append(name)
        for table in tables:
            for block in table:
                self.references[block] += 1
        self._digest = int(taken.digest, 16)

    def problems(self, tables: list[list[int]], blocks: range | None = None) -> list[str]:
        """What is wrong with the pool, given all tables that hold its blocks; empty if nothing is. blocks: look only at
        these, which leaves out what takes a pass over all.
        """
        found = []
        if blocks is None:
            blocks = range(self.num_blocks)
            found += self._problems_of_all(tables)
        references, names = self.references, self._name
        counts = Counter(block for table in tables for block in table if block in blocks)
        for block in blocks:
            name, count = names[block], counts[block]
            if count != references[block]:
                found.append(f"block {block} has {references[block]} references, and is in {count} tables")
            if (block in self._idle[self.group_of(block)]) != (not count and name != 0):
                found.append(f"block {block} is {'not ' if not count and name else ''}among the idle blocks")
            if name:
                found += self._node_problems(block, name)
        return found

    def _problems_of_all(self, tables: list[list[int]]) -> list[str]:
        found = []
        unknown = {block for table in tables for block in table} - set(range(self.num_blocks))
        if unknown:
            found.append(f"tables hold blocks {sorted(unknown)[:8]}, which it has not")
        free = [block for blocks in self._free for block in blocks]
        wrong = set(free) ^ {
            block for block in range(self.num_blocks) if not self.references[block] | self._name[block]
        }
        if wrong or len(free) != len(set(free)):
            found.append(
                f"the free blocks are not those without a reference and a name, each once: {sorted(wrong)[:8]}"
            )
        if len(self.tree) != self.num_blocks - self._name.count(0):
            found.append(f"the tree has {len(self.tree)} names, and the blocks have others")
        if self.num_groups > 1 and sum(map(len, self._children.values())) != len(self.tree):
            found.append("the children of names in the tree are not those whose parent they are")
        return found

    def _node_problems(self, block: int, name: int) -> list[str]:
        node = self.tree.get(name)
        if node is None or node[0] != block:
            return [f"block {block} is not the one that the tree names {name}"]
        found, parent = [], node[1]
        if self.num_groups > 1 and name not in self._children.get(parent, ()):
            found.append(f"block {block} ({name}) is not among the children of its parent {parent}")
        if parent == ROOT:
            return found
        above = self.tree.get(parent)
        if above is None:
            found.append(f"block {block} ({name}) has lost its parent {parent}")
        elif self.references[above[0]] < self.references[block]:
            found.append(f"block {block} is held more often than its parent {above[0]}")
        return found
