#!/bin/sh
# Examines nano-vllm's scheduler at the commits given, or at those of the table in docs/check_your_scheduler.md. It needs
# git, and a Python with triolet-kit, numpy and xxhash:
#
#   pip install ./kit numpy xxhash
#   packages/kit/adapters/reproduce.sh
#
# NANO_VLLM names another repository or folder to clone, PYTHON another Python, WORKLOADS another number than 1000.
set -eu
adapters=$(cd "$(dirname "$0")" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
git clone --quiet --no-checkout "${NANO_VLLM:-https://github.com/GeeeekExplorer/nano-vllm}" "$folder/clone"
for commit in ${*:-8d63a98 77dd709 f64d821 bb823b3}; do
  # Only what the scheduler imports: the rest of the package needs a GPU's libraries.
  mkdir "$folder/$commit"
  git -C "$folder/clone" archive "$commit" nanovllm/engine nanovllm/sampling_params.py | tar -x -C "$folder/$commit"
  echo 'Config = object' >"$folder/$commit/nanovllm/config.py"  # a type hint; the real one imports transformers
  echo "== nano-vllm $commit"
  PYTHONPATH="$folder/$commit:$adapters" "${PYTHON:-python}" - "${WORKLOADS:-1000}" <<'END'
import sys

from nano_vllm import DECLARED, NanoVllm
from triolet_kit import examine_scheduler

print(examine_scheduler(NanoVllm, DECLARED, workloads=int(sys.argv[1])))
END
done
