#!/usr/bin/env bash
# bash .kit/run.sh [ARGUMENTS OF dev.py card]: on a machine with a GPU and nothing but a recent torch and transformers.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd); scratch=${TMPDIR:-/tmp}/tessera-kit; python=${PYTHON:-python3}
rm -rf "$scratch" && mkdir -p "$scratch/comfyui" "$scratch/pack"
"$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$scratch/site" "$here"/wheels/*.whl
# ComfyUI's server wants the folders of these packages, and nothing in them.
mkdir -p "$scratch"/site/{comfyui_frontend_package/static,comfyui_workflow_templates/templates,comfyui_embedded_docs/docs}
touch "$scratch/site/comfyui_frontend_package/static/index.html"
tar -xzf "$here/comfyui.tar.gz" -C "$scratch/comfyui"
tar -xzf "$here/tessera.tar.gz" -C "$scratch/pack"
PYTHONPATH=$scratch/site exec "$python" "$scratch/pack/dev.py" card --comfyui "$scratch/comfyui" "$@"
