#!/bin/busybox sh
# Process 1 of the soft-RoCE guest: the host's files, read-only under a layer of memory, then one command, then off.
# The command, its output and its exit status pass through a folder of the host, mounted on /run/share.
export PATH=/bin
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev

setting() { sed -n "s/.*pinyon\.$1=\([^ ]*\).*/\1/p" /proc/cmdline; }

off() {
    echo "guest: off after $(cut -d ' ' -f 1 /proc/uptime) s: $*"
    poweroff -f
    sleep 60
}
# Whatever hangs below, the guest ends.
(sleep "$(setting deadline)" && off "deadline") &

while read -r module; do
    insmod "/modules/$module" || off "cannot load $module"
done </modules/order

p9=trans=virtio,version=9p2000.L,msize=1048576
mount -t 9p -o "$p9,ro,cache=loose" host /lower || off "no host files"
mount -t tmpfs upper /upper
mkdir /upper/files /upper/work
mount -t overlay -o lowerdir=/lower,upperdir=/upper/files,workdir=/upper/work host /host || off "no overlay"
mount -t proc proc /host/proc
mount -t sysfs sysfs /host/sys
mount -t devtmpfs dev /host/dev
mkdir -p /host/dev/pts /host/dev/shm
mount -t devpts devpts /host/dev/pts
mount -t tmpfs shm /host/dev/shm
mount -t tmpfs run /host/run
mkdir /host/run/share
mount -t 9p -o "$p9,cache=none" share /host/run/share || off "no share"
while read -r folder; do
    mount --bind "/fast$folder" "/host$folder" || off "cannot mount $folder"
done </fast/folders
echo "guest: up after $(cut -d ' ' -f 1 /proc/uptime) s"

ulimit -l unlimited
chroot /host /bin/sh /run/share/command >/host/run/share/output 2>&1 </dev/null
status=$?
# two steps: a host that sees the status sees all of it
echo "$status" >/host/run/share/status.part
mv /host/run/share/status.part /host/run/share/status
sync
off "status $status"
