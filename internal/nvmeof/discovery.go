package nvmeof

import (
	"net/netip"
	"slices"

	"jbofd/internal/nvme"
)

// discoveryView is what a discovery controller's host sees of the state of one version of the target. It is made at the
// first read of the log: hosts read the log in many small pieces, and a host may be named in thousands of subsystems.
type discoveryView struct {
	version uint64
	// current are the ports that answer discovery as the host's own does, io those that lead to subsystems.
	current, io []Port
	// subsystems are those that the host may use, by their place in State.Subsystems.
	subsystems []int32
	referrals  []Port
}

// discoveryView returns the view of the state in force.
func (c *Controller) discoveryView() *discoveryView {
	t, v := c.t, c.discovery
	if v != nil && v.version == t.version {
		return v
	}
	v = &discoveryView{version: t.version, referrals: t.state.Referrals}
	for _, p := range t.state.Ports {
		// Every port answers discovery with the same information.
		if p.Discovery || p.ID == c.port.ID {
			v.current = append(v.current, p)
		}
		if !p.Discovery {
			v.io = append(v.io, p)
		}
	}
	for i := range t.state.Subsystems {
		if t.subs[t.state.Subsystems[i].NQN].refusal(c.HostNQN, c.from) == "" {
			v.subsystems = append(v.subsystems, int32(i))
		}
	}
	v.subsystems = slices.Clip(v.subsystems)
	c.discovery = v
	return v
}

// records is how many entries the log has.
func (v *discoveryView) records() int {
	return len(v.current) + len(v.subsystems)*len(v.io) + len(v.referrals)
}

// discoveryRecord makes entry k of the log: first the discovery service itself, then every way to every subsystem that
// the host may use, then referrals.
func (c *Controller) discoveryRecord(v *discoveryView, k int) nvme.DiscoveryEntry {
	if k < len(v.current) {
		return c.discoveryEntry(v.current[k], nvme.SUBTYPEDiscoveryCurrent, nvme.DiscoveryNQN,
			nvme.DiscoveryEflagDUPRETINFO|nvme.DiscoveryEflagEPCSD)
	}
	k -= len(v.current)
	if n := len(v.subsystems) * len(v.io); k >= n {
		r := v.referrals[k-n]
		return c.discoveryEntry(r, nvme.SUBTYPEDiscovery, r.NQN, 0)
	}
	sub := &c.t.state.Subsystems[v.subsystems[k/len(v.io)]]
	return c.discoveryEntry(v.io[k%len(v.io)], nvme.SUBTYPENVM, sub.NQN, 0)
}

// discoveryEntry makes the entry of one port.
func (c *Controller) discoveryEntry(p Port, subtype uint8, nqn string, eflags uint16) (e nvme.DiscoveryEntry) {
	if p.Wildcard {
		p.Address = c.localAddress
		// What listens on every address takes both families.
		if ip, err := netip.ParseAddr(p.Address); err == nil && ip.Is6() {
			p.ADRFAM = nvme.ADRFAMIPv6
		} else if err == nil {
			p.ADRFAM = nvme.ADRFAMIPv4
		}
	}
	e.SetTRTYPE(p.TRTYPE)
	e.SetADRFAM(p.ADRFAM)
	if p.TRTYPE == nvme.TRTYPERDMA {
		e.SetTSASRDMA(nvme.RDMAConnected, nvme.RDMAProviderUnspecified, nvme.RDMACM)
	}
	e.SetSUBTYPE(subtype)
	e.SetTREQ(nvme.TREQDisableSQFlow)
	e.SetPORTID(p.ID)
	e.SetCNTLID(nvme.CNTLIDDynamic)
	e.SetASQSZ(nvme.MinASQSZ)
	e.SetEFLAGS(eflags)
	e.SetTRSVCID(p.Service)
	e.SetSubNQN(nqn)
	e.SetTRADDR(p.Address)
	return e
}

// discoveryLog writes the part of the Discovery Log Page that begins at byte from into dst, and zeroes behind the end
// of the page. It reports false if from lies beyond that end. The cost depends on len(dst) and not on the page's size.
//
// Source: NVMe Base 2.0, section 5.16.1.23.
func (c *Controller) discoveryLog(dst []byte, from uint64) bool {
	v := c.discoveryView()
	end := uint64(nvme.DiscoveryHeaderSize + v.records()*len(nvme.DiscoveryEntry{}))
	if from > end {
		return false
	}
	for len(dst) > 0 && from < end {
		var n int
		if from < nvme.DiscoveryHeaderSize {
			var h nvme.DiscoveryHeader
			h.SetGENCTR(c.t.genctr)
			h.SetNUMREC(uint64(v.records()))
			n = copy(dst, h[from:])
		} else {
			at := from - nvme.DiscoveryHeaderSize
			e := c.discoveryRecord(v, int(at/uint64(len(nvme.DiscoveryEntry{}))))
			n = copy(dst, e[at%uint64(len(e)):])
		}
		dst, from = dst[n:], from+uint64(n)
	}
	clear(dst)
	return true
}
