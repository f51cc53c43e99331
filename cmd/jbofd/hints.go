package main

import (
	"fmt"
	"io"
	"net"
	"strings"

	"jbofd/internal/config"
	"jbofd/internal/daemon"
)

// printAddresses prints what to type on a Linux host to use the node.
func printAddresses(w io.Writer, cfg *config.Config, a daemon.Addresses) {
	hint := func(address string) (ip, port string) {
		ip, port, _ = net.SplitHostPort(address)
		if p := net.ParseIP(ip); p == nil || p.IsUnspecified() {
			ip = "ADDRESS-OF-THIS-BOX"
		}
		return ip, port
	}
	fmt.Fprintln(w, "\njbofd is ready. On a Linux host with nvme-cli (modprobe nvme-tcp, or nvme-rdma):")
	if a.Discovery != "" {
		ip, port := hint(a.Discovery)
		fmt.Fprintf(w, "  nvme discover -t tcp -a %s -s %s\n", ip, port)
	}
	for _, l := range a.Listeners {
		transport := "tcp"
		if address, ok := strings.CutPrefix(l, "rdma://"); ok {
			transport, l = "rdma", address
		}
		ip, port := hint(l)
		for _, s := range cfg.Subsystems {
			fmt.Fprintf(w, "  nvme connect  -t %s -a %s -s %s -n %s\n", transport, ip, port, s.NQN)
		}
	}
	if a.Metrics != "" {
		fmt.Fprintf(w, "Metrics: http://%s/metrics\n", a.Metrics)
	}
	fmt.Fprintln(w)
}
