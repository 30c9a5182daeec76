"""Matrices in float16: packed where nothing is lost, multiplied as in float32, counted and given back."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers.modeling_outputs import BaseModelOutput

from triolet.core.request import LogitRules, SamplingParams
from triolet.models.linear.layers import PackedLinear
from triolet.models.linear.packed import PackedMatrix, Packer, is_available
from triolet.models.memory.resources import ResourceStack

pytestmark = pytest.mark.skipif(not is_available(), reason="this torch has no FBGEMM")

WIDE = {"d_model": 320, "encoder_attention_heads": 5, "decoder_attention_heads": 5, "decoder_ffn_dim": 300}


def matrix(outputs, inputs, *, spread=1.0, seed=0):
    """Values of float16, in float32."""
    make = torch.Generator().manual_seed(seed)
    return torch.randn(outputs, inputs, generator=make).mul_(spread).half().float()


def packed(weight):
    with Packer.open(2) as packer:
        return packer.pack(weight)


@given(
    size=st.sampled_from([(1, 260), (3, 300), (513, 257), (4097, 512), (9000, 260)]),
    rows=st.integers(1, 40),
    exponent=st.integers(-60, 60),
    seed=st.integers(0, 99),
)
def test_products_are_those_of_the_matrix_in_float32(size, rows, exponent, seed):
    """Whatever power of two its values are multiplied by."""
    weight = matrix(*size, seed=seed) * 2.0**exponent
    inputs = torch.randn(rows, size[1], generator=torch.Generator().manual_seed(seed))
    found, exact = packed(weight)(inputs), inputs.double() @ weight.double().T
    scale = inputs.double().abs() @ weight.double().abs().T  # what rounding is relative to
    assert bool(((found - exact).abs() <= 2e-6 * scale).all())


@given(rows=st.integers(2, 40), seed=st.integers(0, 99))
def test_a_row_does_not_depend_on_the_others(rows, seed):
    """Bit for bit: what a request is answered does not depend on who asks beside it."""
    product = packed(matrix(700, 300))
    inputs = torch.randn(rows, 300, generator=torch.Generator().manual_seed(seed))
    together = product(inputs)
    for row in range(rows):
        assert torch.equal(together[row : row + 1], product(inputs[row : row + 1]))


@given(st.data())
def test_only_what_float16_holds_is_packed(data):
    """One value that it does not hold is enough, wherever it is."""
    weight = matrix(300, 320)
    weight[0, 0] = 4.0  # so that no factor makes room for finer ones
    row, column = data.draw(st.integers(0, 299)), data.draw(st.integers(0, 319))
    assume((row, column) != (0, 0))
    weight[row, column] = data.draw(st.sampled_from([0.1, 1 + 2**-11, 1e-12, 1e30, float("nan"), float("inf")]))
    assert packed(weight) is None


def test_bfloat16_is_held_but_for_its_least_values():
    """Its 8 digits fit; of values far below the largest some are lost, and then nothing is packed."""
    weight = matrix(300, 320).bfloat16().float()
    weight[weight.abs() < 1e-6] = 0.0
    assert packed(weight) is not None
    weight[0, 0] = torch.tensor(1.01e-9).bfloat16()
    assert packed(weight) is None


def test_a_matrix_of_zeros_is_packed():
    assert not bool(packed(torch.zeros(5, 320))(torch.ones(2, 320)).any())


def test_a_narrow_matrix_stays_as_it_is():
    """FBGEMM fills the inputs up: packed it would take more memory than before."""
    assert packed(matrix(300, 256)) is None


def test_packed_memory_is_counted_until_it_is_gone():
    class Holder:
        def __init__(self):
            self.held = [packed(matrix(100, 512)), torch.zeros(3)]

        def tensors(self):
            return tuple(self.held)

        def release(self):
            self.held.clear()

    stack = ResourceStack()
    holder = stack.own("weights", Holder())
    assert stack.bytes_by_owner() == {"weights": 100 * 512 * 2 + 12}
    assert stack.unowned([holder, packed(matrix(1, 320))]) != []
    kept = holder.held[0]
    assert stack.close().kept == {"weights": 100 * 512 * 2}
    del kept
    assert stack.bytes_by_owner() == {}


def test_an_error_while_packing_is_raised(monkeypatch):
    monkeypatch.setattr(PackedMatrix, "pack", lambda self, weight: 1 / 0)
    with pytest.raises(ZeroDivisionError), Packer.open(2) as packer:
        for _ in range(9):
            packer.pack(matrix(2, 320))


# -- Whisper -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whisper(make):
    return make(seed=5, **WIDE).half().float()


@pytest.fixture(scope="module")
def folder(whisper, save, tmp_path_factory):
    return save(tmp_path_factory.mktemp("packed"), whisper)


def packed_layers(executor):
    decoder = executor._open.main.model._decoder
    return [layer for layer in (decoder.tokens, decoder.head, decoder.layers[0].qkv) if isinstance(layer, PackedLinear)]


def greedy(model, encoded, prompt, count):
    """What transformers' decoder writes to an encoder output, with no rule for what it may write."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            outputs = BaseModelOutput(last_hidden_state=encoded[None])
            logits = model(encoder_outputs=outputs, decoder_input_ids=torch.tensor([tokens])).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_whisper_whose_weights_are_packed_writes_transformers_tokens(
    open_driver, folder, whisper, features, job, audio, ids
):
    """Asleep its weights stay where they are; awake it writes the same."""
    driver = open_driver(folder)
    assert len(packed_layers(driver.executor)) == 3
    wide = [linear for linear in driver.executor._open.main.model.linears() if linear.shape.inputs >= 320]
    assert wide == []
    plain = sum(parameter.nbytes for parameter in whisper.parameters())
    held = driver.executor.memory().by_owner["weights"]
    assert held < 0.9 * plain  # positions and convolutions are not packed, and an embedding is there as a table, too
    prompt = (ids.start, ids.en, ids.transcribe, ids.no_timestamps)
    clips = {"a": audio(1), "b": audio(2, 0.5)}
    with torch.inference_mode():
        encoded = {key: whisper.model.encoder(features(clip)).last_hidden_state[0] for key, clip in clips.items()}
    rules, sampling = LogitRules(), SamplingParams(ignore_eos=True)
    for _ in range(2):
        driver.encode(**clips)
        jobs = [job(key=key, prompt=prompt, max_tokens=12, rules=rules, sampling=sampling) for key in clips]
        found = driver.run(*jobs)
        assert [one.tokens for one in found] == [greedy(whisper, encoded[key], prompt, 12) for key in clips]
        watched = [weakref.ref(layer.matrix) for layer in packed_layers(driver.executor)]
        driver.executor.sleep(keep_weights=True)
        assert driver.executor.memory().by_owner["parked_weights"] == held
        driver.executor.wake()
        assert driver.executor.memory().by_owner["weights"] == held
    driver.executor.close()
    gc.collect()
    assert [reference for reference in watched if reference() is not None] == []
    assert driver.executor.released.kept == {}


def test_a_head_of_its_own_is_packed_without_a_table(open_driver, save, make, tmp_path):
    model = make(seed=6, tie_word_embeddings=False, **WIDE).half().float()
    layers = packed_layers(open_driver(save(tmp_path, model)).executor)
    assert [layer.table is None for layer in layers] == [False, True, True]


def test_in_other_dtypes_nothing_is_packed(open_driver, folder):
    assert packed_layers(open_driver(folder, dtype="bfloat16").executor) == []
