"""Stored tensors: what is read piece by piece is what the safetensors library reads at once."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from triolet.core.errors import CheckpointError
from triolet.models.checkpoints.stored import MappedTensor, fill, stored_tensors
from triolet.models.checkpoints.unread import UnreadSlice, UnreadTensor, read_all
from triolet.models.checkpoints.weights import open_weights

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)


@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    wanted=st.sampled_from((None, torch.float32, torch.bfloat16)),
)
@settings(derandomize=True, max_examples=60, deadline=None)
def test_every_tensor_is_what_the_library_reads(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]], dtype: torch.dtype, wanted: torch.dtype | None
) -> None:
    path = tmp_path_factory.mktemp("stored") / "model.safetensors"
    save_file({f"t{n}": (torch.randn(shape) * 100).to(dtype) for n, shape in enumerate(shapes)}, path)
    expected, stored = load_file(path), stored_tensors(path)
    assert stored.keys() == expected.keys()
    for name, tensor in expected.items():
        assert stored[name].get_shape() == list(tensor.shape)
        assert stored[name].dtype == tensor.dtype
        assert torch.equal(stored[name][...].to(dtype=wanted), tensor.to(wanted or dtype))


def test_what_is_joined_of_unread_tensors_is_read_part_by_part(tmp_path: Path) -> None:
    """As transformers joins the gates and values of experts, and as panels read rows."""
    path, shape = tmp_path / "model.safetensors", (3, 4)
    own = {name: torch.randn(shape) for name in "abcd"}
    save_file(own, path)
    a, b, c, d = (each.to() for _, each in sorted(stored_tensors(path, UnreadSlice).items()))
    joined: Any = torch.nn.Parameter(torch.cat([torch.stack([a, b]), torch.stack([c, d])], 1))
    assert isinstance(joined, UnreadTensor)
    expected = torch.stack([torch.cat([own["a"], own["c"]]), torch.cat([own["b"], own["d"]])])
    assert joined.shape == expected.shape
    assert torch.equal(joined.read_part(1), expected[1])
    assert torch.equal(a.read_rows(1, 9), own["a"][1:])
    assert joined.kept == a.kept == [], "only parts were asked for"
    joined.detach()[0, 1:] += 1.0
    assert torch.equal(joined.read_part(0), torch.cat([expected[0][:1], expected[0][1:] + 1.0])), "it is changed"
    assert torch.equal(joined.read_rows(1, 2), expected[1:])
    stacked: Any = torch.stack([a, b])
    b.mul_(2.0)
    assert torch.equal(stacked.read_part(1), 2.0 * own["b"]), "what was joined is changed"
    assert torch.equal(torch.cat([a, b])[4] + 0, 2.0 * own["b"][1])
    module = torch.nn.Embedding(3, 4, _weight=c)
    module.tied, module.seen = module.weight, module.weight.detach()
    read_all(module)
    assert type(module.weight) is torch.nn.Parameter
    assert module.tied is module.weight
    assert module.seen.data_ptr() == module.weight.data_ptr()
    assert torch.equal(module.weight, own["c"])


@pytest.fixture
def large(tmp_path: Path) -> tuple[Path, torch.Tensor]:
    """Of two and a half pieces."""
    tensor = torch.arange(5 << 17, dtype=torch.float32).view(5, -1)
    save_file({"before": torch.zeros(3), "large": tensor}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors", tensor


def test_a_tensor_of_several_pieces_is_whole_and_scaled(large: tuple[Path, torch.Tensor]) -> None:
    path, tensor = large
    stored = stored_tensors(path)["large"]
    assert [len(piece) for piece in stored.pieces()] == [1 << 18, 1 << 18, 1 << 17]
    target = torch.empty_like(tensor)
    fill(target, stored.pieces(), 0.5)
    assert torch.equal(target, tensor * 0.5)
    assert torch.equal(stored[1:3, 7], tensor[1:3, 7])


class WatchedPath(type(Path())):
    """A path that remembers the files which it opened."""

    @property
    def files(self) -> list[IO[bytes]]:
        return self.__dict__.setdefault("_files", [])

    def open(self, *args: Any, **kwargs: Any) -> IO[bytes]:
        self.files.append(super().open(*args, **kwargs))
        return self.files[-1]


def test_a_file_that_is_not_read_to_its_end_is_closed_too(large: tuple[Path, torch.Tensor]) -> None:
    """Where the reader leaves, where the target has no room and where the file ends early, though the error is kept."""
    path, tensor = WatchedPath(large[0]), large[1]
    stored = evolve(stored_tensors(large[0])["large"], path=path)
    left = stored.pieces()
    next(left)
    assert not path.files[-1].closed
    left.close()
    with pytest.raises(RuntimeError, match="expanded size") as no_room:
        fill(tensor[:2].clone(), stored.pieces())
    large[0].write_bytes(large[0].read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="the file ends within it") as too_short:
        stored.to()
    assert [file.closed for file in path.files] == [True] * 3, f"{no_room} and {too_short} are kept"


def test_a_pickle_is_read_in_pieces_too(tmp_path: Path, large: tuple[Path, torch.Tensor]) -> None:
    tensor = large[1]
    torch.save({"large": tensor, "step": 3}, tmp_path / "pytorch_model.bin")
    (stored,) = open_weights(tmp_path / "pytorch_model.bin").values()
    assert isinstance(stored, MappedTensor)
    assert (stored.shape, stored.dtype) == (tuple(tensor.shape), tensor.dtype)
    assert torch.equal(torch.cat(list(stored.pieces())), tensor.flatten())


def test_a_dtype_that_torch_does_not_have_is_told(large: tuple[Path, torch.Tensor]) -> None:
    stored = evolve(stored_tensors(large[0])["large"], kind="F4")
    with pytest.raises(CheckpointError, match=r"is of F4; allowed: BOOL, .* Save the checkpoint again"):
        stored.to()


def test_a_damaged_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"no weights")
    with pytest.raises(CheckpointError, match=r"cannot be read: .*; download or save the checkpoint again"):
        open_weights(path)


def test_a_file_that_the_system_refuses_is_told_by_its_own_words(tmp_path):
    """safetensors says of every such file that there is none, of one without permission, too."""
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: \[Errno 21\] Is a directory"):
        stored_tensors(tmp_path / "model.safetensors")
