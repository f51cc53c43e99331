#!/bin/sh
# Gives the interrupts of each drive that jbofd drives itself to a processor of its own, in turns if there are more
# drives. Those of the network adapter are where its driver has put them. Install as /usr/lib/jbofd/interrupts.sh.
# irqbalance, if it runs, changes that again.
set -eu
awk -v cpus="$(nproc)" '
match($0, /vfio-msix\[[0-9]+\]\([0-9a-f:.]+\)/) {
	name = substr($0, RSTART, RLENGTH)
	drive = substr(name, index(name, "("))
	if (!(drive in number)) number[drive] = drives++
	print $1 + 0, number[drive] % cpus
}' /proc/interrupts | while read -r irq cpu; do
	echo "$cpu" > "/proc/irq/$irq/smp_affinity_list"
done
