#!/bin/sh
# Make a file of readings and load it, all of it or none; KOINON_SAMPLE_ROWS says how many.
set -eu
rows=${KOINON_SAMPLE_ROWS:-200000}
file=$(mktemp -d)/readings.csv
awk -v rows="$rows" 'BEGIN {
    print "reading,sensor,celsius"
    for (n = 1; n <= rows; n++) printf "%09d,s%03d,%.1f\n", n, n % 200, (n * 7919 % 600) / 10 - 20
}' >"$file"
exec koinon ingest "$file" --key reading --encoding json
