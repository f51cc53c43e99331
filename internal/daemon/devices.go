package daemon

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"jbofd/internal/config"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/file"
	"jbofd/internal/ssd/label"
	"jbofd/internal/ssd/mem"
	"jbofd/internal/ssd/model"
	"jbofd/internal/ssd/model/flash"
	"jbofd/internal/ssd/spdk"
	"jbofd/internal/ssd/vfio"
)

// openTimeout is how long drives may take to open and to read their labels. One that takes longer is left out, so that
// a drive that hangs does not keep the others from serving. It must be more than a drive that works may need: a
// controller may take 15 s to become ready.
const openTimeout = 30 * time.Second

// openedDevice is a device with its label, or why there is none.
type openedDevice struct {
	dev       ssd.Device
	label     *label.Store
	formatted bool
	// over is closed when nobody wants it any more; nil: never. What was not written by then is not.
	over <-chan struct{}
	// closers close what was opened, the last one first. mu guards them.
	mu      sync.Mutex
	closers []func()
	err     error
}

func (o *openedDevice) closing(f func()) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closers = append(o.closers, f)
}

// close closes what was opened. Idempotent; another call does not wait for the first.
func (o *openedDevice) close() {
	o.mu.Lock()
	all := o.closers
	o.closers = nil
	o.mu.Unlock()
	for i := len(all) - 1; i >= 0; i-- {
		all[i]()
	}
}

// wanted returns an error if nobody wants the device any more.
func (o *openedDevice) wanted() error {
	select {
	case <-o.over:
		return errors.New("it was given up while it was opened")
	default:
		return nil
	}
}

// openDevices opens the devices of all drives at a time, in the order of the configuration. A device that is open after
// openTimeout is closed again: nothing uses it.
func (n *Node) openDevices() []*openedDevice {
	late := time.NewTimer(openTimeout)
	defer late.Stop()
	over := make(chan struct{})
	defer close(over)
	all := make([]*openedDevice, len(n.cfg.SSDs))
	opened := make([]chan *openedDevice, len(all))
	for i, sc := range n.cfg.SSDs {
		opened[i] = make(chan *openedDevice)
		n.beginOpening(sc, mayFormat, opened[i], over)
	}
	expired := false
	for i := range all {
		if !expired {
			select {
			case all[i] = <-opened[i]:
				continue
			case <-late.C:
				expired = true
			}
		}
		select {
		case all[i] = <-opened[i]:
		case <-time.After(time.Millisecond): // one that is open is at the channel
			all[i] = &openedDevice{err: unanswered(openTimeout)}
		}
	}
	return all
}

// What openDevice may do with a blank drive.
const (
	mayFormat  = true
	mustBeOurs = false
)

// openDevice opens one device and its label. With mayFormat it makes the file that the configuration asks for, and
// labels a blank drive.
func (n *Node) openDevice(o *openedDevice, sc config.SSD, format bool) (err error) {
	sc.Create = sc.Create && format
	if !format && sc.Backend == "file" {
		if st, err := os.Stat(sc.Path); err == nil && st.Mode().IsRegular() {
			sc.Size = 0
		}
	}
	switch sc.Backend {
	case "mem":
		o.dev, err = mem.Open(mem.Config{Name: sc.Name, SizeBytes: int64(sc.Size)})
	case "model":
		conditions := map[string]flash.Condition{"empty": flash.Empty, "clean": flash.Clean,
			"fragmented": flash.Fragmented}
		o.dev, err = model.Open(model.Config{Name: sc.Name, Preset: sc.Preset, SizeBytes: int64(sc.Size),
			Condition: conditions[sc.Condition], Seed: 1, Slowdown: sc.Slowdown})
	case "file":
		engine := sc.Engine
		if engine == "auto" {
			engine = ""
		}
		if dir := filepath.Dir(sc.Path); sc.Create {
			if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
				return fmt.Errorf("directory %s does not exist; create makes the file only: %w", dir, err)
			}
		}
		if err = mayGrow(sc); err == nil {
			o.dev, err = file.Open(file.Config{Name: sc.Name, Path: sc.Path, Create: sc.Create,
				SizeBytes: int64(sc.Size), Engine: engine, Pool: n.pool})
		}
	case "nvme":
		o.dev, err = n.openController(o, sc)
	case "spdk":
		o.dev, err = n.openSPDK(o, sc)
	default:
		err = fmt.Errorf("backend %q: must be mem, file, nvme, spdk or model", sc.Backend)
	}
	if err != nil {
		return err
	}
	dev := o.dev
	o.closing(func() { _ = dev.Close() })
	if err := o.wanted(); err != nil { // label.Open may mend the label
		return err
	}
	store, err := label.Open(dev)
	if errors.Is(err, label.ErrBlank) && format {
		if err := o.wanted(); err != nil {
			return err
		}
		store, err = label.Format(dev, label.NewUUID(), false)
		o.formatted = err == nil
	}
	if err != nil {
		return refusedDrive(err, formattedAs(sc))
	}
	o.closing(func() { _ = store.Close() })
	o.label = store
	return nil
}

// openController opens a drive of an NVMe controller that jbofd drives itself.
func (n *Node) openController(o *openedDevice, sc config.SSD) (ssd.Device, error) {
	events := newTurnLog(n.log, 1, n.tel.LogDropped)
	o.closing(events.close) // after the device, which calls it
	dev, err := vfio.OpenAddress(vfio.Config{Name: sc.Name, Address: sc.Address, NSID: sc.NSID, Pool: n.pool,
		Event: func(kind ssd.HealthEvent, what string) { events.driveEvent(sc.Name, kind, what) }})
	if err != nil {
		return nil, err
	}
	return sizedAs(sc, dev, sc.Address)
}

// openSPDK opens a drive by SPDK's driver.
func (n *Node) openSPDK(o *openedDevice, sc config.SSD) (ssd.Device, error) {
	events := newTurnLog(n.log, 1, n.tel.LogDropped)
	o.closing(events.close) // after the device, which calls it
	id := spdk.TransportID{Transport: sc.TrType, Address: sc.TrAddr}
	if sc.TrType != "pcie" {
		id.Service, id.SubNQN, id.HostNQN = sc.TrSvcID, sc.SubNQN, sc.HostNQN
	}
	dev, err := spdk.Open(spdk.Config{Name: sc.Name, TransportID: id, NSID: sc.NSID, Pool: n.pool,
		Environment: environmentOfSPDK(n.config()),
		Event:       func(kind ssd.HealthEvent, what string) { events.driveEvent(sc.Name, kind, what) }})
	if err != nil {
		return nil, err
	}
	return sizedAs(sc, dev, sc.TrAddr)
}

// environmentOfSPDK is what the drives of a configuration need of SPDK's environment, which the first one makes.
func environmentOfSPDK(c *config.Config) (e spdk.Environment) {
	e.MemoryMiB = 48
	for _, s := range c.SSDs {
		if s.Backend == "spdk" {
			e.PCI = e.PCI || s.TrType == "pcie"
			e.MemoryMiB += 16 + 2*s.QueueDepth>>8 // 4 KiB for each of twice as many commands, and bounce buffers
		}
	}
	return e
}

// sizedAs refuses a controller's namespace that has not the size that the configuration says.
func sizedAs(sc config.SSD, dev ssd.Device, at string) (ssd.Device, error) {
	if size := dev.Info().SizeBytes; sc.Size != 0 && int64(sc.Size) != size {
		return nil, errors.Join(fmt.Errorf("size: %s, but the namespace at %s has %s; allowed: leave it out", sc.Size,
			at, config.Bytes(size)), dev.Close())
	}
	return dev, nil
}

// formattedAs is how jbofctl ssd format names a drive; empty: it reaches no such drive.
func formattedAs(sc config.SSD) string {
	if sc.Backend == "spdk" && sc.TrType == "pcie" {
		return sc.TrAddr
	}
	return cmp.Or(sc.Path, sc.Address)
}

// refusedDrive adds to the error of a drive that holds something else how to give it to jbofd.
func refusedDrive(err error, path string) error {
	if path == "" {
		return err
	}
	if errors.Is(err, label.ErrForeign) || errors.Is(err, label.ErrCorrupt) {
		return fmt.Errorf("%w; to give it to jbofd and lose what it holds: jbofctl ssd format --force %s", err, path)
	}
	return err
}

// mayGrow refuses a file that file.Open would make larger if it holds something else than a drive of jbofd: even zeroes
// at its end would change it.
//
// Errors: label.ErrForeign, label.ErrCorrupt, label.ErrVersion; and those of file.Open.
func mayGrow(sc config.SSD) (err error) {
	st, err := os.Stat(sc.Path)
	if err != nil || !sc.Create || !st.Mode().IsRegular() || st.Size() == 0 || st.Size() >= int64(sc.Size) {
		return nil // there is nothing to grow, or file.Open says what is wrong
	}
	if st.Size() < label.MinDeviceBytes {
		data, err := os.ReadFile(sc.Path)
		if err == nil && len(bytes.Trim(data, "\x00")) > 0 {
			err = fmt.Errorf("%s: %w, which is too short for a drive", sc.Path, label.ErrForeign)
		}
		return err
	}
	dev, err := file.Open(file.Config{Name: sc.Name, Path: sc.Path, Engine: file.EngineThreads, ReadOnly: true})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dev.Close()) }()
	_, err = label.Inspect(dev)
	if errors.Is(err, label.ErrBlank) || errors.Is(err, label.ErrShrunk) {
		return nil
	}
	if err != nil {
		return refusedDrive(fmt.Errorf("%s: %w", sc.Path, err), sc.Path)
	}
	return nil
}
