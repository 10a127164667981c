"""The folder: who has what, what is private, and what is removed."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from structlog.testing import capture_logs

from eventlm.config import ServerConfig
from eventlm.errors import InputError, UsageError
from eventlm.server.batches.folder import BatchFolder, BatchRecord, FileRecord, OwnerFolder, page
from eventlm.server.batches.objects import BatchObject, BatchStatus, FileObject
from eventlm.server.errors import ApiError
from eventlm.system.system import real_system
from tests.world.machine.disk import WorldDisk

NOW = int(time.time())
OWNER = "ab12" * 8


@pytest.fixture
def owned(tmp_path: Path) -> OwnerFolder:
    owned = BatchFolder(real_system(), ServerConfig(batch_dir=str(tmp_path / "dir"))).of(OWNER)
    owned.make()
    return owned


def add_file(owned: OwnerFolder, *, expires_at: int | None = None) -> str:
    file_id = owned.new_file_id()
    owned.content(file_id).write_bytes(b"12345")
    add_record(owned, file_id, expires_at=expires_at)
    return file_id


def add_record(owned: OwnerFolder, file_id: str, *, expires_at: int | None = None) -> None:
    file = FileObject(id=file_id, bytes=5, created_at=NOW, expires_at=expires_at, filename="f.jsonl", purpose="batch")
    owned.add_file(FileRecord(created_ns=time.time_ns(), file=file))


def add_batch(owned: OwnerFolder, status: BatchStatus = "in_progress", input_file_id: str = "file-1") -> BatchRecord:
    batch = BatchObject(
        id=owned.new_batch_id(),
        endpoint="/v1/completions",
        input_file_id=input_file_id,
        completion_window="24h",
        status=status,
        created_at=NOW,
        expires_at=NOW + 86_400,
    )
    record = BatchRecord(
        created_ns=time.time_ns(),
        output_file_id=owned.new_file_id(),
        error_file_id=owned.new_file_id(),
        output_seconds=3600,
        batch=batch,
    )
    owned.save(record)
    return record


def test_everything_is_private_and_readable_to_people(owned: OwnerFolder, tmp_path: Path) -> None:
    file_id, record = add_file(owned), add_batch(owned)
    root = tmp_path / "dir"
    modes = {path.relative_to(root).as_posix(): path.stat().st_mode & 0o777 for path in root.rglob("*")}
    assert modes == {
        OWNER: 0o700,
        f"{OWNER}/files": 0o700,
        f"{OWNER}/batches": 0o700,
        f"{OWNER}/files/{file_id}.json": 0o600,
        # The test itself has written this one.
        f"{OWNER}/files/{file_id}.jsonl": modes[f"{OWNER}/files/{file_id}.jsonl"],
        f"{OWNER}/batches/{record.batch.id}.json": 0o600,
    }
    assert root.stat().st_mode & 0o777 == 0o700
    text = (root / f"{OWNER}/batches/{record.batch.id}.json").read_text()
    assert '\n    "status": "in_progress",\n' in text


def test_a_folder_that_cannot_be_made_or_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot make the folder .*; choose another folder with --batch-dir DIR"):
        BatchFolder(real_system(), ServerConfig(batch_dir=str(tmp_path / "file")))


def test_owners_see_their_own(tmp_path: Path, owned: OwnerFolder) -> None:
    folder = BatchFolder(real_system(), ServerConfig(batch_dir=str(tmp_path / "dir")))
    nobody = folder.of("")
    nobody.make()
    file_id, batch_id = add_file(owned), add_batch(owned).batch.id
    assert folder.owners() == [OWNER, ""]
    assert (owned.file(file_id).file.id, owned.batch(batch_id).batch.id) == (file_id, batch_id)
    for find in (lambda: nobody.file(file_id), lambda: nobody.batch(batch_id)):
        with pytest.raises(ApiError) as error:
            find()
        assert error.value.status == 404
    assert (nobody.files(), nobody.batches()) == ([], [])


@pytest.mark.parametrize("name", ["..", "../../etc/passwd", "file-1", "", "file-" + "A" * 32, "file-" + "a" * 33, "\0"])
def test_ids_are_no_paths(owned: OwnerFolder, name: str) -> None:
    for find in (owned.file, owned.batch):
        with pytest.raises(ApiError):
            find(name)


def test_one_process_has_the_lock(tmp_path: Path) -> None:
    first, second = (BatchFolder(real_system(), ServerConfig(batch_dir=str(tmp_path))) for _ in range(2))
    lock = first.lock()
    assert lock is not None
    assert second.lock() is None
    lock.close()
    other = second.lock()
    assert other is not None
    other.close()


def test_what_others_ask_for_and_tell_is_in_the_object(owned: OwnerFolder) -> None:
    record = add_batch(owned)
    assert owned.seen(record) == record.batch
    owned.mark_stuck(record.batch.id, 28)
    errors = owned.seen(record).errors
    assert errors is not None
    assert [(each.code, "No space left on device" in each.message) for each in errors.data] == [("disk_full", True)]
    for _ in range(2):
        owned.ask_to_cancel(record.batch.id)
    seen = owned.seen(record)
    assert (seen.status, seen.cancelling_at == owned.cancelling_at(record.batch.id)) == ("cancelling", True)
    ended = structs.replace(record, batch=structs.replace(record.batch, status="completed"))
    assert owned.seen(ended).status == "completed"
    owned.clear_stuck(record.batch.id)
    assert owned.seen(record).errors is None
    owned.clear_marks(record.batch.id)
    assert owned.seen(record) == record.batch


def test_what_is_expired_or_left_by_a_crash_is_removed(owned: OwnerFolder, tmp_path: Path) -> None:
    kept, expired, in_use = add_file(owned), add_file(owned, expires_at=NOW - 1), add_file(owned, expires_at=NOW - 1)
    running = add_batch(owned, input_file_id=in_use)
    old, failed = add_batch(owned, "completed"), add_batch(owned, "failed")
    for record in (running, failed):
        owned.content(record.output_file_id).write_bytes(b"{}\n")
    interrupted = owned.upload(owned.new_file_id())
    interrupted.write_bytes(b"123")
    arriving = owned.disk.create(owned.upload(owned.new_file_id()))
    assert [record.file.id for record in owned.files()] == [kept]
    assert owned.num_bytes == 15 + 3 + 3 + 3
    owned.purge(old.created_ns + 1)
    left = {path.name for path in (tmp_path / "dir" / OWNER).rglob("file-*")}
    arriving_name = next(name for name in left if name.endswith(".upload"))
    assert left == {
        f"{kept}.json",
        f"{kept}.jsonl",
        f"{in_use}.json",
        f"{in_use}.jsonl",
        f"{running.output_file_id}.jsonl",
        arriving_name,
    }
    assert arriving_name != interrupted.name
    assert {record.batch.id for record in owned.batches()} == {running.batch.id, failed.batch.id}
    assert not owned.content(expired).exists()
    arriving.close()


def test_a_file_that_becomes_known_while_remainders_are_looked_for_is_kept(
    owned: OwnerFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_id = owned.new_file_id()
    owned.content(file_id).write_bytes(b"12345")
    append = type(owned.disk).append

    def append_late(disk: Any, path: Path) -> Any:
        file = FileObject(id=file_id, bytes=5, created_at=NOW, filename="f.jsonl", purpose="batch")
        owned.add_file(FileRecord(created_ns=time.time_ns(), file=file))
        return append(disk, path)

    monkeypatch.setattr(type(owned.disk), "append", append_late)
    owned.purge(0)
    assert owned.file(file_id).file.bytes == 5
    assert owned.content(file_id).exists()


def test_what_was_acknowledged_outlives_a_power_failure() -> None:
    disk = WorldDisk()
    system = real_system()._replace(disk=disk.of("server"))
    owned = BatchFolder(system, ServerConfig(batch_dir="/state/batches")).of(OWNER)

    def upload() -> str:
        owned.make()
        file_id = owned.new_file_id()
        with contextlib.closing(owned.disk.create(owned.upload(file_id))) as file:
            file.write(b"12345")
            file.sync()
        owned.disk.rename(owned.upload(file_id), owned.content(file_id))
        add_record(owned, file_id)
        return file_id

    def cut_power() -> None:
        disk.tree.reboot(lambda number: [False] * number, lambda number: [False] * number)

    kept, deleted = upload(), upload()
    record = add_batch(owned, input_file_id=kept)
    cut_power()
    assert [each.file.id for each in owned.files()] == [kept, deleted]
    assert owned.disk.read(owned.content(kept)) == b"12345"
    assert [each.batch.id for each in owned.batches()] == [record.batch.id]
    owned.remove_file(deleted)
    owned.ask_to_cancel(record.batch.id)
    cut_power()
    assert [each.file.id for each in owned.files()] == [kept]
    assert owned.cancelling_at(record.batch.id) is not None


def test_what_others_keep_in_the_folder_is_left_alone(owned: OwnerFolder, tmp_path: Path) -> None:
    root = tmp_path / "dir"
    theirs = [root / "lost+found/files/data.jsonl", root / "abc/files/file-1.upload", root / OWNER / "files/mine.jsonl"]
    for path in theirs:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    (remainder := owned.upload(owned.new_file_id())).write_text("")
    folder = BatchFolder(real_system(), ServerConfig(batch_dir=str(root)))
    assert folder.owners() == [OWNER]
    folder.for_each(lambda _, each: each.purge(0))
    assert not remainder.exists()
    assert all(path.exists() for path in theirs)


def test_an_owner_whose_folder_cannot_be_read_is_skipped_and_logged_once(owned: OwnerFolder, tmp_path: Path) -> None:
    broken = "f" * 32
    folder = BatchFolder(real_system(), ServerConfig(batch_dir=str(tmp_path / "dir")))
    (tmp_path / "dir" / broken).mkdir()
    (tmp_path / "dir" / broken / "batches").write_text("no folder")
    (tmp_path / "dir" / "anyone").mkdir()
    found: list[str] = []

    def look(owner: str, each: OwnerFolder) -> None:
        each.batch_ids()
        found.append(owner)

    with capture_logs() as logs:
        for _ in range(2):
            folder.for_each(look)
    assert found == [OWNER, ""] * 2
    assert [line["event"] for line in logs] == ["a folder of batches cannot be used and is skipped"]


def test_a_damaged_state_is_ignored(owned: OwnerFolder, tmp_path: Path) -> None:
    record, other = add_batch(owned), add_batch(owned)
    (tmp_path / "dir" / OWNER / "batches" / f"{record.batch.id}.json").write_text('{"created_ns": 1')
    assert [each.batch.id for each in owned.batches()] == [other.batch.id]


def test_pages() -> None:
    records = [FileRecord(created_ns=n, file=None) for n in range(5)]  # type: ignore[arg-type]
    ids = list("abcde")
    assert page(records, ids, None, 2) == (records[:2], True)
    assert page(records, ids, "b", 3) == (records[2:], False)
    assert page(records, ids, "e", 3) == ([], False)
    with pytest.raises(InputError, match="there is no 'x' in this list"):
        page(records, ids, "x", 3)
