//go:build vm

package vm

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// otherHost is a host that is not the guest's own.
const (
	otherHostNQN = "nqn.2014-08.org.nvmexpress:uuid:11111111-0b6e-4b1c-9d0c-0123456789ab"
	otherHostID  = "11111111-0b6e-4b1c-9d0c-0123456789ab"
	asOtherHost  = "-q " + otherHostNQN + " -I " + otherHostID
)

const discoveryNQN = "nqn.2014-08.org.nvmexpress.discovery"

var discoveryScenarios = []scenario{
	{"discovery answers on its own port and on those of the subsystems", func(h *host) {
		s := oneSubsystem("mem")
		s.Subsystems = append(s.Subsystems,
			Subsystem{NQN: nqnB, Namespaces: []Namespace{{NSID: 1, SSD: "ssd0", Size: "32MiB", BlockSize: 4096}}})
		d := h.daemon(s)
		for _, a := range []address{d.discoveryAddress(), d.ioAddress(), d.secondAddress()} {
			for _, flags := range []string{"", "-g -G"} {
				log := h.discover(a, flags)
				for _, nqn := range []string{nqnA, nqnB} {
					entries := log.entries(nqn)
					if len(entries) != 2 {
						h.Errorf("discovery on port %d %s names %s %d times, want once for each listener: %+v", a.port,
							flags, nqn, len(entries), log)
					}
					ports := map[string]bool{}
					for _, e := range entries {
						ports[strings.TrimSpace(e.TrSvcID)] = true
						if e.TrType != "tcp" || e.AdrFam != "ipv4" || e.SubType != "nvme subsystem" {
							h.Errorf("entry of %s: %+v", nqn, e)
						}
					}
					if !ports[strconv.Itoa(d.at.io)] || !ports[strconv.Itoa(d.at.second)] {
						h.Errorf("ports of %s: %v", nqn, ports)
					}
				}
			}
		}
	}},
	{"a host discovers only what it may connect to", func(h *host) {
		s := oneSubsystem("mem")
		s.Subsystems[0].Hosts = []string{HostNQN}
		d := h.daemon(s)
		if len(h.discover(d.discoveryAddress(), "").entries(nqnA)) == 0 {
			h.Errorf("the allowed host does not discover %s", nqnA)
		}
		if log := h.discover(d.discoveryAddress(), asOtherHost); len(log.entries(nqnA)) > 0 {
			h.Errorf("a host that is not allowed discovers %s: %+v", nqnA, log)
		}
	}},
	{"a host that is not allowed is told so and cannot connect until it is", func(h *host) {
		s := oneSubsystem("mem")
		s.Subsystems[0].Hosts = []string{HostNQN}
		d := h.daemon(s)
		h.connect(d.ioAddress(), nqnA, "")
		h.disconnect(nqnA)
		m := h.guest.Mark()
		h.fails(".", "nvme connect %s -n %s %s", d.ioAddress().flags(), nqnA, asOtherHost)
		if _, err := h.guest.WaitConsole(m, 5*time.Second,
			regexp.MustCompile(`Connect for subsystem `+nqnA+` is not allowed, hostnqn: `+otherHostNQN)); err != nil {
			h.Error(err)
		}
		s.Subsystems[0].Hosts = append(s.Subsystems[0].Hosts, otherHostNQN)
		h.reload(d, s)
		h.must(10*time.Second, "the host that is allowed now connects", func() error {
			if r := h.try(30*time.Second, "nvme connect %s -n %s %s", d.ioAddress().flags(), nqnA,
				asOtherHost); r.Code != 0 {
				return fmt.Errorf("%v", r)
			}
			return nil
		})
		h.device(nqnA, 1)
	}},
	{"connecting to a subsystem that does not exist names the wrong field", func(h *host) {
		d := h.daemon(oneSubsystem("mem"))
		m := h.guest.Mark()
		h.fails(".", "nvme connect %s -n nqn.2026-11.example.jbofd:nosuch", d.ioAddress().flags())
		if _, err := h.guest.WaitConsole(m, 5*time.Second,
			regexp.MustCompile(
				`Connect Invalid Data Parameter, subsysnqn "nqn.2026-11.example.jbofd:nosuch"`)); err != nil {
			h.Error(err)
		}
		// The discovery listener serves only discovery, or subsystems, too. A Connect to a subsystem there must not
		// leave a half-made controller.
		h.try(30*time.Second, "nvme connect %s -n %s", d.discoveryAddress().flags(), nqnA)
	}},
	{"connect-all connects to everything that discovery names", func(h *host) {
		s := oneSubsystem("mem")
		s.Subsystems = append(s.Subsystems,
			Subsystem{NQN: nqnB, Namespaces: []Namespace{{NSID: 1, SSD: "ssd0", Size: "32MiB", BlockSize: 4096}}})
		d := h.daemon(s)
		// Seen from the daemon the guest comes from loopback, so discovery names 127.0.0.1; in the guest that address
		// leads to the daemon too.
		for _, port := range []int{d.at.io, d.at.second} {
			proxy := h.start(5*time.Minute, "nc -ll -p %d -e nc %s %d", port, HostAddress, port)
			defer proxy.Kill()
			h.must(10*time.Second, "the way from the guest's loopback is open", func() error {
				if r := h.try(10*time.Second, "netstat -ltn | grep -q ':%d '", port); r.Code != 0 {
					return fmt.Errorf("nothing listens")
				}
				return nil
			})
		}
		h.run("nvme connect-all %s", d.discoveryAddress().flags())
		h.device(nqnA, 1)
		h.device(nqnA, 2)
		h.device(nqnB, 1)
		h.matches("nvme list-subsys", nqnA, nqnB, "live")
	}},
	{"a persistent discovery controller hears of changes", func(h *host) {
		s := oneSubsystem("mem")
		d := h.daemon(s)
		listener := h.start(5*time.Minute, `uevent /bin/sh -c 'env >> /tmp/uevents'`)
		defer listener.Kill()
		h.runJSON(&discoveryLog{}, "nvme discover %s --persistent -k 5 -o json", d.discoveryAddress().flags())
		ctrl := strings.TrimSpace(h.run(
			`cd /sys/class/nvme; for c in nvme*; do [ "$(cat $c/subsysnqn)" = %s ] && echo $c; done`, discoveryNQN))
		if ctrl == "" {
			h.Fatal("no discovery controller is left")
		}
		h.waitLive(ctrl, 10*time.Second)
		var before, after discoveryLog
		h.runJSON(&before, "nvme discover -d %s -o json", ctrl)
		h.run("> /tmp/uevents")
		s.Subsystems = append(s.Subsystems,
			Subsystem{NQN: nqnB, Namespaces: []Namespace{{NSID: 1, SSD: "ssd0", Size: "32MiB", BlockSize: 4096}}})
		h.reload(d, s)
		h.must(20*time.Second, "the kernel reports the discovery log change event", func() error {
			if r := h.try(10*time.Second, "grep -i NVME_AEN=0x70f002 /tmp/uevents"); r.Code != 0 {
				return fmt.Errorf("no such uevent")
			}
			return nil
		})
		h.runJSON(&after, "nvme discover -d %s -o json", ctrl)
		if len(after.entries(nqnB)) == 0 {
			h.Errorf("the log of the persistent controller names no %s: %+v", nqnB, after)
		}
		if after.GenCtr <= before.GenCtr {
			h.Errorf("generation counter was %d, is %d", before.GenCtr, after.GenCtr)
		}
		// Two keep alive periods later it is still there.
		was := h.try(10*time.Second, "cat /proc/uptime").Stdout
		h.must(30*time.Second, "more than two keep alive periods have passed", func() error {
			return uptimeAdvanced(was, h.try(10*time.Second, "cat /proc/uptime").Stdout, 12)
		})
		if s := h.state(ctrl); s != "live" {
			h.Errorf("the idle discovery controller is %s", s)
		}
		h.run("nvme disconnect -d %s", ctrl)
	}},
}

// uptimeAdvanced compares two readings of /proc/uptime.
func uptimeAdvanced(was, is string, seconds float64) error {
	var a, b float64
	if _, err := fmt.Sscan(was, &a); err != nil {
		return err
	}
	if _, err := fmt.Sscan(is, &b); err != nil {
		return err
	}
	if b-a < seconds {
		return fmt.Errorf("%.1f s", b-a)
	}
	return nil
}

// discoveryLog is what nvme discover -o json prints.
type discoveryLog struct {
	GenCtr  int64            `json:"genctr"`
	Records []discoveryEntry `json:"records"`
}

type discoveryEntry struct {
	TrType  string `json:"trtype"`
	AdrFam  string `json:"adrfam"`
	SubType string `json:"subtype"`
	TrSvcID string `json:"trsvcid"`
	TrAddr  string `json:"traddr"`
	SubNQN  string `json:"subnqn"`
}

// entries are those of a subsystem.
func (l discoveryLog) entries(nqn string) []discoveryEntry {
	var found []discoveryEntry
	for _, e := range l.Records {
		if e.SubNQN == nqn {
			found = append(found, e)
		}
	}
	return found
}

// discover reads the discovery log over a connection of its own.
func (h *host) discover(a address, flags string) discoveryLog {
	h.Helper()
	var log discoveryLog
	out := h.run("nvme discover %s %s -o json", a.flags(), flags)
	if strings.Contains(out, "No discovery log entries") {
		return log
	}
	if err := json.Unmarshal([]byte(out), &log); err != nil {
		h.Fatalf("nvme discover: %v in\n%s", err, out)
	}
	return log
}
