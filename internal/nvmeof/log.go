package nvmeof

import (
	"slices"

	"jbofd/internal/nvme"
)

// maxANAGroups is ANAGRPMAX: groups are numbered 1 to it.
const maxANAGroups = 32

// getLogPage executes Get Log Page (NVMe Base 2.0, section 5.16).
func (c *Controller) getLogPage(now int64, a AdminArgs) Reply {
	g := a.SQE.GetLog()
	if g.OT() || g.LPO()%4 != 0 {
		return fail(nvme.InvalidField)
	}
	var log []byte
	clears := events // none: not a valid event
	switch lid := g.LID(); {
	case lid == nvme.LIDSupported:
		log = c.supportedLogs()
	case lid == nvme.LIDDiscovery && c.Discovery:
		if !c.discoveryLog(a.Data, g.LPO()) {
			return fail(nvme.InvalidField)
		}
		c.logRead(g, eventDiscovery)
		return Reply{Len: len(a.Data)}
	case c.Discovery:
		return fail(nvme.InvalidLogPage)
	case lid == nvme.LIDError:
		log = c.errorLog()
	case lid == nvme.LIDSMART:
		if nsid := a.SQE.NSID(); nsid != 0 && nsid != nvme.NSIDBroadcast {
			return fail(nvme.InvalidField) // LPA: not per namespace
		}
		log = c.smartLog(now, a.Usage(c), a.Health)
	case lid == nvme.LIDFirmwareSlot:
		var l nvme.FirmwareSlotLog
		l.SetAFI(1)
		l.SetFRS(1, c.t.cfg.Firmware)
		log = l[:]
	case lid == nvme.LIDChangedNS:
		log, clears = c.changedLog(), eventNamespace
	case lid == nvme.LIDEffects:
		if !c.mayUseCommandSet(g.CSI()) {
			return fail(nvme.InvalidField)
		}
		log = effectsLog(g.CSI(), c.table)
	case lid == nvme.LIDANA:
		// Hosts read up to the size that Identify Controller lets them expect.
		log, clears = c.anaLog(g.LSP()&nvme.LSPANAGroupsOnly != 0), eventANA
	case lid == nvme.LIDClusterMap && c.clusterMap() != nil:
		log = c.clusterMap()
	default:
		return fail(nvme.InvalidLogPage)
	}
	if g.LPO() > uint64(len(log)) {
		return fail(nvme.InvalidField)
	}
	n := copy(a.Data, log[g.LPO():])
	clear(a.Data[n:])
	c.logRead(g, clears)
	return Reply{Len: len(a.Data)}
}

// logRead is called when a log page has been read: event e, which the page explains, may be reported again, unless the
// command says that the event is to be retained (RAE). e is events for a page that explains none.
func (c *Controller) logRead(g *nvme.GetLogSQE, e event) {
	if e == events || g.RAE() {
		return
	}
	c.clearEvent(e)
	if e == eventNamespace {
		clear(c.changed)
	}
}

// supportedLogs is the Supported Log Pages log.
func (c *Controller) supportedLogs() []byte {
	var l nvme.SupportedLogPages
	l.SetLID(nvme.LIDSupported, nvme.LIDSupportedBit)
	if c.Discovery {
		l.SetLID(nvme.LIDDiscovery, nvme.LIDSupportedBit)
		return l[:]
	}
	for _, lid := range []uint8{nvme.LIDError, nvme.LIDSMART, nvme.LIDFirmwareSlot, nvme.LIDChangedNS, nvme.LIDEffects,
		nvme.LIDANA} {
		l.SetLID(lid, nvme.LIDSupportedBit)
	}
	if c.clusterMap() != nil {
		l.SetLID(nvme.LIDClusterMap, nvme.LIDSupportedBit)
	}
	return l[:]
}

// errorLog is the Error Information log, newest first.
func (c *Controller) errorLog() []byte {
	log := make([]byte, 0, maxErrors*nvme.ErrorLogEntrySize)
	for i := len(c.errors) - 1; i >= 0; i-- {
		log = append(log, c.errors[i][:]...)
	}
	return log[:cap(log)]
}

// smartLog is the SMART / Health Information log. The counters of commands and errors are the controller's own, and the
// power-on hours are the time since now was 0, when the daemon started. The other fields are the worst that a drive of
// the host's namespaces says; they are zero if none says anything, as those of nvmet and of SPDK are.
func (c *Controller) smartLog(now int64, u Usage, health func(ssd int) (nvme.SMARTLog, bool)) []byte {
	var l nvme.SMARTLog
	if health != nil {
		first := true
		for _, ssd := range c.table.ssds() {
			if d, ok := health(ssd); ok {
				worsen(&l, &d, first)
				first = false
			}
		}
	}
	// Data units are thousands of 512 bytes, rounded up.
	units := func(b uint64) nvme.Uint128 { return nvme.U128((b + 511999) / 512000) }
	l.SetDataUnitsRead(units(u.ReadBytes))
	l.SetDataUnitsWritten(units(u.WrittenBytes))
	l.SetHostReads(nvme.U128(u.Reads))
	l.SetHostWrites(nvme.U128(u.Writes))
	l.SetMediaErrors(nvme.U128(u.MediaErrors))
	l.SetErrorLogEntries(nvme.U128(c.errorCount))
	l.SetPowerOnHours(nvme.U128(uint64(now / 3600e9)))
	return l[:]
}

// worsen makes l as bad as a drive's log where that is worse. first: l has nothing of a drive yet.
func worsen(l, d *nvme.SMARTLog, first bool) {
	l.SetCriticalWarning(l.CriticalWarning() | d.CriticalWarning())
	l.SetTemperature(max(l.Temperature(), d.Temperature()))
	margin := func(l *nvme.SMARTLog) int { return int(l.AvailableSpare()) - int(l.AvailableSpareThreshold()) }
	if first || margin(d) < margin(l) {
		l.SetAvailableSpare(d.AvailableSpare())
		l.SetAvailableSpareThreshold(d.AvailableSpareThreshold())
	}
	l.SetPercentageUsed(max(l.PercentageUsed(), d.PercentageUsed()))
	l.SetPowerCycles(most(l.PowerCycles(), d.PowerCycles()))
	l.SetUnsafeShutdowns(most(l.UnsafeShutdowns(), d.UnsafeShutdowns()))
	l.SetWarningTempTime(max(l.WarningTempTime(), d.WarningTempTime()))
	l.SetCriticalTempTime(max(l.CriticalTempTime(), d.CriticalTempTime()))
}

func most(a, b nvme.Uint128) nvme.Uint128 {
	if a.Hi < b.Hi || a.Hi == b.Hi && a.Lo < b.Lo {
		return b
	}
	return a
}

// changedLog is the Changed Namespace List; reading it without RAE empties it.
func (c *Controller) changedLog() []byte {
	var ids []uint32
	for nsid := uint32(1); nsid <= MaxNSID; nsid++ {
		if c.changed[nsid] {
			ids = append(ids, nsid)
		}
	}
	var l nvme.NSList
	l.FillChanged(ids)
	return l[:]
}

// effectsLog is the Commands Supported and Effects log for a command set, with the commands of the extensions that were
// granted to the host of a table.
func effectsLog(csi nvme.CSI, t *NamespaceTable) []byte {
	var l nvme.EffectsLog
	for _, op := range []uint8{nvme.AdminGetLogPage, nvme.AdminIdentify, nvme.AdminAbort, nvme.AdminSetFeatures,
		nvme.AdminGetFeatures, nvme.AdminAsyncEvent, nvme.AdminKeepAlive} {
		l.SetAdmin(op, nvme.EffectSupported)
	}
	reads, writes := []uint8{nvme.CmdFlush, nvme.CmdRead, nvme.CmdCompare, nvme.CmdVerify},
		[]uint8{nvme.CmdWrite, nvme.CmdWriteZeroes, nvme.CmdDSM}
	if csi == nvme.CSIKV {
		reads, writes = []uint8{nvme.CmdFlush, nvme.CmdKVRetrieve, nvme.CmdKVList, nvme.CmdKVExist},
			[]uint8{nvme.CmdKVStore, nvme.CmdKVDelete}
		if t.extendedKV {
			reads = append(reads, nvme.CmdKVXRetrieve, nvme.CmdKVScan, nvme.CmdKVCopyOut, nvme.CmdKVCount,
				nvme.CmdKVDigest)
			writes = append(writes, nvme.CmdKVXStore, nvme.CmdKVXDelete, nvme.CmdKVCopyIn, nvme.CmdKVDrop)
		}
		if t.replication {
			reads = append(reads, nvme.CmdKVDurable, nvme.CmdKVSync, nvme.CmdKVShip, nvme.CmdKVCompare, nvme.CmdKVFetch)
			writes = append(writes, nvme.CmdKVForward)
		}
	}
	for _, op := range reads {
		l.SetIO(op, nvme.EffectSupported)
	}
	for _, op := range writes {
		l.SetIO(op, nvme.EffectSupported|nvme.EffectLBCC)
	}
	return l[:]
}

// anaLog is the Asymmetric Namespace Access log.
func (c *Controller) anaLog(groupsOnly bool) []byte {
	var groups []uint32
	members := map[uint32][]uint32{}
	states := map[uint32]nvme.ANAState{}
	for _, nsid := range c.table.AppendIDs(nil, 0, MaxNSID) {
		ns := c.table.Get(nsid)
		if members[ns.ANAGroup] == nil {
			groups = append(groups, ns.ANAGroup)
		}
		members[ns.ANAGroup] = append(members[ns.ANAGroup], nsid)
		states[ns.ANAGroup] = ns.ANAState
	}
	if len(groups) == 0 { // a host without namespaces still sees its group
		groups, states[1] = []uint32{1}, nvme.ANAStateOptimized
	}
	slices.Sort(groups)
	const size = nvme.ANAHeaderSize + maxANAGroups*nvme.ANAGroupSize + MaxNSID*4
	log := nvme.AppendANAHeader(make([]byte, 0, size), c.sub.changeCount, uint16(len(groups)))
	for _, id := range groups {
		nsids := members[id]
		if groupsOnly {
			nsids = nil
		}
		log = nvme.AppendANAGroup(log, id, c.sub.changeCount, states[id], nsids)
	}
	return log[:size]
}
