package main

import (
	"fmt"
	"io"
	"net"
	"strings"

	"jbofd/internal/admin"
	"jbofd/internal/config"
	"jbofd/internal/daemon"
)

// printAddresses prints what to type on a Linux host to use the node, for the person who has started it. reasons say
// why the node is not ready, if it is not.
func printAddresses(w io.Writer, cfg *config.Config, a daemon.Addresses, reasons []admin.Reason) {
	hint := func(address string) (ip, port string) {
		ip, port, _ = net.SplitHostPort(address)
		if p := net.ParseIP(ip); p == nil || p.IsUnspecified() {
			ip = "ADDRESS-OF-THIS-BOX"
		}
		return ip, port
	}
	if len(reasons) == 0 {
		fmt.Fprint(w, "\njbofd is ready. ")
	} else {
		fmt.Fprintln(w, "\njbofd serves, but is not ready:")
		for _, r := range reasons {
			fmt.Fprintf(w, "  %s: %s\n", r.Component, r.Reason)
		}
	}
	fmt.Fprintln(w, "On a Linux host with nvme-cli (modprobe nvme-tcp, or nvme-rdma):")
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
	if cfg.Admin.Socket != "" {
		fmt.Fprintf(w, "Status: jbofctl --socket %s status\n", cfg.Admin.Socket)
	}
	if a.Metrics != "" {
		fmt.Fprintf(w, "Metrics: http://%s/metrics\n", a.Metrics)
	}
	fmt.Fprintln(w)
}
