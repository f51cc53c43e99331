package daemon

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"time"

	"jbofd/internal/config"
	"jbofd/internal/drive"
	"jbofd/internal/nvme"
	"jbofd/internal/nvmeof"
	"jbofd/internal/pipeline"
	"jbofd/internal/publish"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/label"
	"jbofd/internal/telemetry"
	"jbofd/internal/units"
	"jbofd/internal/uuid"
)

// openSSD is one configured SSD. After a failed open only name and err are set. It does not change once it is among
// Node.drives.
type openSSD struct {
	name string
	err  error
	// withdrawn: it is gone, and has no namespaces any more. What is below stays until another one takes its place.
	withdrawn bool
	// returns: it was taken into service while the daemon ran.
	returns bool
	opened  *openedDevice
	dev     ssd.Device
	label   *label.Store
	drive   *drive.Drive
	// health is what the drive says of itself, or false. It does no I/O.
	health func() (ssd.Health, bool)
	// backgroundWeight is that of its key-value stores' own work.
	backgroundWeight int
}

// openDrives opens every drive. A drive that cannot be opened is left out, with an error in the log:
// the others go on. Only when none can, there is nothing to serve.
func (n *Node) openDrives() error {
	var failed []error
	var all []*openSSD
	n.closing(n.closeDrives)
	for i, o := range n.openDevices() {
		sc := n.cfg.SSDs[i]
		d, err := n.openDrive(sc, o)
		if err != nil {
			d = n.leaveOutDrive(sc, err)
			failed = append(failed, d.err)
		} else {
			n.measure(d)
		}
		all = append(all, d)
	}
	n.ssds.Store(&all)
	if len(failed) > 0 && len(failed) == len(n.cfg.SSDs) {
		return errors.Join(failed...)
	}
	return nil
}

// leaveOutDrive says that a drive is left out, and why.
func (n *Node) leaveOutDrive(sc config.SSD, err error) *openSSD {
	n.missing(sc, err)
	n.log.Error("drive left out", "ssd", sc.Name, "error", err)
	return &openSSD{name: sc.Name, err: fmt.Errorf("ssd %s: %w", sc.Name, err)}
}

// missing has the metrics say why a drive is not in service.
func (n *Node) missing(sc config.SSD, err error) {
	n.tel.SetSSD(telemetry.SSD{Info: ssd.Info{Name: sc.Name, Backend: sc.Backend, Path: sc.Path},
		Healthy: func() error { return err }})
}

// drives returns the drives, in the order of the configuration.
func (n *Node) drives() []*openSSD {
	if all := n.ssds.Load(); all != nil {
		return *all
	}
	return nil
}

// closeDrives closes all drives, the last one first.
func (n *Node) closeDrives() {
	all := n.drives()
	for i := len(all) - 1; i >= 0; i-- {
		if all[i].opened != nil {
			all[i].opened.close()
		}
	}
}

// openDrive makes a drive of what was opened. On error nothing of it stays open: an operator may want
// to format it, as the error says, while the others serve.
func (n *Node) openDrive(sc config.SSD, opened *openedDevice) (_ *openSSD, err error) {
	if opened.err != nil {
		return nil, opened.err
	}
	defer func() {
		if err != nil {
			opened.close()
		}
	}()
	dev, store := opened.dev, opened.label
	d := &openSSD{name: sc.Name, backgroundWeight: sc.BackgroundWeight, opened: opened, dev: dev, label: store}
	if opened.formatted {
		n.log.Info("blank drive labelled", "ssd", sc.Name, "drive", store.Label().DriveUUID.String())
	}
	if copies := store.Repaired(); len(copies) > 0 {
		n.log.Warn("drive label repaired: a copy was missing or damaged and was written again from the other", "ssd",
			sc.Name, "copy", strings.Join(copies, ", "))
	}
	if sc.Fault != nil {
		if d.dev, err = wrapFaults(d.dev, sc.Fault); err != nil {
			return nil, err
		}
	}
	policy, err := n.newPolicy(d.dev, sc)
	if err != nil {
		return nil, err
	}
	failures := newTurnLog(n.log, 1, n.tel.LogDropped)
	opened.closing(failures.close)
	o, err := drive.New(drive.Config{Device: d.dev, Pool: n.pool, Depth: sc.QueueDepth, Policy: policy,
		Failed: func(op pipeline.Op, err error) { failures.deviceFailed(sc.Name, op, err) }})
	if err != nil {
		return nil, err
	}
	opened.closing(func() { _ = o.Close() })
	d.drive = o
	d.health = func() (ssd.Health, bool) { return ssd.HealthOf(dev) }
	info := d.dev.Info()
	n.log.Info("drive opened", "ssd", sc.Name, "backend", info.Backend, "engine", info.Engine, "path", info.Path,
		"size", config.Bytes(info.SizeBytes).String(), "block_size", info.BlockSize, "volatile_cache",
		info.VolatileCache,
		"extents", len(store.Label().Extents))
	if err := fallbackReason(dev); err != nil {
		n.log.Warn("drive uses a slower I/O path than configured or possible", "ssd", sc.Name, "engine", info.Engine,
			"reason", err)
	}
	return d, nil
}

// measure has the metrics be those of a drive.
func (n *Node) measure(d *openSSD) {
	n.tel.SetSSD(telemetry.SSD{
		Info:     d.dev.Info(),
		Healthy:  d.dev.Healthy,
		Fallback: func() error { return fallbackReason(d.opened.dev) },
		Health:   d.health,
		Stats:    func(s *telemetry.SSDStats) { fill(s, d.drive.Stats()) },
	})
}

// lookAtDrivesEvery is how often it is looked whether drives complete anything.
const lookAtDrivesEvery = time.Second

// watchDrives logs which drives take requests and complete none, until the node closes.
func (n *Node) watchDrives() {
	closing, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(lookAtDrivesEvery)
		defer tick.Stop()
		for {
			select {
			case <-closing:
				return
			case now := <-tick.C:
				silent, answer := n.tel.LookAtDrives(now)
				for _, name := range silent {
					n.log.Error("a drive takes requests and completes none", "ssd", name, "for", telemetry.SilentAfter)
				}
				for _, name := range answer {
					n.log.Info("a drive that had completed nothing for some seconds answers again", "ssd", name)
				}
			}
		}
	}()
	n.closing(func() {
		close(closing)
		<-done
	})
}

// fallbackReason returns why a device works in a slower way than was asked for; nil if it does not say so.
func fallbackReason(dev ssd.Device) error {
	if d, ok := dev.(interface{ Fallback() error }); ok {
		return d.Fallback()
	}
	return nil
}

// fill copies a drive's counters.
func fill(s *telemetry.SSDStats, o *drive.Stats) {
	for op := range ssd.Ops {
		s.Completed[op], s.Bytes[op], s.TimeNS[op] = o.Requests[op].Load(), o.Bytes[op].Load(), o.TimeNS[op].Load()
	}
	s.Errors, s.NoSpace = o.Errors.Load(), o.NoSpace.Load()
	s.InFlight, s.Queued = o.Inflight.Load(), o.Queued.Load()
	s.BufferWaits, s.Aborted = o.BufferWaits.Load(), o.Aborted.Load()
}

// flushDrives flushes every drive, so that a clean stop keeps also the writes that no host has flushed.
func (n *Node) flushDrives() {
	var all sync.WaitGroup
	for _, d := range n.drives() {
		if !d.serves() {
			continue
		}
		all.Go(func() {
			if err := publish.Flush(d.drive); err != nil {
				n.log.Error("flush at stop failed", "ssd", d.name, "error", err)
			}
		})
	}
	all.Wait()
}

// serves reports whether the drive has namespaces.
func (d *openSSD) serves() bool { return d.drive != nil && !d.withdrawn }

func (n *Node) owners() []*drive.Drive {
	all := make([]*drive.Drive, len(n.drives()))
	for i, d := range n.drives() {
		all[i] = d.drive
	}
	return all
}

// applyMode says what apply does with a key-value namespace whose store cannot be opened, and whether it changes
// anything.
type applyMode int

const (
	// lenient leaves the namespace out, as a drive that cannot be opened is left out.
	lenient applyMode = iota
	// strict refuses the configuration.
	strict
	// trying is strict, and does all that can fail but the writing of labels. It formats a new key-value store, but no
	// label has the store: its space stays free.
	trying
)

// unfit is why what is on a drive does not fit the configuration: trying again does not help.
type unfit struct{ error }

// Unwrap returns the error itself.
func (u unfit) Unwrap() error { return u.error }

// apply makes drives and target what cfg says: extents for new namespaces,
// longer ones for namespaces that have grown. Extents of namespaces that are no longer
// configured stay, with their data, until an operator frees them.
//
// Errors: an unfit; those of the drives, of stores and of publish.Publisher.Vacate; errStopping.
//
// All changes are made to copies of the labels first, so that a configuration that does not fit changes nothing. Labels
// change before the target does, and each changes atomically.
func (n *Node) apply(cfg *config.Config, mode applyMode) error {
	if mode != lenient {
		// A dry run ends here if there is something to resize: it must not format a new store in what is freed only
		// then.
		if pending, err := n.resize(cfg, mode); err != nil || pending && mode == trying {
			return err
		}
	}
	state := nvmeof.State{Ports: n.ports}
	plan := labelPlan{}
	var kv []*kvPlan
	var tel []telemetry.Subsystem
	for _, r := range cfg.Discovery.Referrals {
		p, err := referral(r)
		if err != nil {
			return err
		}
		state.Referrals = append(state.Referrals, p)
	}
	for _, t := range cfg.Tenants {
		state.Hosts = append(state.Hosts, t.Hosts...)
	}
	for i, sc := range cfg.Subsystems {
		st := nvmeof.SubsystemState{NQN: sc.NQN, Serial: sc.Serial, Model: sc.Model, AllowAnyHost: sc.AllowAnyHost,
			Hosts: sc.Hosts}
		if cl := cfg.Cluster; cl != nil && sc.NQN == cl.Subsystem {
			st.Nodes = hostNodes(cfg)
		}
		if st.Serial == "" {
			sum := sha256.Sum256([]byte("serial " + sc.NQN))
			st.Serial = hex.EncodeToString(sum[:10])
		}
		ts := telemetry.Subsystem{NQN: sc.NQN, Serial: st.Serial, Model: st.Model}
		for j, nc := range sc.Namespaces {
			ns, store, err := n.namespace(plan, sc.NQN, nc, mode)
			if err != nil {
				return cfg.NamespaceProblem(i, j, "", fmt.Errorf("subsystem %s, namespace %d: %w", sc.NQN, nc.NSID,
					unfit{err}))
			}
			if ns == nil {
				continue // its drive is not served, or it waits for the cluster
			}
			if store != nil {
				kv = append(kv, store)
			} else if !n.publisher.Published(ns.UUID) {
				plan.of(n.drives()[ns.SSD]).gains = true
			}
			st.Namespaces = append(st.Namespaces, ns)
			ts.Namespaces = append(ts.Namespaces,
				telemetry.Namespace{NSID: ns.NSID, SSD: nc.SSD, UUID: ns.UUID.String(), Type: nc.Type,
					SizeBytes: int64(ns.SizeBytes), BlockSize: 1 << ns.BlockShift})
		}
		state.Subsystems = append(state.Subsystems, st)
		tel = append(tel, ts)
	}
	opened, err := n.openStores(kv, mode == lenient)
	if err != nil {
		return err
	}
	if mode == trying {
		n.dropStores(opened)
		return nil
	}
	if err = n.cluster.checkNodes(cfg); err == nil { // again: a resize may have taken long
		err = n.vacate(plan)
	}
	if err == nil {
		err = plan.commit()
	}
	if err != nil {
		n.dropStores(opened)
		return err
	}
	stores := map[*nvmeof.Namespace]*publish.Store{}
	for _, p := range kv {
		if p.store != nil {
			stores[p.ns] = p.store
			n.clearLeftOut(p.extent.UUID)
		}
	}
	names := []string{config.Background}
	for _, t := range cfg.Tenants {
		names = append(names, t.Name)
	}
	n.tel.SetTenants(names)
	n.tel.SetSubsystems(tel)
	n.publisher.Publish(publish.Publication{State: state, Tenants: tenantConfigs(cfg), Stores: stores})
	n.clearRemovedLeftOut(kv)
	if mode == strict {
		n.tel.Health().Clear(sizesComponent)
	}
	return nil
}

// vacate sees to it that no late write of a store that was given up, and no late zeroes of an erasure that was, land on
// what the plan gives to a namespace.
func (n *Node) vacate(plan labelPlan) error {
	for d, planned := range plan {
		if !planned.changed && !planned.gains {
			continue
		}
		if err := n.publisher.Vacate(d.drive, n.stopping); err != nil {
			return fmt.Errorf("ssd %s: %w", d.name, err)
		}
	}
	return nil
}

// labelPlan holds the labels as apply will write them.
type labelPlan map[*openSSD]*plannedLabel

// plannedLabel is a copy of a drive's label.
type plannedLabel struct {
	label   *label.Label
	changed bool
	// gains says that hosts get a block namespace of the drive that they do not have.
	gains bool
}

// of returns the plan for a drive.
func (p labelPlan) of(d *openSSD) *plannedLabel {
	if p[d] == nil {
		p[d] = &plannedLabel{label: d.label.Label().Clone()}
	}
	return p[d]
}

// commit writes the changed labels. If one cannot be written, those written before it are restored. Otherwise a
// namespace could be larger in its label than in the configuration, and a restart would refuse that configuration.
func (p labelPlan) commit() error {
	before := map[*openSSD]*label.Label{}
	for d, planned := range p {
		if !planned.changed {
			continue
		}
		was := d.label.Label()
		err := replaceLabel(d, planned.label)
		if err == nil {
			before[d] = was
			continue
		}
		errs := []error{err}
		for d, was := range before {
			errs = append(errs, replaceLabel(d, was))
		}
		return errors.Join(errs...)
	}
	return nil
}

func replaceLabel(d *openSSD, by *label.Label) error {
	err := d.label.Update(func(l *label.Label) error {
		*l = *by.Clone()
		return nil
	})
	if err != nil {
		return fmt.Errorf("ssd %s: %w", d.name, err)
	}
	return nil
}

// namespace finds a namespace's extent, or plans a new or longer one, and the store on it if it is of keys and
// values; nil if its drive is not served, or if it is a new partition of the cluster, whose seed is not known yet.
func (n *Node) namespace(plan labelPlan, nqn string, nc config.Namespace, mode applyMode) (*nvmeof.Namespace, *kvPlan,
	error) {
	number := -1
	for i, d := range n.drives() {
		if d.name == nc.SSD {
			number = i
		}
	}
	if number < 0 {
		return nil, nil, fmt.Errorf("ssd %q is not configured", nc.SSD)
	}
	d := n.drives()[number]
	if !d.serves() {
		return nil, nil, nil
	}
	if nc.Replicated && plan.of(d).label.FindNamespace(nqn, nc.NSID) < 0 {
		if _, known := n.cluster.hashSeed(); !known {
			return nil, nil, nil // it is made when the node joins its cluster
		}
	}
	info := d.dev.Info()
	if nc.Type == "block" && nc.BlockSize < info.BlockSize {
		return nil, nil, fmt.Errorf("block_size %d: ssd %s has blocks of %d bytes", nc.BlockSize, nc.SSD,
			info.BlockSize)
	}
	e, fresh, err := plan.of(d).extent(nqn, nc, mode == lenient)
	if errors.Is(err, label.ErrNoRoom) {
		err = fmt.Errorf("%w; a namespace that was removed keeps its space until jbofctl namespace delete frees it",
			err)
	}
	if err == nil && fresh {
		err = n.checkOthers(plan, d, e, mode)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("ssd %s: %w", nc.SSD, err)
	}
	ns := &nvmeof.Namespace{
		NSID: nc.NSID, SSD: number, OffsetBytes: e.StartBytes, SizeBytes: units.Bytes(e.LengthBytes),
		BlockShift: uint8(bits.TrailingZeros(uint(nc.BlockSize))),
		UUID:       uuid.UUID(e.UUID), NGUID: e.UUID, VolatileCache: info.VolatileCache,
		DeallocatedReadsZero: info.DeallocatedReadsZero, OptimalIOBytes: info.OptimalIOBytes,
		ANAGroup: 1, ANAState: nvme.ANAStateOptimized,
	}
	if len(nc.Hosts) > 0 {
		ns.Hosts = nc.Hosts
	}
	sum := sha256.Sum256(e.UUID[:])
	copy(ns.EUI64[:], sum[:])
	if nc.Type != "kv" {
		return ns, nil, nil
	}
	describeKV(ns)
	if nc.Replicated {
		ns.Executor = nvmeof.KindReplica
	}
	return ns, &kvPlan{ns: ns, ssd: d, extent: e, cfg: nc, fresh: fresh}, nil
}

// extent returns the namespace's extent, which it makes or grows if necessary. fresh reports that the extent is new.
func (p *plannedLabel) extent(nqn string, nc config.Namespace, lenient bool) (e label.Extent, fresh bool, err error) {
	use, shift := label.Block, uint8(bits.TrailingZeros(uint(nc.BlockSize)))
	if nc.Type == "kv" {
		use, shift = label.KV, 0
	}
	l := p.label
	if i := l.FindNamespace(nqn, nc.NSID); i >= 0 {
		e := l.Extents[i]
		switch {
		case e.Use != use:
			return e, false, fmt.Errorf("the drive's label says type %s, the configuration %s", e.Use, nc.Type)
		case e.BlockShift != shift:
			return e, false, fmt.Errorf("block_size %d: the namespace was made with %d", nc.BlockSize, 1<<e.BlockShift)
		case nc.UUID != "" && nc.UUID != e.UUID.String():
			return e, false, fmt.Errorf("uuid %s: the namespace was made with %s", nc.UUID, e.UUID)
		case use == label.KV && (int64(nc.Size) < e.LengthBytes || lenient):
			return e, false, nil // it keeps its extent until resize changes that
		case int64(nc.Size) < e.LengthBytes:
			return e, false, fmt.Errorf("size %s: the namespace has %s and cannot shrink", nc.Size,
				config.Bytes(e.LengthBytes))
		case int64(nc.Size) == e.LengthBytes:
			return e, false, nil
		}
		p.changed = true
		err := l.Grow(e.UUID, int64(nc.Size))
		if err != nil && i+1 < len(l.Extents) {
			behind := &l.Extents[i+1]
			err = fmt.Errorf("%w; behind it lies %s of %s, nsid %d (uuid %s)", err, behind.Use, behind.NQN, behind.NSID,
				behind.UUID)
		}
		e.LengthBytes = int64(nc.Size)
		return e, false, err
	}
	e = label.Extent{UUID: label.NewUUID(), LengthBytes: int64(nc.Size), NSID: nc.NSID, Use: use, BlockShift: shift,
		NQN: nqn}
	if nc.UUID != "" {
		u, err := uuid.Parse(nc.UUID)
		if err != nil {
			return e, false, err
		}
		e.UUID = uuid.UUID(u)
	}
	p.changed = true
	e, err = l.Allocate(e)
	return e, true, err
}

// checkOthers refuses a new extent e of d for a namespace that another drive has.
//
// When the daemon starts, drives may have exchanged their names, as block devices do when a machine boots: a new, empty
// namespace would then have the place of one with data. Two reloads, of which the first removes the namespace and the
// second adds it on another drive, say that a new one is wanted. A drive in memory is new at every start.
//
// No two extents have the same UUID, by which hosts tell namespaces, and swap areas the keys of stores.
func (n *Node) checkOthers(plan labelPlan, d *openSSD, e label.Extent, mode applyMode) error {
	for _, other := range n.drives() {
		if other == d {
			continue
		}
		if other.label == nil {
			if mode == lenient && d.returns && len(d.label.Label().Extents) > 0 {
				return fmt.Errorf("it would be a new, empty namespace, and ssd %s, which may have that one, is not "+
					"there. If a new one is wanted, remove nsid %d and add it by a reload", other.name, e.NSID)
			}
			continue
		}
		l := plan.of(other).label
		if l.Find(e.UUID) >= 0 {
			return fmt.Errorf("uuid %s: ssd %s has a namespace with that uuid; allowed: another one, or jbofctl "+
				"namespace delete that one first", e.UUID, other.name)
		}
		if i := l.FindNamespace(e.NQN, e.NSID); i >= 0 && mode == lenient && d.dev.Info().Backend == "file" {
			return fmt.Errorf("it would be a new, empty namespace, because that one is on ssd %s (uuid %s): have the "+
				"drives' paths been exchanged? If a new one is wanted, remove nsid %d and add it by a reload",
				other.name, l.Extents[i].UUID, e.NSID)
		}
	}
	return nil
}

// referral describes another discovery service.
func referral(r config.Referral) (nvmeof.Port, error) {
	a, err := netip.ParseAddrPort(r.Address)
	if err != nil {
		return nvmeof.Port{}, fmt.Errorf("referral %s: %w", r.Address, err)
	}
	p := nvmeof.Port{NQN: r.NQN, TRTYPE: nvme.TRTYPETCP, ADRFAM: nvme.ADRFAMIPv4, Address: a.Addr().String(),
		Service: strconv.Itoa(int(a.Port()))}
	if r.Transport == "rdma" {
		p.TRTYPE = nvme.TRTYPERDMA
	}
	if a.Addr().Is6() {
		p.ADRFAM = nvme.ADRFAMIPv6
	}
	return p, nil
}
