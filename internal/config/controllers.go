package config

import (
	"net/netip"
	"strconv"
	"strings"

	"jbofd/internal/nvme"
	"jbofd/internal/ssd/vfio/pci"
)

// controller checks what names the NVMe controller of a drive.
func (v *validator) controller(path string, s SSD, addresses *unique, given func(key string) bool) {
	at, nsid := join(path, "address"), join(path, "nsid")
	if s.Backend != "nvme" {
		if s.Address != "" {
			v.complain(at, "%q, but backend %s has none; allowed: leave it out", s.Address, s.Backend)
		}
		if given("nsid") && s.NSID != 0 && s.Backend != "spdk" {
			v.complain(nsid, "%d, but backend %s has none; allowed: leave it out", s.NSID, s.Backend)
		}
		return
	}
	if !v.ok(at) {
		return
	}
	if s.Address == "" {
		v.complain(at, "missing; backend nvme needs it: the PCI address of a controller, as 0000:03:00.0")
		return
	}
	a, err := pci.Parse(s.Address)
	if err != nil {
		v.complain(at, "%q is no PCI address; allowed: domain:bus:device.function, as 0000:03:00.0", s.Address)
		return
	}
	addresses.add(at, a)
}

// transport checks what names a controller that SPDK's driver reaches.
func (v *validator) transport(path string, s SSD, addresses *unique, given func(key string) bool) {
	remote := s.Backend == "spdk" && s.TrType != "pcie"
	for _, k := range []struct {
		key, value, unset string
		has               bool
	}{
		{"trtype", s.TrType, "pcie", s.Backend == "spdk"}, {"traddr", s.TrAddr, "", s.Backend == "spdk"},
		{"trsvcid", s.TrSvcID, "4420", remote}, {"subnqn", s.SubNQN, "", remote}, {"hostnqn", s.HostNQN, "", remote},
	} {
		switch p := join(path, k.key); {
		case k.has || !v.ok(p) || !given(k.key) || k.value == k.unset:
		case s.Backend == "spdk":
			v.complain(p, "%q, but a controller on the PCI bus has none; allowed: leave it out", k.value)
		default:
			v.complain(p, "%q, but backend %s has none; allowed: leave it out", k.value, s.Backend)
		}
	}
	if s.Backend != "spdk" {
		return
	}
	for _, k := range []string{"trtype", "traddr", "trsvcid", "subnqn", "hostnqn"} {
		if !v.ok(join(path, k)) {
			return
		}
	}
	at := join(path, "traddr")
	if !remote {
		a, err := pci.Parse(s.TrAddr)
		switch {
		case s.TrAddr == "":
			v.complain(at, "missing; trtype pcie needs it: the PCI address of a controller, as 0000:03:00.0")
		case err != nil:
			v.complain(at, "%q is no PCI address; allowed: domain:bus:device.function, as 0000:03:00.0", s.TrAddr)
		default:
			addresses.add(at, a)
		}
		return
	}
	if _, err := netip.ParseAddr(s.TrAddr); err != nil {
		v.complain(at, "%q is no IP address; allowed: that of a target, as 192.0.2.1 or 2001:db8::1", s.TrAddr)
	}
	if n, err := strconv.ParseUint(s.TrSvcID, 10, 16); err != nil || n == 0 {
		v.complain(join(path, "trsvcid"), "%q is no port; allowed: 1 to 65535", s.TrSvcID)
	}
	if s.SubNQN == "" {
		v.complain(join(path, "subnqn"), "missing; trtype %s needs it: the NQN of the target's subsystem", s.TrType)
	}
	for _, k := range [][2]string{{"subnqn", s.SubNQN}, {"hostnqn", s.HostNQN}} {
		key, nqn := k[0], k[1]
		if nqn != "" && (nvme.CheckNQN(nqn) != nil || !printable(nqn) || strings.Contains(nqn, " ")) {
			v.complain(join(path, key), "%q is no NQN; allowed: nqn.YYYY-MM.reverse.domain:text, without spaces", nqn)
		}
	}
}
