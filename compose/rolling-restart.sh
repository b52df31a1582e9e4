#!/bin/sh
# Restart every coordinator and node, one after the other, while clients go on. Each is stopped (SIGTERM:
# it hands over first) and started again. The next one follows once the cluster says that all is well.
# Nodes come first, the coordinators' leader last.
#
#   ./rolling-restart.sh [--recreate] [OPTIONS OF docker compose, such as --file or --project-name]
#
# With compose.tls.yaml, say KOINON_TLS=1: the cluster is then asked by the service `admin`.
# A container whose image or settings have changed is created anew; with --recreate every container is.
set -eu
cd "$(dirname "$0")"

patience=${KOINON_PATIENCE:-180} # seconds for one server to be back and the cluster to be well
recreate=
if [ "${1:-}" = --recreate ]; then
    recreate=--force-recreate
    shift
fi
options=$*

compose() {
    # shellcheck disable=SC2086 # options without spaces in them
    if [ -n "${COMPOSE:-}" ]; then
        $COMPOSE $options "$@"
    elif docker compose version >/dev/null 2>&1; then
        docker compose $options "$@"
    else
        docker-compose $options "$@"
    fi
}

# Prints the status as one line of JSON, by a coordinator other than $1.
status() {
    if [ -n "${KOINON_TLS:-}" ]; then
        administer status --json 2>/dev/null
        return
    fi
    for asked in $coordinators; do
        if [ "$asked" != "$1" ]; then
            compose exec -T "$asked" koinon admin status --json 2>/dev/null && return
        fi
    done
    return 1
}

administer() {
    compose run --rm --no-deps -T admin admin "$@"
}

quietly() { # COMMAND...: show its output only if it fails
    said=$("$@" 2>&1) || {
        echo "$said" >&2
        exit 1
    }
}

wait_until() { # WHAT COMMAND...
    what=$1
    shift
    until "$@" >/dev/null 2>&1; do
        if [ "$(date +%s)" -gt "$deadline" ]; then
            echo "not within $patience s: $what; nothing further is restarted" >&2
            exit 1
        fi
        sleep 1
    done
}

is_well() {
    status "$1" | grep -q '"ok": *true'
}

serves() {
    case "$1" in
        coordinator-*) port=7400 ;;
        *) port=7500 ;;
    esac
    compose exec -T "$1" koinon-health "127.0.0.1:$port"
}

servers=$(compose config --services | grep -E '^(coordinator|node)-' | sort)
nodes=$(echo "$servers" | grep '^node-')
coordinators=$(echo "$servers" | grep '^coordinator-')

deadline=$(($(date +%s) + patience))
wait_until "the cluster is well before anything is restarted" is_well ""
leader=$(status "" | sed -E 's/.*"leader_id": *"([^"]*)".*/\1/')
others=$(echo "$coordinators" | grep -vx "$leader")

for server in $nodes $others $leader; do
    began=$(date +%s)
    deadline=$((began + patience))
    quietly compose stop "$server"
    quietly compose up --detach --no-deps $recreate "$server"
    wait_until "$server serves" serves "$server"
    wait_until "the cluster is well without $server's old process" is_well "$server"
    echo "$server restarted, all is well after $(($(date +%s) - began)) s"
done
if [ -n "${KOINON_TLS:-}" ]; then
    administer primaries
else
    compose exec -T "$(echo "$coordinators" | head -n 1)" koinon admin primaries
fi
