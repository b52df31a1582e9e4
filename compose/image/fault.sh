#!/bin/sh
# Disturb the network of the container whose network this one shares; `fault clear` ends all faults.
# Faults end with the container's network: a container that is started again has none.
set -eu

usage() {
    cat <<'TEXT'
fault loss PERCENT        drop that share of the packets that come in, at random
fault cut HOST...         neither send to these hosts nor hear them
fault slow RATE           send no more than this (1mbit, 500kbit)
fault delay TIME [JITTER] send later by so much (200ms 50ms); needs netem in the engine's kernel
fault show                what is set
fault clear               end all of it
TEXT
    exit 2
}

interfaces() {
    ip -o link show | sed -E 's/^[0-9]+: ([^:@]+).*/\1/' | grep -vx lo
}

# The rules are in a chain of their own, so that Docker's own rules (for its name server, too) stay.
chain() {
    iptables -N FAULTS 2>/dev/null || return 0
    iptables -I INPUT -j FAULTS
    iptables -I OUTPUT -j FAULTS
}

queue() {
    for interface in $(interfaces); do
        tc qdisc replace dev "$interface" root "$@"
    done
}

[ $# -ge 1 ] || usage
action=$1
shift
case "$action" in
    loss)
        [ $# -eq 1 ] || usage
        chain
        share=$(awk "BEGIN { print ${1%\%} / 100 }")
        for interface in $(interfaces); do
            iptables -A FAULTS -i "$interface" -m statistic --mode random --probability "$share" \
                -j DROP
        done
        ;;
    cut)
        [ $# -ge 1 ] || usage
        chain
        for host in "$@"; do
            address=$(getent ahostsv4 "$host" | awk 'NR == 1 { print $1 }')
            [ -n "$address" ] || { echo "fault: no address of $host is known" >&2; exit 1; }
            iptables -A FAULTS -s "$address" -j DROP
            iptables -A FAULTS -d "$address" -j DROP
        done
        ;;
    slow)
        [ $# -eq 1 ] || usage
        queue tbf rate "$1" burst 32kb latency 400ms
        ;;
    delay)
        [ $# -ge 1 ] || usage
        queue netem delay "$@"
        ;;
    show)
        tc qdisc show
        iptables -vnL FAULTS 2>/dev/null || true
        ;;
    clear)
        dropped=$(iptables -vxnL FAULTS 2>/dev/null | awk '$3 == "DROP" { n += $1 } END { print n + 0 }')
        for interface in $(interfaces); do
            tc qdisc del dev "$interface" root 2>/dev/null || true
        done
        iptables -F FAULTS 2>/dev/null || true
        echo "cleared; $dropped packets were dropped"
        ;;
    *) usage ;;
esac
