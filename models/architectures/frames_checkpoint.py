"""Reads the checkpoint of a CTC model or transducer, except the weights."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen

from ...core.emissions import Emissions
from ..checkpoints.files import file_stamps
from ..checkpoints.loading import read_tokenizer
from ..checkpoints.modules import ModuleCheckpoint
from ..checkpoints.settings import FileSettings
from .frame_family import FrameFamily, find_frame_family
from .text_checkpoint import check_float_weights, read_transformers_config


@frozen(kw_only=True)
class FrameCheckpoint(ModuleCheckpoint):
    """The facts in the files of a CTC model or transducer, apart from the weights."""

    family: FrameFamily = field(repr=False)
    emissions: Emissions
    allowed: str = field(default="CTC models and transducers of transformers", repr=False)


def read_frame_checkpoint(plain: FileSettings) -> FrameCheckpoint | None:
    """Reads everything but the weights of the checkpoint whose config.json is ``plain``; ``None``: it is no CTC model
    or transducer.

    Raises:
        CheckpointError: a file is missing or damaged.
        UnsupportedModel: the checkpoint asks for something that the engine does not do.
    """
    folder = plain.path.parent
    family = find_frame_family(folder, plain.values)
    if family is None:
        return None
    stamps, config = file_stamps(folder), read_transformers_config(plain)
    check_float_weights(plain)
    emissions = family.emissions(folder, config)
    return FrameCheckpoint(
        folder=folder,
        architecture=family.loader,
        family=family,
        emissions=emissions,
        config=config,
        shape=family.shape(folder, config),
        tokenizer=_ungrouped(read_tokenizer(folder, config)),
        eos_token_ids=(emissions.blank,),
        stamps=stamps,
    )


def _ungrouped(tokenizer: Any) -> Any:
    """Returns ``tokenizer`` without transformers' decoding of CTC labels, which would join tokens that were emitted
    twice."""
    if type(tokenizer).__name__ == "ParakeetTokenizer":
        tokenizer.__class__ = type(tokenizer).__base__
    return tokenizer
