#!/usr/bin/env bash
# Run every test in two calls of pytest: those that need one core, two at a time; then those that start Ray or vLLM or measure time, one by one.
# Each test is in exactly one of them. Ends with the closing line of each call, and with a status of 0 only when both ended so.
# Arguments are passed on to both, e.g. `scripts/test.sh tests/replay`. Plain `pytest` runs everything one by one.
set -uo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE  # hundreds of processes import the project here: compile it once
alone="ray or vllm or alone"
said=$(mktemp -d)
trap 'rm -rf "$said"' EXIT
call() {
    .venv/bin/python -m pytest "${@:2}" | tee "$said/$1"
    local status=$?
    [ "$status" -ne 5 ] || status=0  # no test of this kind among the chosen ones
    return "$status"
}

call "two at a time" -n 2 --dist loadfile --no-loadscope-reorder -m "not ($alone)" "$@"
first=$?
[ "$first" -ne 2 ] || exit 2  # interrupted
call "one by one" -m "$alone" "$@"
second=$?
for name in "two at a time" "one by one"; do
    echo "$name: $(tail -n 1 "$said/$name")"
done
exit $((first > second ? first : second))
