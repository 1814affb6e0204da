#!/bin/sh
# `docker run IMAGE up` and `docker run IMAGE tgi-orchestrator up` are the same.
if [ "${1:-}" = tgi-orchestrator ]; then shift; fi
exec tgi-orchestrator "$@"
