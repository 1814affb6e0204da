#!/bin/sh
# Writes a deployment's key into the file $1, unless there is one: readable by its owner only.
set -eu
umask 077
if [ ! -s "$1" ]; then
    python -I -c 'import secrets; print(secrets.token_hex(32))' > "$1.new"
    mv "$1.new" "$1"
fi
