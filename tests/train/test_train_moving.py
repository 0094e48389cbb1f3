# SPDX-License-Identifier: Apache-2.0
"""What a GPU waits for in a step: rows that move whole, a host that waits for nothing, memory."""

from __future__ import annotations

import multiprocessing
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from host_reads import HostReads
from interpreter import needs_gpu
from nano_data import MakeRecipe
from nano_runs import in_processes
from safetensors.torch import load_file, save_file
from torch import Tensor

from vllm_weaver.train import moving
from vllm_weaver.train import target as target_module
from vllm_weaver.train.data import Document, HiddenStateData, Layout, stream
from vllm_weaver.train.errors import DataError, TrainError
from vllm_weaver.train.moving import Lead, to_device
from vllm_weaver.train.processes import Processes, host_memory, host_peak
from vllm_weaver.train.recipe import DataRecipe
from vllm_weaver.train.target import read_tensor
from vllm_weaver.train.trainer import Trainer

CPU = torch.device("cpu")
LAYOUT = Layout(width=256, vocab=4096, layer_ids=(2, 4, 6, 7), last_layer=8)
MIB = 2**20


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("weigh", ["depth", "path", "length"])
def test_host_waits_for_nothing_within_a_unit(
    make_recipe: MakeRecipe, precision: str, weigh: str
) -> None:
    """Otherwise the device would stand still while the host launches what follows."""
    trainer = Trainer(
        make_recipe(train__precision=precision, train__weigh=weigh), Processes(0, 1, CPU)
    )
    with HostReads() as reads:
        unit = trainer._next(stream(trainer.data, iter([trainer.plan.unit(0)])))
    # The detector sees what it should: anchors are drawn on the host.
    assert any(file == "train/data.py" and name == "nonzero" for file, _, name in reads.found)
    with HostReads() as reads:
        loss, _ = trainer._unit(unit)
        loss.backward()
    assert torch.isfinite(loss) and not reads.found


def test_rows_are_one_piece_of_memory_each(data: Path) -> None:
    from hs_connectors.fp8_utils import quantize_tensor_to_fp8

    file = data / "hidden_states" / "hs_1.safetensors"
    whole = load_file(file)
    quantised, scales = quantize_tensor_to_fp8(whole["hidden_states"])
    save_file({**whole, "hidden_states": quantised, "hidden_states_scales": scales}, file)
    opened = HiddenStateData(DataRecipe(path=str(data), workers=0, max_length=40), LAYOUT)
    for row in (0, 1):
        document = opened[row]
        assert isinstance(document, Document)
        assert document.states_Lkd.is_contiguous() and document.states_Lkd.shape == (40, 5, 256)
        for view in (document.auxiliary_Lx, document.last_Ld):
            assert view.untyped_storage().data_ptr() == document.states_Lkd.data_ptr()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_cut_row_is_handed_over_without_the_rest_of_its_file(data: Path, workers: int) -> None:
    recipe = DataRecipe(path=str(data), workers=workers, max_length=10)
    ((document, _),) = next(stream(HiddenStateData(recipe, LAYOUT), iter([[(0, 0)]])))
    assert isinstance(document, Document) and len(document.states_Lkd) == 10
    assert document.states_Lkd.untyped_storage().nbytes() == document.states_Lkd.nbytes


class _Counting(HiddenStateData):
    """Leaves a file for each row that was read, also from another process."""

    def __getitem__(self, index: int) -> Any:
        (self.path / f"read_{index}").touch()
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_two_rows_are_read_ahead_by_each_worker_and_no_unit(data: Path, workers: int) -> None:
    opened = _Counting(DataRecipe(path=str(data), workers=workers), LAYOUT)
    units = stream(opened, iter([[(3 * unit + row, 0) for row in range(3)] for unit in range(4)]))
    for taken in (3, 6):
        assert len(next(units)) == 3
        until = time.monotonic() + 20
        while len(list(data.glob("read_*"))) < taken + 2 * workers and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(0.3)
        assert len(list(data.glob("read_*"))) == taken + 2 * workers


def test_moving_to_a_gpu_pins_first_and_does_not_wait() -> None:
    calls: list[Any] = []

    class Given:
        is_cuda = False

        def __init__(self, pinned: bool) -> None:
            self.pinned = pinned

        def is_pinned(self) -> bool:
            return self.pinned

        def pin_memory(self) -> Given:
            calls.append("pin")
            return Given(True)

        def to(self, device: torch.device, non_blocking: bool = False) -> None:
            calls.append((device.type, self.pinned, non_blocking))

    for pinned in (False, True):
        to_device(Given(pinned), torch.device("cuda"))  # type: ignore[arg-type]
    assert calls == ["pin", ("cuda", True, True), ("cuda", True, True)]
    tensor = torch.ones(3)
    assert to_device(tensor, CPU) is tensor and Lead(CPU).move(tensor) is tensor


def test_rows_move_beside_the_computation_which_waits_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            calls.append(f"{self.name} waits for {other.name}")

        def __enter__(self) -> None:
            calls.append(f"in {self.name}")

        def __exit__(self, *error: Any) -> None:
            calls.append("out")

    class Moved:
        def record_stream(self, stream: Stream) -> None:
            calls.append(f"kept for {stream.name}")

    def moved(tensor: Tensor, device: torch.device) -> Moved:
        calls.append(f"to {device}")
        return Moved()

    monkeypatch.setattr(moving.torch.cuda, "current_stream", lambda device: Stream("main"))
    monkeypatch.setattr(moving.torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(moving, "to_device", moved)
    lead = Lead(CPU)
    assert not lead.on_gpu
    monkeypatch.setattr(lead, "_copies", Stream("side"))
    assert lead.on_gpu
    lead.move(torch.ones(1))
    assert calls == ["in side", "to cpu", "out", "main waits for side", "kept for main"]


def test_host_is_one_unit_ahead_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    waited: list[int] = []

    class Event:
        def __init__(self, blocking: bool) -> None:
            self.number = len(made)
            made.append(self)

        def record(self, stream: Any) -> None: ...

        def synchronize(self) -> None:
            waited.append(self.number)

    monkeypatch.setattr(moving.torch.cuda, "Event", Event)
    monkeypatch.setattr(moving.torch.cuda, "current_stream", lambda device: None)
    lead = Lead(CPU)
    lead.launched()
    assert not made
    monkeypatch.setattr(lead, "_copies", object())
    for launched, done in ((1, []), (2, [0]), (3, [0, 1])):
        lead.launched()
        assert len(made) == launched and waited == done


class _Pinned:
    """In the place of `Lead`: the loader pins, and rows stay where they are."""

    on_gpu = True

    def move(self, tensor: Tensor) -> Tensor:
        return tensor


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, torch.Size]]:
    """Makes the loader believe in a GPU; (thread, shape) of what it pins."""
    found = []

    def pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
        found.append((threading.current_thread().name, tensor.shape))
        return tensor.clone()

    for name, answer in {
        "is_available": True,
        "current_accelerator": torch.device("cuda"),
        "current_device_index": 0,
        "set_device_index": None,
    }.items():
        monkeypatch.setattr(torch.accelerator, name, lambda *given, a=answer: a)
    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_pins_the_states_alone_and_beside_the_training(
    data: Path, pinned: list[tuple[str, torch.Size]], workers: int
) -> None:
    opened = HiddenStateData(DataRecipe(path=str(data), workers=workers), LAYOUT)
    rows = [[(row, row + 1) for row in range(3 * unit, 3 * unit + 3)] for unit in range(3)]
    lead: Any = _Pinned()
    read = list(stream(opened, iter(rows), lead))
    assert [[(document.index, seed) for document, seed in unit] for unit in read] == rows
    assert [len(shape) for _, shape in pinned] == [3] * 9
    main = threading.main_thread().name
    assert all((thread == main) == (workers == 0) for thread, _ in pinned)


def test_an_error_ends_readers_and_pinning_while_it_is_held(
    data: Path, pinned: list[tuple[str, torch.Size]]
) -> None:
    """Otherwise they live until Python ends, where the thread dies with a traceback of its own."""
    file = data / "hidden_states" / "hs_3.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    opened = HiddenStateData(DataRecipe(path=str(data), workers=2), LAYOUT)
    lead: Any = _Pinned()
    threads = set(threading.enumerate())
    held: list[DataError] = []
    try:
        for _ in stream(opened, iter([[(row, 0)] for row in range(10)]), lead):
            assert multiprocessing.active_children()
    except DataError as error:
        held.append(error)
    assert held and "hs_3" in str(held[0]) and pinned
    assert not multiprocessing.active_children()
    assert not any("pin" in t.name for t in set(threading.enumerate()) - threads)


def test_rows_that_find_no_room_are_no_failure_of_a_reader(data: Path) -> None:
    class Full(_Pinned):
        on_gpu = False

        def move(self, tensor: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory")

    lead: Any = Full()
    opened = HiddenStateData(DataRecipe(path=str(data), workers=0), LAYOUT)
    with pytest.raises(DataError, match=r"row 2: .* lower train\.documents"):
        next(stream(opened, iter([[(2, 0)]]), lead))


@pytest.mark.gpu
@needs_gpu
def test_rows_reach_a_gpu_as_they_are(data: Path) -> None:
    opened = HiddenStateData(DataRecipe(path=str(data), workers=1), LAYOUT)
    lead = Lead(torch.device("cuda", torch.cuda.current_device()))
    for unit in stream(opened, iter([[(row, 0) for row in range(4)]] * 3), lead):
        for document, _ in unit:
            assert isinstance(document, Document) and document.states_Lkd.is_cuda
            same = opened[document.index]
            assert isinstance(same, Document)
            assert torch.equal(document.states_Lkd.cpu(), same.states_Lkd)
            pinned = same.pin_memory()
            assert pinned.states_Lkd.is_pinned() and pinned.index == document.index
        lead.launched()


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (0, 5), (5, 0), (33, 3), (9, 2, 2), (2, 300)])
def test_pieces_make_the_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: torch.dtype, shape: tuple[int, ...]
) -> None:
    monkeypatch.setattr(target_module, "_AT_ONCE", 256)
    whole = torch.randn(shape).mul(300).to(stored)
    save_file({"whole": whole}, tmp_path / "model.safetensors")
    for wanted in (torch.float32, torch.bfloat16):
        read = read_tensor(tmp_path / "model.safetensors", "whole", "cpu", wanted)
        assert read.dtype == wanted and torch.equal(read, whole.to(wanted))


def test_a_full_gpu_is_no_damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"whole": torch.ones(3, 3)}, tmp_path / "model.safetensors")

    def full(*given: Any, **options: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(target_module.torch, "empty", full)
    with pytest.raises(TrainError, match=r"finds no room on cuda:0"):
        read_tensor(tmp_path / "model.safetensors", "whole", "cuda:0", torch.bfloat16)


_LOADS = """
import sys, torch
from pathlib import Path
from vllm_weaver.train.processes import host_peak
from vllm_weaver.train.target import read_tensor
file, before = Path(sys.argv[1]), host_peak()
for name in "ab":
    kept = read_tensor(file, name, "cpu", torch.bfloat16)
    assert float(kept[-1, -1]) == 2.0 and kept[0].count_nonzero() == 1
    grown = (host_peak() - before) / 2**20
    print(name, round(grown))
    del kept
"""


def test_loading_takes_the_tensor_and_64_mib(tmp_path: Path) -> None:
    """Two tensors of 512 MiB in float32 become 256 MiB each: the file's 1 GiB is never there."""
    file = tmp_path / "model.safetensors"
    tensors = {}
    for name in "ab":
        tensors[name] = torch.zeros(2**17, 2**10)
        tensors[name][0, 3], tensors[name][-1, -1] = 1.0, 2.0
    save_file(tensors, file)
    result = in_processes(_LOADS, tmp_path, str(file))
    assert result.returncode == 0, result.stderr
    grown = [int(line.split()[1]) for line in result.stdout.splitlines()]
    assert grown[0] < 256 + 64 + 40
    assert grown[1] < 256 + 64 + 60


def _hold(ready: Any, done: Any) -> None:
    held = torch.ones(100 * MIB, dtype=torch.uint8)
    ready.set()
    done.wait(30)
    del held


def test_memory_of_reading_processes_counts_and_what_they_share_once() -> None:
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    shared: Tensor = torch.ones(200 * MIB, dtype=torch.uint8)
    before = host_memory()
    child = context.Process(target=_hold, args=(ready, done))
    child.start()
    try:
        assert ready.wait(30)
        grown = host_memory() - before
    finally:
        done.set()
        child.join()
    assert 95 * MIB < grown < 160 * MIB
    assert host_peak() > shared.nbytes
