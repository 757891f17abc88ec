#!/bin/sh
# The guest's network: hosts a and b with two NICs each, NIC a0 wired to b0 and a1 to b1, an RXE device on every one.
#
#   nics.sh setup         everything
#   nics.sh down NIC      takes the link of a NIC (a0, a1, b0, b1) down; the other end of the wire loses its carrier
#   nics.sh up NIC        and up again
#   nics.sh unplug NIC    takes the card out: link down, device gone
#   nics.sh plug NIC      puts a card in, which takes until no process has the device of the former one open, at most 20 s
#
#   NIC  interface  address       device  MTU             NIC  interface  address       device  MTU
#   a0   va0        10.10.0.1/24  rxe_a0  4096 (jumbo)    b0   vb0        10.10.0.2/24  rxe_b0  4096 (jumbo)
#   a1   va1        10.10.1.1/24  rxe_a1  1024            b1   vb1        10.10.1.2/24  rxe_b1  1024
#
# Both hosts share the guest's one network namespace, because rxe has its UDP socket and its route lookups in the initial
# namespace only (Linux 6.1 and well beyond). So that packets between them take the wire although both ends are local,
# routes by source and destination go before the local table, and sources that are own addresses are accepted. A TCP
# socket takes the wire too once it is bound to the address of its NIC; unbound ones go through lo.
set -eu

# prints ip's commands; what the kernel forgets when a link goes down
wire() { # NIC
    case $1 in
    a[01]) peer=b here=1 there=2 ;;
    b[01]) peer=a here=2 there=1 ;;
    *) echo "nics.sh: there are a0, a1, b0 and b1, no $1" >&2 && exit 2 ;;
    esac
    rail=${1#?}
    echo "link set v$1 up"
    echo "neigh replace 10.10.$rail.$there lladdr 02:00:0a:0a:0$rail:0$there dev v$1 nud permanent"
    echo "route replace 10.10.$rail.$there/32 dev v$1 src 10.10.$rail.$here table 10$rail$here"
}

wires() {
    echo 'link set lo up'
    echo 'rule add pref 1000 lookup local'
    echo 'rule del pref 0'
    for rail in 0 1; do
        echo "link add va$rail mtu $((9000 - 7500 * rail)) address 02:00:0a:0a:0$rail:01 type veth peer" \
            "name vb$rail mtu $((9000 - 7500 * rail)) address 02:00:0a:0a:0$rail:02"
        echo "address add 10.10.$rail.1/24 dev va$rail"
        echo "address add 10.10.$rail.2/24 dev vb$rail"
        echo "rule add pref 100 iif lo from 10.10.$rail.1 to 10.10.$rail.2 lookup 10${rail}1"
        echo "rule add pref 100 iif lo from 10.10.$rail.2 to 10.10.$rail.1 lookup 10${rail}2"
        echo "link set va$rail up" # both ends before the routes, which want a carrier
        wire "b$rail"
        wire "a$rail"
    done
}

case $1 in
setup)
    echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter
    echo 0 >/proc/sys/net/ipv4/conf/default/rp_filter
    echo 1 >/proc/sys/net/ipv4/conf/all/accept_local
    wires | ip -batch -
    for nic in a0 a1 b0 b1; do echo "link add rxe_$nic type rxe netdev v$nic"; done | rdma -b -
    ;;
down) ip link set "v$2" down ;;
up) wire "$2" | ip -batch - ;;
unplug)
    ip link set "v$2" down
    # The device leaves the list at once, but queue pairs that are open would go on working if the link were up, and
    # the command ends only when the last process has closed the device.
    rdma link delete "rxe_$2" >/dev/null 2>&1 &
    ;;
plug)
    tries=100
    until said=$(rdma link add "rxe_$2" type rxe netdev "v$2" 2>&1); do
        tries=$((tries - 1))
        [ "$tries" -gt 0 ] || { echo "nics.sh: cannot add rxe_$2: $said" >&2 && exit 1; }
        sleep 0.2
    done
    wire "$2" | ip -batch -
    ;;
*) echo "nics.sh: setup, down NIC, up NIC, unplug NIC or plug NIC" >&2 && exit 2 ;;
esac
