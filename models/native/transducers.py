"""The prediction and joint networks of transducers (Graves 2012) as one program of the native library: it feeds tokens
to some sequences, and scores frames of all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .library import ACTIVATIONS, Ending
from .panels import Panels
from .parts import PackedEmbedding, PackedLinear, is_known, pack_linears, scale_of
from .program import Program

_LSTM = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")  # the weights of a layer


class PackedLSTM(nn.Module):
    """A replacement for an `nn.LSTM`, of which torch computes nothing: the matrices of each layer's gates, for its
    inputs and for its hidden state."""

    def __init__(self, lstm: nn.LSTM, *, int8: bool) -> None:
        super().__init__()
        self.inputs, self.states = nn.ModuleList(), nn.ModuleList()
        for layer in range(lstm.num_layers):
            inputs, states, *biases = (getattr(lstm, f"{name}_l{layer}").detach() for name in _LSTM)
            for found, weight, bias in ((self.inputs, inputs, sum(biases)), (self.states, states, None)):
                panels = Panels.of(weight, bias, dtype=torch.int8 if int8 else None)
                found.append(PackedLinear(panels, 0, len(weight)))


def unknown_transducer(module: Any) -> str | None:
    """The reason why the library cannot compute the prediction and joint networks of ``module``; ``None``: it can."""
    decoder, joint = getattr(module, "decoder", None), getattr(module, "joint", None)
    if decoder is None or joint is None:
        return "it has no prediction network"
    lstm, linears = decoder.lstm, (decoder.decoder_projector, joint.head)
    if (
        type(lstm) not in {nn.LSTM, PackedLSTM}
        or not all(map(is_known, linears))
        or scale_of(decoder.embedding) is None
    ):
        return "the parts of its prediction network are not torch's"
    if module.config.hidden_act not in ACTIVATIONS:
        return f"the activation of its joint network is {module.config.hidden_act}; known: {', '.join(ACTIVATIONS)}"
    return None


def pack_transducer(module: Any, *, int8: bool) -> None:
    """Replaces the matrices of the prediction and joint networks by packed ones."""
    decoder = module.decoder
    table = Panels.of(decoder.embedding.weight.detach(), dtype=torch.int8 if int8 else None)
    decoder.embedding, decoder.lstm = PackedEmbedding(table, 1.0, torch.float32), PackedLSTM(decoder.lstm, int8=int8)
    pack_linears(decoder, ("decoder_projector",), int8=int8)
    pack_linears(module.joint, ("head",), int8=int8)


def transducer_program(module: Any) -> Program:
    """Writes the program of a packed ``module``. The step's rows are frames of encoder outputs, a chunk has those of a
    sequence, and its state the layers' hidden and cell states [layers, 2, width]. Of wanted rows, the token is fed to
    the prediction network before. The program ends with the scores of all rows."""
    program, decoder, head = Program(), module.decoder, module.joint.head.panels()
    width = decoder.decoder_projector.in_features
    frames, rows, gates, hidden = (program.buffer(size) for size in (width, width, 4 * width, width))
    program.look_up(rows, decoder.embedding.panels(), 1.0, wanted=True)
    for inputs, states in zip(decoder.lstm.inputs, decoder.lstm.states, strict=True):
        place = program.add_state(2 * width)
        program.recall(hidden, place, width, wanted=True)
        program.linear(rows, gates, inputs.panels(), Ending.STORE, wanted=True)
        program.linear(hidden, gates, states.panels(), Ending.ADD, wanted=True)
        program.lstm(gates, rows, place, width)
    program.recall(hidden, place, width)
    activation = ACTIVATIONS[module.config.hidden_act]
    program.linear(hidden, frames, decoder.decoder_projector.panels(), Ending.ADD_ACTIVATED, activation=activation)
    program.linear(frames, program.buffer(head.outputs), head, Ending.STORE)
    return program
