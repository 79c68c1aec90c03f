#!/usr/bin/env bash
# In a checkout: COMFYUI_PATH=… bash benchmarks/card/pack.sh
# Makes the folder .kit, about 55 MB and ignored by git, for a machine with a GPU and no network: ComfyUI's source, the
# wheels that a machine with only torch and transformers lacks, and the committed state of the checkout.
# KIT_PYTHON is the version of Python on that machine, 3.12 if it is not set.
set -euo pipefail
comfyui=${COMFYUI_PATH:?names the ComfyUI to pack}; python=${PYTHON:-python3}; version=${KIT_PYTHON:-3.12}
here=$(cd "$(dirname "$0")" && pwd)
rm -rf .kit && mkdir -p .kit/wheels && cp "$here/run.sh" .kit/
platforms=()
for p in 2_28 2_27 2_24 2_17; do platforms+=(--platform "manylinux_${p}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64)
get() {
  "$python" -m pip download -q --no-deps --only-binary=:all: --python-version "$version" --implementation cp -d .kit/wheels "$@"
}
asked() { sed -n "s/^$1==//p" "$comfyui/requirements.txt"; }
get "${platforms[@]}" -r "$here/wheels.txt" "comfy-aimdo==$(asked comfy-aimdo)"
get --platform any "comfy-kitchen==$(asked comfy-kitchen)"  # the pure wheel, without compiled kernels
# Without the frontend and the tests. run.sh makes empty folders in place of the frontend's packages.
tar -C "$comfyui" -czf .kit/comfyui.tar.gz --exclude='__pycache__' --exclude='*.pyc' --exclude='./models/*/*' \
  --exclude='./tests' --exclude='./tests-unit' --exclude='./script_examples' --exclude='./blueprints' \
  --exclude='./output' --exclude='./temp' --exclude='./user' --exclude='./custom_nodes/?*' --exclude='./.*' .
git archive HEAD ':(exclude,glob)workflows/*' ':!tests/data' ':!docs/pictures' | gzip > .kit/tessera.tar.gz
du -sh .kit
