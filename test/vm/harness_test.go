//go:build vm

package vm

import (
	"fmt"
	"os"
	"testing"
	"time"
)

const nvmetSetup = `set -e
cd /sys/kernel/config/nvmet
truncate -s 64M /tmp/disk.img
losetup /dev/loop0 /tmp/disk.img
mkdir subsystems/nqn.test
cd subsystems/nqn.test
echo 1 > attr_allow_any_host
mkdir namespaces/1
echo /dev/loop0 > namespaces/1/device_path
echo 1 > namespaces/1/enable
cd ../..
mkdir ports/1
cd ports/1
echo tcp > addr_trtype
echo ipv4 > addr_adrfam
echo 127.0.0.1 > addr_traddr
echo 4420 > addr_trsvcid
ln -s ../../subsystems/nqn.test subsystems/nqn.test
`

func TestX(t *testing.T) {
	if err := CheckNeeds(); err != nil {
		t.Fatal(err)
	}
	k, err := PrepareKernel(CacheDir())
	if err != nil {
		t.Fatal(err)
	}
	g, err := Boot(BootOptions{Kernel: k, Modules: append(append([]string{}, hostModules...), targetModules...), Dir: t.TempDir(), CPUs: 2, MemoryMiB: 1024, Timeout: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	f, _ := os.Create("/tmp/nvmet-facts.txt")
	for _, c := range []string{nvmetSetup, "dmesg -n 8; echo 8 > /proc/sys/kernel/printk; echo 'module nvme_tcp +p; module nvme_core +p; module nvme_fabrics +p; module nvmet +p; module nvmet_tcp +p' | tr ';' '\\n' > /sys/kernel/debug/dynamic_debug/control",
		"nvme discover -t tcp -a 127.0.0.1 -s 4420",
		"nvme connect -t tcp -n nqn.test -a 127.0.0.1 -s 4420 -i 4 -g -G",
		"i=0; while ! [ -b /dev/nvme0n1 ] && [ $i -lt 50 ]; do usleep 100000; i=$((i+1)); done; ls -la /dev/nvme*; nvme list -v; nvme list-subsys",
		"nvme id-ctrl /dev/nvme0 -v -H", "nvme id-ctrl /dev/nvme0 -o json", "nvme id-ctrl /dev/nvme0 -b | hexdump -C", "nvme id-ns /dev/nvme0n1 -v -H", "nvme id-ns /dev/nvme0n1 -b | hexdump -C",
		"nvme ns-descs /dev/nvme0n1", "nvme ns-descs /dev/nvme0n1 -b | hexdump -C", "nvme list-ns /dev/nvme0", "nvme list-ns /dev/nvme0 -a", "nvme smart-log /dev/nvme0 -H", "nvme error-log /dev/nvme0 -e 4", "nvme ana-log /dev/nvme0",
		"nvme effects-log /dev/nvme0 -H", "nvme fw-log /dev/nvme0", "nvme changed-ns-list-log /dev/nvme0", "nvme supported-log-pages /dev/nvme0", "nvme show-regs /dev/nvme0 -H",
		"for f in 1 2 3 4 5 6 7 8 9 0xa 0xb 0xc 0xe 0xf 0x10 0x16 0x18 0x80 0x81 0x82 0x83; do echo \"== FID $f\"; nvme get-feature /dev/nvme0 -f $f -H 2>&1; done",
		"nvme get-feature /dev/nvme0 -f 7 -s 3; nvme get-feature /dev/nvme0 -f 0xf -s 1;  nvme get-feature /dev/nvme0 -f 0xb -s 3",
		"for c in 0 1 2 3 5 6 7 8 0x10 0x11 0x12 0x13 0x14 0x15 0x16 0x17 0x1c; do echo \"== Identify CNS $c nsid 1\"; nvme admin-passthru /dev/nvme0 -o 6 --namespace-id=1 --cdw10=$c -l 4096 -r 2>&1 | head -12; done",
		"for c in 0 1 2 3 5 6 7 8 0x10 0x11 0x12 0x13 0x1c; do echo \"== Identify CNS $c nsid 0\"; nvme admin-passthru /dev/nvme0 -o 6 --namespace-id=0 --cdw10=$c -l 4096 -r 2>&1 | head -12; done",
		"nvme flush /dev/nvme0n1; nvme write-zeroes /dev/nvme0n1 -s 0 -c 7; nvme dsm /dev/nvme0n1 -d -s 0 -b 8; nvme verify /dev/nvme0n1 -s 0 -c 7; nvme compare /dev/nvme0n1 -s 0 -c 0 -z 512 -d /dev/zero; nvme read /dev/nvme0n1 -s 0xffffffff -c 0 -z 512; nvme write-uncor /dev/nvme0n1 -s 0 -c 0; nvme resv-report /dev/nvme0n1 -d 64",
		"nvme admin-passthru /dev/nvme0 -o 8 --cdw10=0x00050001; nvme admin-passthru /dev/nvme0 -o 0x7e; nvme ns-rescan /dev/nvme0; nvme reset /dev/nvme0; cat /sys/class/nvme/nvme0/state; nvme subsystem-reset /dev/nvme0",
		"cat /sys/class/nvme/nvme0/*  2>/dev/null; for f in /sys/block/nvme0n1/* /sys/block/nvme0n1/queue/*; do [ -f $f ] && echo \"$f: $(cat $f 2>/dev/null)\"; done",
		"nvme connect -t tcp -n nqn.nosuch -a 127.0.0.1 -s 4420; nvme connect -t tcp -n nqn.test -a 127.0.0.1 -s 4421; echo 0 > /sys/kernel/config/nvmet/subsystems/nqn.test/attr_allow_any_host; nvme connect -t tcp -n nqn.test -a 127.0.0.1 -s 4420 -q nqn.2014-08.org.nvmexpress:uuid:11111111-0b6e-4b1c-9d0c-0123456789ab -I 11111111-0b6e-4b1c-9d0c-0123456789ab",
		"nvme disconnect -n nqn.test",
	} {
		m := g.Mark()
		r, err := g.Do(60*time.Second, c)
		if err != nil {
			t.Log(r, err)
		}
		fmt.Fprintf(f, "%s\n", r)
		time.Sleep(300 * time.Millisecond)
		if s := g.ConsoleSince(m); s != "" {
			fmt.Fprintf(f, "--- dmesg meanwhile ---\n%s\n", s)
		}
		fmt.Fprintln(f)
	}
	f.Close()
}
