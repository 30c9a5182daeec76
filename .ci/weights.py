"""Makes the files of `models/weights` from those of the packages that publish them; a file that holds the same is kept:

python .ci/weights.py silero_vad/data/silero_vad.jit resemblyzer/pretrained.pt
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = Path(__file__).parents[1] / "models" / "weights"


def silero(path: str) -> dict[str, torch.Tensor]:
    """The network for 16 kHz that the package runs by default, in float32."""
    tensors = torch.jit.load(path).state_dict()
    return {name.removeprefix("_model."): value for name, value in tensors.items() if name.startswith("_model.")}


def resemblyzer(path: str) -> dict[str, torch.Tensor]:
    """The network without what only its training needs, in float16."""
    tensors = torch.load(path, map_location="cpu", weights_only=True)["model_state"]
    return {name: value.half() for name, value in tensors.items() if name.startswith(("lstm.", "linear."))}


def main() -> None:
    for read, path in zip((silero, resemblyzer), sys.argv[1:], strict=False):
        made, file = (
            {name: value.clone() for name, value in read(path).items()},
            WEIGHTS / f"{read.__name__}.safetensors",
        )
        held = load_file(file) if file.exists() else {}
        if held.keys() == made.keys() and all(torch.equal(held[name], made[name]) for name in made):
            print(f"{file.name} holds what {path} does")
        else:
            save_file(made, file)
            print(f"{file.name} is new, made of {path}")


if __name__ == "__main__":
    main()
