// Package vm boots Debian's kernels in QEMU. It uses the NVMe/TCP and NVMe/RDMA hosts against a real jbofd: the host
// that most users have, with the tools they type (nvme-cli, fio, mkfs.ext4, fstrim), on a machine that needs neither
// KVM nor root.
//
//	┌ QEMU, software emulation ────────────────┐        ┌ this machine ───────────────┐
//	│ Linux 6.1: nvme-tcp, ext4, virtio_net    │  slirp │ jbofd on 127.0.0.1:port     │
//	│   10.0.2.15 ──────────> 10.0.2.2:port ───┼────────┼──> started, killed, HUPed   │
//	│ guestinit (PID 1) <── virtio-serial ─────┼────────┼──  by the scenarios         │
//	│ kernel log ──────────> serial console ───┼────────┼──> watched for oopses       │
//	└──────────────────────────────────────────┘        └─────────────────────────────┘
//
// For RDMA there is no such way out of the guest, so jbofd is in it, too, with the libraries that it needs:
//
//	┌ QEMU ─────────────────────────────────────────────────────────────────────────┐
//	│ nvme-rdma, jbofbench ── rxe1 (10.77.0.2) ══ veth ══ rxe0 (10.77.0.1) ── jbofd │
//	└───────────────────────────────────────────────────────────────────────────────┘
//
// The daemon's metrics come out over slirp, its log over virtio-serial.
//
// An arm64 guest is a JBOF: jbofd, NVMe drives behind an IOMMU, and tests that depend on the architecture are in it;
// the hosts are on this machine.
//
// Soft RoCE says nothing about speed. The tests check that data arrives in both directions and that nothing is left
// behind.
//
// How it is put together:
//   - needs.go says which tools are missing and which Debian package brings each.
//   - platform.go has the machines that QEMU emulates: a PC, and one of arm64 that is like a JBOF's.
//   - debian.go downloads and unpacks their kernels (they are never installed); kernel.go resolves modules.
//   - initramfs.go packs guestinit, busybox, the modules, the tools and their shared libraries into a cpio archive.
//   - guest.go boots it and runs commands in it over a channel of JSON lines (package guestproto).
//   - daemon.go starts, kills, freezes, reloads and stops jbofd; site.go does so on this machine or in the guest, so
//     that scenarios are written once.
//   - rdmaguest.go connects the virtual cable of an RDMA guest, cuts it, and counts RDMA objects.
//   - The scenarios are in files tagged vm: `make test-vm`, or `go test -tags vm -count=1 -v -timeout 30m ./test/vm`.
//
// Environment:
//   - JBOFD_VM_CACHE: folder of the unpacked kernel; by default .cache beside this file.
//   - JBOFD_VM_JBOFD: a jbofd binary to test over TCP instead of building ./cmd/jbofd.
//   - JBOFD_VM_KEEP: a folder in which the consoles and the daemons' logs are left.
package vm
