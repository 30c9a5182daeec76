"""Matrices in float16: packed where nothing is lost, multiplied as in float32, counted and given back."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from triolet.core.request import LogitRules, Probe, SamplingParams
from triolet.models.linear import packed as module
from triolet.models.linear.layers import PackedLinear
from triolet.models.linear.packed import PackedMatrix, Packer, is_available
from triolet.models.memory.resources import ResourceStack

from .conftest import greedy

pytestmark = pytest.mark.skipif(not is_available(), reason="this torch has no FBGEMM")

WIDE = {"d_model": 320, "encoder_attention_heads": 5, "decoder_attention_heads": 5, "decoder_ffn_dim": 300}


def matrix(outputs, inputs, *, spread=1.0, seed=0):
    """Values of float16, in float32."""
    make = torch.Generator().manual_seed(seed)
    return torch.randn(outputs, inputs, generator=make).mul_(spread).half().float()


def packed(weight):
    with Packer.open(2) as packer:
        return packer.pack(weight)


@settings(max_examples=30)
@given(
    size=st.sampled_from([(16, 260), (48, 300), (513, 270), (4097, 512), (9000, 260)]),
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


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="FBGEMM adds up one or two rows in another order"
)
@given(rows=st.integers(2, 40), seed=st.integers(0, 99))
def test_a_row_does_not_depend_on_the_others(rows, seed):
    """Bit for bit."""
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


def test_values_that_float32_hardly_holds_stay_as_they_are():
    assert packed(torch.full((16, 320), 1e-44)) is None


def test_a_matrix_of_zeros_is_packed():
    assert not bool(packed(torch.zeros(16, 320))(torch.ones(2, 320)).any())


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
    assert stack.bytes_by_owner() == {"weights": 112 * 512 * 2 + 12}
    assert stack.unowned([holder, packed(matrix(16, 320))]) != []
    kept = holder.held[0]
    assert stack.close().kept == {"weights": 112 * 512 * 2}
    del kept
    assert stack.bytes_by_owner() == {}


def test_an_error_while_packing_is_raised(monkeypatch):
    monkeypatch.setattr(PackedMatrix, "pack", lambda self, weight: 1 / 0)
    with pytest.raises(ZeroDivisionError), Packer.open(2) as packer:
        for _ in range(9):
            packer.pack(matrix(32, 320))


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


def test_whisper_whose_weights_are_packed_writes_transformers_tokens(
    open_driver, folder, whisper, features, job, audio, ids
):
    """Asleep its weights stay where they are; awake it writes the same."""
    driver = open_driver(folder)
    assert len(packed_layers(driver.executor)) == 3
    layers = whisper.config.encoder_layers
    assert len(driver.executor._open.main.model.linears()) == 4 * layers + 1  # the encoder's, and what writes a slot
    plain = sum(parameter.nbytes for parameter in whisper.parameters())
    held = driver.executor.memory().by_owner["weights"]
    assert held < 0.95 * plain  # the encoder is not packed, and the embedding is there as a table, too
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


def logits(model, features, audio, prompt):
    with torch.inference_mode():
        return model(features(audio), decoder_input_ids=torch.tensor([prompt])).logits[0, -1].log_softmax(-1)


@pytest.mark.parametrize("exponent", [-8, 0, 12])
@pytest.mark.parametrize("head", ["none", "equal", "own"])
def test_embeddings_and_heads_of_any_size_are_those_of_transformers(
    open_driver, save, make, job, audio, features, ids, tmp_path, exponent, head
):
    """An embedding in bfloat16, or a large one, is packed over a power of two; its rows are what they were. A head that
    equals the embedding takes no memory; with another one the embedding is not packed."""
    model = make(seed=6, tie_word_embeddings=head == "none", **WIDE).half().float()
    with torch.no_grad():
        embedding = model.model.decoder.embed_tokens.weight
        embedding.copy_(embedding.mul(2.0**exponent).bfloat16().clamp(-7e4, 7e4))
        embedding[embedding.abs() < 1e-3 * 2.0**exponent] = 0.0
        model.model.decoder.layer_norm.weight.mul_(2.0**-exponent)
        if head == "equal":
            model.proj_out.weight = torch.nn.Parameter(embedding.clone())
    driver = open_driver(save(tmp_path, model))
    decoder = driver.executor._open.main.model._decoder
    assert (decoder.head is decoder.tokens) == (head != "own")
    assert isinstance(decoder.head, PackedLinear)
    assert isinstance(decoder.tokens, PackedLinear) == (head != "own")
    assert decoder.tokens.rows(torch.arange(ids.vocabulary)).equal(embedding)
    driver.encode(a=audio(1))
    prompt, everything = (ids.start, ids.en, 65, 66), tuple(range(ids.vocabulary))
    (outcome,) = driver.run(job(key="a", prompt=prompt, probe=Probe(position=3, token_ids=everything), max_tokens=1))
    expected = logits(model, features, audio(1), prompt)
    torch.testing.assert_close(torch.tensor(outcome.probes[0]), expected, atol=1e-3, rtol=1e-4)


def test_with_another_engine_for_quantized_products_nothing_is_packed(monkeypatch):
    """FBGEMM packs for itself alone, and which engine packs is the process's setting."""
    monkeypatch.setattr(torch.backends.quantized, "engine", "onednn")
    assert packed(matrix(32, 320)) is None


def test_few_matrices_wait_for_their_packing(monkeypatch):
    """What waits is there in float32: before one more begins, those before it are packed."""
    monkeypatch.setattr(module, "_WAITING", 3 * 16 * 320 * 4)
    with Packer.open(1) as packer:
        for _ in range(20):
            packer.pack(matrix(16, 320))
            assert sum(count for _, count in packer._begun) <= 3 * 16 * 320 * 4
        packer.pack(matrix(64, 320))  # larger than what may wait
        assert len(packer._begun) == 1


def test_in_other_dtypes_nothing_is_packed(open_driver, folder):
    assert packed_layers(open_driver(folder, dtype="bfloat16").executor) == []
