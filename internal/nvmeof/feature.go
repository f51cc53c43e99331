package nvmeof

import (
	"maps"

	"jbofd/internal/nvme"
)

// features are the values that a host has set on its controller.
type features struct {
	arbitration, power, writeAtomicity uint32
	temperature                        [2]uint32 // over, under
	asyncEvents                        uint32
	behavior                           nvme.HostBehavior
	timestampMS                        uint64
	timestampAtNS                      int64
	timestampSet                       bool
	errorRecovery                      perNamespace
	// errorOnDelete is nvme.KVErrorOnDelete or 0, for namespaces of keys and values.
	errorOnDelete perNamespace
	// extensions are the extensions of jbofd that were granted: nvme.Ext bits.
	extensions uint32
}

// perNamespace is a feature's value for each namespace.
type perNamespace struct {
	// of holds values by NSID, others the value of namespaces that are not in of.
	others uint32
	of     map[uint32]uint32
}

func (p *perNamespace) set(nsid, v uint32) {
	if nsid == nvme.NSIDBroadcast {
		p.others, p.of = v, nil
		return
	}
	if p.of == nil {
		p.of = map[uint32]uint32{}
	}
	p.of[nsid] = v
}

func (p *perNamespace) get(nsid uint32) uint32 {
	if v, ok := p.of[nsid]; ok {
		return v
	}
	return p.others
}

func (p *perNamespace) clone() perNamespace { return perNamespace{p.others, maps.Clone(p.of)} }

// Defaults: temperature thresholds in kelvin, the over threshold at WCTEMP.
const (
	defaultOverKelvin  = 343
	defaultUnderKelvin = 0
)

func (f *features) init() {
	*f = features{temperature: [2]uint32{defaultOverKelvin, defaultUnderKelvin}}
}

// featureBytes is the size of a feature's data structure; 0 if the feature's value is in the command itself.
func featureBytes(fid uint8, sqe *nvme.SQE) uint32 {
	switch fid {
	case nvme.FIDTimestamp:
		return 8
	case nvme.FIDHostBehavior:
		return 512
	case nvme.FIDHostIdentifier:
		if sqe.Opcode() == nvme.AdminGetFeatures {
			return 16
		}
	}
	return 0
}

// capabilities returns what Get Features with SEL 3 reports of a feature; ok is false if the controller does not have
// it.
func (c *Controller) capabilities(fid uint8) (bits uint32, ok bool) {
	if c.Discovery {
		switch fid {
		case nvme.FIDAsyncEvent, nvme.FIDKeepAlive:
			return nvme.FeatureChangeable, true
		case nvme.FIDHostIdentifier:
			return 0, true
		}
		return 0, false
	}
	switch fid {
	case nvme.FIDArbitration, nvme.FIDPowerManagement, nvme.FIDTemperatureThreshold, nvme.FIDNumberOfQueues,
		nvme.FIDWriteAtomicity, nvme.FIDAsyncEvent, nvme.FIDKeepAlive, nvme.FIDTimestamp, nvme.FIDHostBehavior,
		nvme.FIDExtensions:
		return nvme.FeatureChangeable, true
	case nvme.FIDErrorRecovery, nvme.FIDKeyValue:
		return nvme.FeatureChangeable | nvme.FeatureNSSpecific, true
	case nvme.FIDVolatileWriteCache, nvme.FIDIOCommandSetProfile, nvme.FIDHostIdentifier:
		return 0, true
	}
	return 0, false
}

// setFeatures executes Set Features (NVMe Base 2.0, section 5.27).
func (c *Controller) setFeatures(now int64, a AdminArgs) Reply {
	s := a.SQE.Features()
	caps, ok := c.capabilities(s.FID())
	switch {
	case !ok:
		return fail(nvme.InvalidField)
	case s.SV():
		return fail(nvme.FeatureNotSaveable)
	}
	if nsid := a.SQE.NSID(); caps&nvme.FeatureNSSpecific == 0 {
		if nsid != 0 && nsid != nvme.NSIDBroadcast {
			return fail(nvme.FeatureNotNamespaceSpecific)
		}
	} else if nsid != nvme.NSIDBroadcast && c.table.Get(nsid) == nil {
		return fail(nvme.InvalidNamespaceOrFormat)
	}
	v := s.Value()
	f := &c.features
	switch s.FID() {
	case nvme.FIDArbitration:
		f.arbitration = v
	case nvme.FIDPowerManagement:
		if v&0x1f != 0 { // only power state 0 exists
			return fail(nvme.InvalidField)
		}
		f.power = v
	case nvme.FIDTemperatureThreshold:
		sensor, kind := v>>16&0xf, v>>20&3
		if kind > 1 || sensor > 0 && sensor != 0xf {
			return fail(nvme.InvalidField)
		}
		f.temperature[kind] = v & 0xffff
	case nvme.FIDErrorRecovery:
		if v&nvme.ErrorRecoveryDULBE != 0 { // NSFEAT says no
			return fail(nvme.InvalidField)
		}
		f.errorRecovery.set(a.SQE.NSID(), v)
	case nvme.FIDKeyValue:
		return c.setKeyValue(a.SQE.NSID(), v)
	case nvme.FIDVolatileWriteCache:
		if v&nvme.VolatileWriteCacheWCE == 0 {
			return fail(nvme.FeatureNotChangeable)
		}
	case nvme.FIDNumberOfQueues:
		for qid := range c.queues {
			if qid != 0 {
				return fail(nvme.CommandSequenceError)
			}
		}
		if v&0xffff == 0xffff || v>>16 == 0xffff {
			return fail(nvme.InvalidField)
		}
		sqs, cqs := nvme.ParseNumberOfQueues(v)
		c.ioQueues = min(sqs, cqs, c.t.cfg.MaxIOQueues)
		return Reply{Result: uint64(nvme.NumberOfQueues(uint16(c.ioQueues), uint16(c.ioQueues)))}
	case nvme.FIDWriteAtomicity:
		f.writeAtomicity = v & nvme.WriteAtomicityDN
	case nvme.FIDAsyncEvent:
		f.asyncEvents = v
	case nvme.FIDTimestamp:
		f.timestampMS, f.timestampAtNS, f.timestampSet = (*nvme.Timestamp)(a.Data).UnixMS(), now, true
	case nvme.FIDKeepAlive:
		c.setKATO(v)
		return Reply{Result: uint64(c.katoMS)}
	case nvme.FIDHostBehavior:
		b := (*nvme.HostBehavior)(a.Data)
		if b.Check() != nil {
			return fail(nvme.InvalidField)
		}
		f.behavior = *b
	case nvme.FIDIOCommandSetProfile:
		if v&0x1ff != 0 {
			return fail(nvme.InvalidIOCommandSet)
		}
	case nvme.FIDHostIdentifier: // came with Connect
		return fail(nvme.CommandSequenceError)
	case nvme.FIDExtensions:
		return c.setExtensions(v & c.extensions())
	}
	return Reply{}
}

// extensions are the extensions that the controller offers.
func (c *Controller) extensions() uint32 {
	bits := uint32(nvme.ExtCredits | nvme.ExtKV)
	if c.node {
		bits |= nvme.ExtReplication
	}
	if c.clusterMap() != nil {
		bits |= nvme.ExtClusterMap
	}
	return bits
}

// setExtensions puts the granted extensions in force. With credits the reply carries the first one: the credit at the
// lowest SSD that the host has a namespace on.
func (c *Controller) setExtensions(granted uint32) Reply {
	was := c.CreditState()
	c.features.extensions = granted
	c.creditsChanged(was)
	if c.table.extendedKV != (granted&nvme.ExtKV != 0) || c.table.replication != (granted&nvme.ExtReplication != 0) {
		c.t.version++
		c.table = c.view()
		c.publishTable()
	}
	r := Reply{Result: uint64(granted)}
	if c.CreditState().On {
		r.CreditSSD, r.Credit = c.table.lowestSSD()
	}
	return r
}

// CreditState says whether a controller's completions carry credits. Of two states that with the higher Version counts.
type CreditState struct {
	On      bool
	Version uint64
}

// CreditState returns the state in force.
func (c *Controller) CreditState() CreditState {
	return CreditState{On: c.features.extensions&nvme.ExtCredits != 0, Version: c.creditVersion}
}

// creditsChanged tells the controller's queues whether credits are on, if that differs from was.
func (c *Controller) creditsChanged(was CreditState) {
	if c.CreditState().On == was.On {
		return
	}
	c.creditVersion++
	for _, qid := range c.sortedQIDs() {
		c.t.act(Action{Kind: ActionCredits, Conn: c.queues[qid], Credits: c.CreditState()})
	}
}

// getFeatures executes Get Features (NVMe Base 2.0, section 5.15).
func (c *Controller) getFeatures(now int64, a AdminArgs) Reply {
	g := a.SQE.Features()
	caps, ok := c.capabilities(g.FID())
	if !ok {
		return fail(nvme.InvalidField)
	}
	if nsid := a.SQE.NSID(); caps&nvme.FeatureNSSpecific != 0 && nsid != nvme.NSIDBroadcast &&
		c.table.Get(nsid) == nil {
		return fail(nvme.InvalidNamespaceOrFormat)
	}
	if g.FID() == nvme.FIDHostIdentifier && g.SEL() != nvme.SELSupported && g.Value()&nvme.HostIdentifierEXHID == 0 {
		return fail(nvme.InvalidField) // over fabrics, host identifiers have 128 bits
	}
	f := c.features
	switch g.SEL() {
	case nvme.SELCurrent:
	case nvme.SELDefault, nvme.SELSaved: // nothing is saved: the default
		f.init()
	case nvme.SELSupported:
		return Reply{Result: uint64(caps)}
	default:
		return fail(nvme.InvalidField)
	}
	r := Reply{Len: int(featureBytes(g.FID(), a.SQE))}
	switch g.FID() {
	case nvme.FIDArbitration:
		r.Result = uint64(f.arbitration)
	case nvme.FIDPowerManagement:
		r.Result = uint64(f.power)
	case nvme.FIDTemperatureThreshold:
		kind := g.Value() >> 20 & 3
		if kind > 1 || g.Value()>>16&0xf != 0 { // the composite temperature only
			return fail(nvme.InvalidField)
		}
		r.Result = uint64(f.temperature[kind])
	case nvme.FIDErrorRecovery:
		r.Result = uint64(f.errorRecovery.get(a.SQE.NSID()))
	case nvme.FIDKeyValue:
		if !c.keyValue(a.SQE.NSID()) {
			return fail(nvme.InvalidField)
		}
		r.Result = uint64(f.errorOnDelete.get(a.SQE.NSID()))
	case nvme.FIDVolatileWriteCache:
		r.Result = nvme.VolatileWriteCacheWCE
	case nvme.FIDNumberOfQueues:
		n := c.ioQueues
		if g.SEL() != nvme.SELCurrent {
			n = c.t.cfg.MaxIOQueues
		}
		r.Result = uint64(nvme.NumberOfQueues(uint16(n), uint16(n)))
	case nvme.FIDWriteAtomicity:
		r.Result = uint64(f.writeAtomicity)
	case nvme.FIDAsyncEvent:
		r.Result = uint64(f.asyncEvents)
	case nvme.FIDKeepAlive:
		if g.SEL() == nvme.SELCurrent {
			r.Result = uint64(c.katoMS)
		}
	case nvme.FIDTimestamp:
		ts := (*nvme.Timestamp)(a.Data)
		*ts = nvme.Timestamp{}
		ms, since := uint64(c.t.cfg.WallMS), int64(0)
		if f.timestampSet {
			ms, since = f.timestampMS, f.timestampAtNS
			ts.SetOrigin(nvme.TimestampFromHost)
		}
		ts.SetUnixMS((ms + uint64((now-since)/1e6)) & nvme.MaxTimestampMS)
	case nvme.FIDHostBehavior:
		*(*nvme.HostBehavior)(a.Data) = f.behavior
	case nvme.FIDHostIdentifier:
		copy(a.Data, c.HostID[:])
	case nvme.FIDExtensions:
		r.Result = uint64(f.extensions)
		if f.extensions&nvme.ExtCredits != 0 {
			r.CreditSSD = int(g.Value() & 0xffff)
			r.Credit = c.table.uses(r.CreditSSD)
		}
	}
	return r
}
