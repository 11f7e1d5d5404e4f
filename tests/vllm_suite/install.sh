#!/usr/bin/env bash
# Installs vLLM's own tests and the models they ask for: install.sh DIR (where tests/e2e/install.sh put vLLM)
# The tests come from vLLM's source distribution. It is unpacked, never built, and never committed.
set -euo pipefail
dir=${1:?usage: install.sh DIR}/suite; here=$(cd "$(dirname "$0")" && pwd)
python="$1/vllm/bin/python"; version=0.32.0
mkdir -p "$dir"

if [ ! -e "$dir/src/tests" ]; then
  work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
  # pip asks a source distribution for its version before it keeps it: these answer, and nothing is compiled.
  "$python" -m pip install --quiet --target "$work/build" setuptools setuptools-rust setuptools-scm wheel 2>/dev/null
  PYTHONPATH="$work/build" VLLM_VERSION_OVERRIDE=$version VLLM_TARGET_DEVICE=empty "$python" -m pip download \
    --quiet --no-deps --no-binary :all: --no-build-isolation --dest "$work" "vllm==$version"
  tar xzf "$work/vllm-$version.tar.gz" -C "$work" "vllm-$version/tests" "vllm-$version/pyproject.toml"
  rm -rf "$dir/src" && mv "$work/vllm-$version" "$dir/src"
fi

# Beside vLLM's environment, so that the e2e tests see it as it is.
if [ ! -e "$dir/packages/.done" ]; then
  "$python" -m pip install --quiet --no-deps --target "$dir/packages" pytest pytest-asyncio pytest-timeout iniconfig pluggy \
    tblib sentence-transformers scikit-learn scipy joblib threadpoolctl narwhals
  touch "$dir/packages/.done"
fi
HF_HUB_OFFLINE=1 "$python" "$here/hub.py" "$dir/hf"
