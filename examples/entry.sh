#!/bin/sh
# Runs the command that its arguments are, and exits with 93 where countoff's verdict file says that a restart is useless;
# otherwise with the command's own code.
: "${COUNTOFF_VERDICT_FILE:=$(mktemp -d)/verdict.json}"
export COUNTOFF_VERDICT_FILE
rm -f "$COUNTOFF_VERDICT_FILE"

trap 'kill -TERM $!; wait $!; exit $?' TERM # the pod is deleted: the program may save a checkpoint
"$@" &
wait $!
code=$?

useless='import json, sys; sys.exit(json.load(open(sys.argv[1]))["restart"] != "useless")'
if [ "$code" -ne 0 ] && python3 -c "$useless" "$COUNTOFF_VERDICT_FILE" 2> /dev/null; then
    exit 93
fi
exit "$code"
