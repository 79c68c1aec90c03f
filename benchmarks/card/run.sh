#!/usr/bin/env bash
# bash run.sh [all|smoke|full|bench], out of .kit on a machine with a GPU, or in a checkout with COMFYUI_PATH set.
# About 9 minutes for all. What is printed goes to $OUT/log.txt too.
set -uo pipefail
what=${1:-all}
here=$(cd "$(dirname "$0")" && pwd)
scratch=${TMPDIR:-/tmp}
export OUT=${OUT:-$scratch/card-out}
mkdir -p "$OUT"
exec > >(tee -a "$OUT/log.txt") 2>&1
python=${PYTHON:-python3}
began=$(date +%s)
device=${DEVICE:-cuda}
limit=${LIMIT:-530}
left() { echo $((limit - $(date +%s) + began)); }
if [ -z "${COMFYUI_PATH:-}" ]; then
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$scratch/site" \
    "$here"/wheels/*.whl || exit 1
  mkdir -p "$scratch/comfyui" && tar -xzf "$here/comfyui.tar.gz" -C "$scratch/comfyui" || exit 1
  export COMFYUI_PATH=$scratch/comfyui PYTHONPATH=$scratch/site
fi
if [ -f "$here/tessera.tar.gz" ]; then
  project=$scratch/tessera
  mkdir -p "$project" && tar -xzf "$here/tessera.tar.gz" -C "$project" || exit 1
else
  project=$(cd "$here/../.." && pwd)
fi
card=$project/benchmarks/card
export PYTHONUNBUFFERED=1 TORCHINDUCTOR_CACHE_DIR=$scratch/inductor COMFYUI_PATH
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>/dev/null
if [ "$what" = all ] || [ "$what" = smoke ]; then
  "$python" "$card/probe.py" --device "$device" --limit 60
  "$python" "$card/smoke.py" --device "$device" --limit 190
  # ComfyUI sets the driver's allocator by itself on CUDA 13.
  PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync \
    "$python" "$card/smoke.py" --device "$device" --limit 40 --only "sample: compiled"
fi
if [ "$what" = all ] || [ "$what" = full ]; then
  "$python" "$card/full.py" --device "$device" ${SIZE:+--size $SIZE} --limit $(($(left) - 10))
fi
if [ "$what" = bench ]; then
  cd "$project" && timeout "$(left)" "$python" benchmarks/train_step.py --size full --device cuda \
    --contestants compiled --swap 50 100 --rounds 1 --steps 5 --json "$OUT/bench.json"
fi
echo "all: $(($(date +%s) - began)) s"
