#!/bin/sh
# A Docker engine for the tests, on a Debian or Ubuntu machine where nobody else provides one.
#
#   tools/docker_engine.sh [start]   do nothing if an engine answers; else install Docker and start dockerd by hand
#   tools/docker_engine.sh stop      end the dockerd that start started, and nothing else
#   tools/docker_engine.sh status    say what there is
#
# Exit status: 0 there is an engine (stop: nothing of ours runs any more), 1 status without an engine, 2 bad usage,
# 3 there is no way to have one, with the reason on one line. Every step is bounded in time.
#
#   PINYON_DOCKER_DATA   where dockerd keeps images (default /var/lib/docker)
#   PINYON_DOCKER_STATE  pid file and log of the dockerd started here (default /run/pinyon-docker)
set -u

data=${PINYON_DOCKER_DATA:-/var/lib/docker}
state=${PINYON_DOCKER_STATE:-/run/pinyon-docker}
pid_file=$state/dockerd.pid
log=$state/dockerd.log
install_s=300
start_s=60
stop_s=40

say() { printf 'docker_engine: %s\n' "$*" >&2; }
no_way() {
    say "no Docker engine: $*"
    exit 3
}

# the server's version; fails without a server
engine() { timeout 20 docker version --format '{{.Server.Version}}' 2>/dev/null; }

compose_there() { { timeout 20 docker compose version || timeout 20 docker-compose version; } >/dev/null 2>&1; }

# pid of the dockerd that start started, if it still is one
ours() {
    [ -r "$pid_file" ] || return 1
    pid=$(cat "$pid_file")
    [ -n "$pid" ] && [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = dockerd ] && echo "$pid"
}

apt() {
    timeout "$install_s" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=120 "$@" >>"$log" 2>&1
}

install() {
    [ "$(id -u)" -eq 0 ] || no_way "packages are missing and this is not root"
    command -v apt-get >/dev/null 2>&1 || no_way "packages are missing and there is no apt-get"
    say "installing Docker, at most $install_s s a step ..."
    apt update || say "apt-get update failed, going on with the lists that are there"
    if ! command -v dockerd >/dev/null 2>&1; then
        apt install -y --no-install-recommends docker.io iptables ||
            no_way "apt-get could not install docker.io: $(tail -n 1 "$log")"
    fi
    # the second name is Ubuntu's: its docker-compose 1.29 does not run on Python 3.12
    compose_there || apt install -y --no-install-recommends docker-compose-v2 ||
        apt install -y --no-install-recommends docker-compose ||
        no_way "apt-get could not install docker-compose: $(tail -n 1 "$log")"
}

start() {
    if version=$(engine); then
        compose_there || { mkdir -p "$state" && install; }
        say "an engine answers already (version $version)"
        return
    fi
    [ -z "${DOCKER_HOST:-}" ] || no_way "DOCKER_HOST=$DOCKER_HOST does not answer"
    [ "$(id -u)" -eq 0 ] || no_way "none answers and only root can start one"
    mkdir -p "$state" "$data" || no_way "cannot write $state and $data"
    : >"$log"
    { command -v dockerd >/dev/null 2>&1 && command -v docker >/dev/null 2>&1 && compose_there; } || install
    if engine >/dev/null; then # the package's own service came up
        say "the installed service runs"
        return
    fi
    if ! ours >/dev/null; then
        rm -f "$pid_file"
        # dockerd makes the machine drop what it forwards; stop undoes that
        iptables -S FORWARD 2>/dev/null | grep -q -- '-P FORWARD ACCEPT' && : >"$state/forwards"
        setsid dockerd --data-root "$data" --pidfile "$pid_file" --host unix:///var/run/docker.sock \
            >>"$log" 2>&1 </dev/null 3>&- 9>&- &
        daemon=$!
    else
        daemon=$(ours)
    fi
    say "waiting at most $start_s s for dockerd (log: $log) ..."
    waited=0
    until version=$(engine); do
        if ! kill -0 "$daemon" 2>/dev/null; then
            no_way "dockerd ended while starting: $(grep -v '^$' "$log" | tail -n 1)"
        fi
        if [ "$waited" -ge "$start_s" ]; then
            stop
            no_way "dockerd did not answer within $start_s s: $(tail -n 1 "$log")"
        fi
        sleep 1
        waited=$((waited + 1))
    done
    say "dockerd $version runs (pid $(ours), data in $data)"
}

stop() {
    if ! pid=$(ours); then
        say "no dockerd was started here"
        return
    fi
    kill -TERM "$pid" 2>/dev/null
    waited=0
    while kill -0 "$pid" 2>/dev/null; do
        if [ "$waited" -ge "$stop_s" ]; then
            say "dockerd (pid $pid) does not end within $stop_s s: killing it"
            kill -KILL "$pid" 2>/dev/null
            break
        fi
        sleep 1
        waited=$((waited + 1))
    done
    rm -f "$pid_file"
    if [ -e "$state/forwards" ]; then
        iptables -P FORWARD ACCEPT
        rm -f "$state/forwards"
    fi
    say "dockerd (pid $pid) ended"
}

status() {
    if version=$(engine); then
        if pid=$(ours); then
            say "dockerd $version, started here (pid $pid, log: $log)"
        else
            say "engine $version, not started here"
        fi
        compose_there || say "there is no docker compose and no docker-compose"
        return 0
    fi
    say "no engine answers"
    return 1
}

case ${1:-start} in
start) start ;;
stop) stop ;;
status) status ;;
*)
    say "usage: tools/docker_engine.sh [start|stop|status]"
    exit 2
    ;;
esac
