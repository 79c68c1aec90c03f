#!/usr/bin/env bash
# In a checkout: COMFYUI_PATH=… bash benchmarks/card/pack.sh
# Makes the folder .kit, about 12 MB and ignored by git, for a machine with a GPU and no network: ComfyUI's source, the
# wheels that a machine with only torch lacks, and the committed state of the checkout.
set -euo pipefail
comfyui=${COMFYUI_PATH:?names the ComfyUI to pack}; python=${PYTHON:-python3}
rm -rf .kit && mkdir -p .kit/wheels && cp "$(dirname "$0")/run.sh" .kit/
platforms=()
for p in 2_28 2_27 2_17; do platforms+=(--platform "manylinux_${p}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64)
get() {
  "$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp -d .kit/wheels "$@"
}
version() { sed -n "s/^$1==//p" "$comfyui/requirements.txt"; }
get "${platforms[@]}" torchsde trampoline "comfy-aimdo==$(version comfy-aimdo)"
get --platform any "comfy-kitchen==$(version comfy-kitchen)"  # the pure wheel, without compiled kernels
# main.py is what a ComfyUI is known by. The node API is there for core's trainer alone.
tar -C "$comfyui" -czf .kit/comfyui.tar.gz --exclude='__pycache__' --exclude='*.pyc' \
  comfy comfy_api comfy_extras comfy_execution comfy_config app utils folder_paths.py comfyui_version.py \
  node_helpers.py nodes.py execution.py latent_preview.py protocol.py cuda_malloc.py main.py
git archive HEAD ':!workflows' ':!tests/data' | gzip > .kit/tessera.tar.gz
du -sh .kit
