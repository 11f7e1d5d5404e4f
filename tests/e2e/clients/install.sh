#!/usr/bin/env bash
# Installs all that tests/e2e/test_clients.py drives: install.sh DIR
# The libraries go into DIR. A JDK and Chromium take longer than CI has, and come from Debian.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
bash "$here/../install.sh" "${1:?usage: install.sh DIR}" clients

missing=()
command -v javac >/dev/null || missing+=(openjdk-17-jdk-headless)
command -v chromium >/dev/null || missing+=(chromium)
command -v curl >/dev/null || missing+=(curl)
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
  else
    echo "not installed, so their tests are skipped: ${missing[*]}" >&2
  fi
fi
