#!/bin/sh
# The certificates of the cluster in containers: `certificates COMMAND`. Each directory of /tls is a volume that one
# service sees as /tls: `authority` is that of this program, `admin` holds the user root, `client` and `spark` a client,
# all others are named after their servers.
#
#   make     make what is missing        renew   new keys and certificates
#   add, issue, drop                     replace the authority, step by step
#   check    what is wrong, or ends soon
set -eu
cd /tls
user=10001
ca=authority

identities() { find . -mindepth 2 -name identity.pem ! -path "./$ca/*" | sort; }

make_missing() {
    [ -e "$ca/ca.pem" ] || koinon certs ca "$ca"
    for directory in *; do
        file=$directory/identity.pem
        if [ "$directory" = "$ca" ] || [ -e "$file" ]; then
            continue
        fi
        case "$directory" in
            admin) koinon certs user root --ca "$ca" --out "$file" ;;
            client | spark) koinon certs client --ca "$ca" --out "$file" ;;
            coordinator-*) koinon certs coordinator "$directory" --ca "$ca" --out "$file" ;;
            node-*) koinon certs node "$directory" --ca "$ca" --out "$file" ;;
        esac
        owner=$user
        [ "$directory" = client ] && owner=65534 # Prometheus, whose image runs as nobody
        chown "$owner" "$file" "$directory"
    done
}

case "${1:-make}" in
    make) make_missing ;;
    renew) identities | xargs koinon certs renew --ca "$ca" ;;
    add | issue | drop) identities | xargs koinon certs rotate-ca "$1" --ca "$ca" ;;
    check) identities | xargs koinon certs check "$ca" ;;
    *)
        echo "certificates: make, renew, add, issue, drop or check, not $1" >&2
        exit 2
        ;;
esac
