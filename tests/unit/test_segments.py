"""To whoever shares memory: access by the owner only, release, and the table for the kernels, without ranks."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import stat
import threading
from pathlib import Path

import pytest
import torch

from torchmpi.distributed import torch_names
from torchmpi.shared_memory import memory_layout, segments
from torchmpi.shared_memory.kernels import records
from torchmpi.shared_memory.segments import Segment, Ticket
from torchmpi.shared_memory.shared_tensors import SharedHeap

PAGE = 4096


@pytest.fixture(params=("anonymous", "refused by the system", "in /dev/shm"))
def kind(request, monkeypatch, tmp_path):
    """How segments are created: anonymous files, and the two reasons for files in /dev/shm."""
    if request.param == "refused by the system":

        def memfd_create(*arguments: object) -> int:
            raise OSError(errno.EPERM, "a sandbox does not allow it")

        monkeypatch.setattr(os, "memfd_create", memfd_create)
    elif request.param == "in /dev/shm":
        monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(segments, "_FOLDER", str(tmp_path))
    return request.param


def descriptors() -> int:
    gc.collect()  # which closes those of earlier tests
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("torchmpi-")


def test_two_mappings_of_one_memory(kind, tmp_path):
    before = descriptors()
    first = Segment.create("test", 3 * PAGE)
    second = Segment.open(first.ticket)
    assert first.is_anonymous == (kind == "anonymous")
    first.memory[5:8] = b"abc"
    assert second.memory[5:8] == b"abc" and len(second.memory) == 3 * PAGE
    assert first.address != second.address
    first.withdraw()
    assert os.listdir(tmp_path) == []
    second.memory[5:8] = b"xyz"
    assert first.memory[5:8] == b"xyz", "a withdrawn segment stays mapped"
    first.close()
    second.close()
    assert descriptors() == before


def test_only_the_user_may_open_a_segment(kind):
    segment = Segment.create("test", PAGE)
    mode = os.stat(segment.ticket.path).st_mode
    assert stat.S_IMODE(mode) == 0o600
    segment.release()
    segment.close()


def test_a_withdrawn_segment_cannot_be_opened(kind):
    segment = Segment.create("test", PAGE)
    segment.withdraw()
    segment.withdraw()
    with pytest.raises(OSError):
        Segment.open(segment.ticket)
    segment.close()


def test_another_file_at_the_same_place_is_refused(kind, tmp_path):
    segment = Segment.create("test", PAGE)
    before = descriptors()
    path, device, inode, num_bytes = segment.ticket
    other = tmp_path / "other"
    other.write_bytes(bytes(PAGE))
    for wrong in (
        Ticket(str(other), device, inode, num_bytes),
        Ticket(path, device, inode + 1, num_bytes),
        Ticket(path, device + 1, inode, num_bytes),
        Ticket(path, device, inode, 2 * num_bytes),
    ):
        with pytest.raises(FileNotFoundError, match="another file than the announced segment"):
            Segment.open(wrong)
    assert descriptors() == before
    segment.release()
    segment.close()


def test_release_returns_memory_that_others_have_mapped(kind, tmp_path):
    owner = Segment.create("test", 64 * PAGE)
    other = Segment.open(owner.ticket)
    owner.memory[:] = bytes(range(256)) * (64 * PAGE // 256)
    file = os.open(owner.ticket.path, os.O_RDONLY)
    assert os.fstat(file).st_blocks > 0
    assert not other.is_released
    owner.release()
    assert other.is_released
    assert os.fstat(file).st_blocks == 0
    assert os.listdir(tmp_path) == []
    os.close(file)
    owner.release()
    owner.close()
    other.close()


def test_lack_of_memory_is_an_error_without_leftovers(kind, tmp_path):
    import resource

    before, limits = descriptors(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE, limits[1]))
    try:
        with pytest.raises(OSError):
            Segment.create("test", 16 * PAGE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == [] and descriptors() == before


# --- the heap


def entries(heap: SharedHeap) -> list[list[int]]:
    """The rows of the table that are in use: begin, end, key, file."""
    fields = heap.table[1:].reshape(-1, records.SegmentRecord.FIELDS)[: heap.table[0]]
    return [row.tolist() for row in fields if row[records.SegmentRecord.end]]


def test_the_table_contains_the_addresses_of_tensors():
    heap = SharedHeap()
    tensors = [heap.empty((5, 1000), torch.float64), heap.empty((3,), torch.int8)]
    table = entries(heap)
    assert [begin for begin, *_ in table] == [tensor.data_ptr() for tensor in tensors]
    assert [end - begin for begin, end, *_ in table] == [10 * PAGE, PAGE]
    assert len({key for _, _, key, _ in table}) == 2
    for begin, end, key, file in table:
        assert file >> 32 == os.getpid() and key & 0xFFFFFFFF == os.fstat(file & 0xFFFFFFFF).st_ino & 0xFFFFFFFF
        address = heap.map(key, file, end - begin)
        assert address == heap.map(key, file, end - begin) and address != begin
    heap.close()


@pytest.mark.parametrize("shape", ((), (0,), (2, 0, 3), (7,), (65, 33)))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.bool, torch.complex128, torch.int64), ids=str)
def test_tensors_of_every_kind(shape, dtype):
    heap = SharedHeap()
    tensor = heap.empty(shape, dtype)
    assert (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
    tensor.fill_(1)
    assert bool((tensor == 1).all())


def test_memory_is_released_with_the_last_view():
    heap, before, mapped = SharedHeap(), descriptors(), mappings()
    tensor = heap.empty((100, 10), torch.float32)
    (_, _, key, file) = entries(heap)[0]
    view = tensor[3:5].t()
    del tensor
    view.fill_(2.0)
    assert len(entries(heap)) == 1
    del view
    gc.collect()
    assert entries(heap) == []
    assert (descriptors(), mappings()) == (before, mapped)
    with pytest.raises(OSError):
        heap.map(key, file, PAGE)


def test_another_file_under_the_announced_descriptor_is_not_mapped():
    """Regression: the identity of the file was compared with itself, and any file of this size was mapped."""
    owner, user = SharedHeap(), SharedHeap()
    tensors = [owner.empty((1000,), torch.float32) for _ in range(2)]
    (begin, end, key, _), (_, _, _, other) = entries(owner)
    with pytest.raises(FileNotFoundError, match="is another file than the announced shared tensor"):
        user.map(key, other, end - begin)
    assert not user._mapped and len(tensors) == 2


def test_records_are_reused_with_another_key():
    heap, keys = SharedHeap(), set()
    for _ in range(100):
        tensor = heap.empty((10,), torch.float32)
        (entry,) = entries(heap)
        keys.add(entry[records.SegmentRecord.key])
        del tensor
    assert len(keys) == 100 and heap.table[0] == 1


def test_released_segments_are_unmapped_at_the_next_mapping():
    owner, user, before = SharedHeap(), SharedHeap(), descriptors()

    def mapped(tensor: torch.Tensor) -> int:
        begin, end, key, file = next(entry for entry in entries(owner) if entry[0] == tensor.data_ptr())
        return user.map(key, file, end - begin)

    for _ in range(50):
        tensor = owner.empty((5000,), torch.float32)
        assert mapped(tensor) != tensor.data_ptr()
        most = descriptors()
        del tensor
    assert most <= before + 4
    user.close()
    assert descriptors() == before


def test_tensors_outlive_the_heap():
    heap, before = SharedHeap(), descriptors()
    tensor = heap.empty((1000,), torch.float32).fill_(3.0)
    heap.close()
    assert heap.table[0] == 0 and tensor.sum().item() == 3000.0
    del tensor
    gc.collect()
    assert descriptors() == before


def test_tensors_are_as_many_as_the_descriptors_allow():
    """Without free descriptors a rank could not map an announced segment, in the middle of a collective."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() + 200, limits[1]))
    try:
        heap = SharedHeap(num_ranks=9)
        tensors = []
        with pytest.raises(OSError, match="already"):
            for index in range(100):
                tensors.append(heap.empty((10,), torch.float32).fill_(index))
        assert 10 <= len(tensors) * 10 <= (descriptors() + 200) // 2
        assert [tensor[0].item() for tensor in tensors] == list(range(len(tensors)))
        tensors.pop(3)
        gc.collect()
        heap.empty((10,), torch.float32)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def moved_to_file(heap: SharedHeap, tensor: torch.Tensor) -> torch.Tensor:
    moved = torch_names.move_to_file(tensor, at_once=1)
    assert moved is not None
    heap.adopt(*moved)
    return tensor


def test_a_storage_is_adopted_with_all_its_views():
    owner, user, before, mapped = SharedHeap(), SharedHeap(), descriptors(), mappings()
    tensor = torch.arange(5000.0)
    view, address = tensor[10:20], tensor.data_ptr()
    moved_to_file(owner, tensor)
    assert tensor.data_ptr() != address and owner.holds(view.data_ptr())
    assert tensor.tolist() == list(range(5000)) and view.tolist() == list(range(10, 20))
    (begin, end, key, file) = entries(owner)[0]
    assert (begin, end - begin) == (tensor.data_ptr(), tensor.nbytes)
    other = (ctypes.c_float * 5000).from_address(user.map(key, file, end - begin))
    other[12] = -1.0
    assert view[2].item() == -1.0
    del tensor
    gc.collect()
    assert len(entries(owner)) == 1, "a view is left"
    del view
    gc.collect()
    assert entries(owner) == []
    user.close()
    assert (descriptors(), mappings()) == (before, mapped)


def test_a_moved_storage_is_withdrawn():
    """The addresses may be reused, and the other ranks would still access the file."""
    heap, segment, address = SharedHeap(), Segment.create("test", PAGE), [8 * PAGE]

    class Storage:
        def data_ptr(self) -> int:
            return address[0]

    storage, file = Storage(), os.open(segment.ticket.path, os.O_RDWR)
    heap.adopt(storage, file, PAGE)
    heap.forget_what_moved()
    assert [begin for begin, *_ in entries(heap)] == address
    address[0] += PAGE
    heap.forget_what_moved()
    assert entries(heap) == []
    os.close(file)


@pytest.mark.parametrize("has_failed", (False, True), ids=("", "after a failed call"))
def test_memory_is_kept_while_a_rank_may_be_in_a_failed_call(has_failed):
    """Regression: the segment was truncated in this case too, and the other rank ended with a bus error."""
    owner, user = SharedHeap(), SharedHeap()
    tensor = owner.empty((5000,), torch.float32).fill_(3.0)
    (begin, end, key, file) = entries(owner)[0]
    user.map(key, file, end - begin)
    if has_failed:
        owner.note_failed_call()
    del tensor
    gc.collect()
    (segment,) = user._mapped.values()
    assert entries(owner) == [] and segment.is_released is not has_failed


def test_an_adopted_storage_outlives_the_heap():
    heap, before = SharedHeap(), descriptors()
    tensor = moved_to_file(heap, torch.ones(5000))
    heap.close()
    assert tensor.sum().item() == 5000.0
    del tensor
    gc.collect()
    assert descriptors() == before


def test_nothing_is_moved_where_files_in_memory_have_no_room(monkeypatch):
    """Docker gives /dev/shm 64 MB; writing beyond would be a bus error."""
    tensor = torch.ones(5000)
    address, real = tensor.data_ptr(), os.statvfs("/dev/shm")
    almost_full = os.statvfs_result((*real[:4], real.f_blocks // 2 + 3 * tensor.nbytes // real.f_frsize, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: almost_full)
    assert torch_names.move_to_file(tensor, at_once=4) is None
    assert tensor.data_ptr() == address
    assert torch_names.move_to_file(tensor, at_once=2) is not None


def test_without_anonymous_files_there_are_no_shared_tensors(monkeypatch, tmp_path):
    """Other ranks could not open the tensors, and a killed process would leave files."""
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(segments, "_FOLDER", str(tmp_path))
    before = descriptors()
    with pytest.raises(OSError, match="anonymous"):
        SharedHeap().empty((10,), torch.float32)
    gc.collect()
    assert os.listdir(tmp_path) == [] and descriptors() == before


def test_a_forked_child_does_not_release_the_memory():
    """Regression: the child released the memory with its copy of the tensor, and the parent ended with a bus error."""
    heap = SharedHeap()
    tensors = [heap.empty((5000,), torch.float32).fill_(1.0)]
    child = os.fork()
    if child == 0:
        tensors.clear()
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert tensors[0].sum().item() == 5000.0
    assert len(entries(heap)) == 1


def test_threads_create_and_free_tensors_concurrently():
    heap, wrong = SharedHeap(), []

    def work(number: int) -> None:
        for index in range(100):
            tensor = heap.empty((1000 + index,), torch.float32).fill_(number)
            if not bool((tensor == number).all()):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert not wrong and entries(heap) == []


def test_fields_of_a_rank_that_others_write_or_read_do_not_overlap():
    """In 64-bit words: what a rank counts, what it has reduced, the entries of its ring."""
    block, entry = memory_layout.Block, memory_layout.Entry
    for record in (block, entry):
        words = [range(each.number, each.number + each.size) for each in record.fields.values()]
        numbers = [number for row in words for number in row]
        assert len(numbers) == len(set(numbers)) and max(numbers) + 1 == record.FIELDS
    own_lines = {name: block.fields[name].number for name in ("entered", "ready", "reduced", "ring")}
    assert all(number % 16 == 0 for number in (*own_lines.values(), entry.FIELDS)), "processors fetch lines in pairs"
    assert len(set(own_lines.values())) == len(own_lines) and block.BYTES <= memory_layout.BLOCK_BYTES
    assert entry.fields["payload"].size * memory_layout.FIELD_BYTES == memory_layout.PAYLOAD_BYTES
    assert memory_layout.slots_begin(2) >= 2 * memory_layout.BLOCK_BYTES
