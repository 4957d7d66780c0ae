"""A file written by the disk's thread holds what was appended, however it was cut into parts."""

import os

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tide_platform.capture.disk import PAGE, DirectFile, Disk, aligned

SIZES = st.one_of(
    st.integers(1, 300), st.sampled_from([PAGE, 1 << 16, 70_000, 3 * PAGE, 5 << 20, (9 << 20) + 7])
)


FULL = (5 << 20, True, 1)  # two of them fill a batch to the byte


@settings(max_examples=25, deadline=None)
@example(steps=[FULL, FULL], direct=False)
@example(steps=[FULL, (5 << 20, True, 0)], direct=True)
@example(steps=[FULL, FULL, (300, False, 2)], direct=True)
@given(steps=st.lists(st.tuples(SIZES, st.booleans(), st.integers(0, 3)), max_size=12), direct=st.booleans())
def test_any_parts_and_flushes(tmp_path_factory, steps, direct):
    """A step: bytes, whether they lie at a page's beginning, what follows (0: flush, 1: bytes to a page)."""
    folder, rng = tmp_path_factory.mktemp("disk"), np.random.default_rng(len(steps))
    disk, wanted, freed = Disk(), [], []
    with pytest.MonkeyPatch.context() as patch:
        if not direct:
            patch.setattr(os, "O_DIRECT", 0)
        file = DirectFile(folder / "file", disk, 1 << 20, 0)
    for number, (size, at_page, then) in enumerate(steps):
        part = aligned(size) if at_page else np.empty(size, np.uint8)
        part[:] = rng.integers(0, 256, size, dtype=np.uint8)
        file.reserve(size + PAGE)
        file.append(part, lambda number=number: freed.append(number))
        wanted.append(part.copy())
        if then == 1:
            filler = np.ones(-file.length % PAGE, np.uint8)
            file.append(filler)
            wanted.append(filler)
        elif not then:
            file.flush()
            assert disk.wait(10) and freed == list(range(number + 1))
    done = []
    file.seal(lambda: done.append(True))
    assert disk.close() and done and freed == list(range(len(steps)))
    content = np.concatenate([*wanted, np.zeros(0, np.uint8)])
    assert (folder / "file").read_bytes() == content.tobytes()
    assert (folder / "file").stat().st_mode & 0o777 == 0o600


def test_no_room_leaves_no_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    disk = Disk()
    with pytest.raises(OSError, match="No space"):
        DirectFile(tmp_path / "file", disk, 1 << 20, 10)
    assert not list(tmp_path.iterdir()) and disk.close()


def test_a_disk_that_takes_nothing_is_given_up_at_the_end(tmp_path, monkeypatch):
    def broken(*_):
        raise OSError(5, "Input/output error")

    disk = Disk()
    file = DirectFile(tmp_path / "file", disk, 1 << 20, 10)
    monkeypatch.setattr(os, "pwritev", broken)
    file.append(np.zeros(10, np.uint8))
    file.flush()
    assert not disk.close(0.1) and disk.errors


def test_a_fault_in_the_disks_thread_is_raised_where_it_is_asked_for():
    def fault():
        raise ValueError("no such thing")

    disk = Disk()
    disk.write(fault)
    assert disk.wait(5)
    with pytest.raises(ValueError, match="no such thing"):
        disk.check()
    disk.close()
