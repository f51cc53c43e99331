package memverbs

import (
	"fmt"
	"net/netip"
	"slices"

	"jbofd/internal/nvmeof/rdma/verbs"
)

// DeviceConfig describes a device.
type DeviceConfig struct {
	// Addr is its address.
	Addr netip.Addr
	// Attr holds its limits; a limit of 0 stands for a usual value.
	Attr verbs.Attr
	// MaxInlineBytes bounds QPConfig.InlineBytes. 0 stands for 256, a negative value for no inline data.
	MaxInlineBytes int
}

// Device is a device of a provider.
type Device struct {
	provider *Provider
	addr     netip.Addr
	inline   int
	removed  chan struct{}
	// The network's mu guards the following fields.
	attr     verbs.Attr
	gone     bool
	qps, mrs int
}

var _ verbs.Device = (*Device)(nil)

func orDefault[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

// AddDevice adds a device to the provider. Listeners on the wildcard address accept connections over it.
func (p *Provider) AddDevice(cfg DeviceConfig) *Device {
	n := p.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.deviceAt(cfg.Addr) != nil {
		panic(fmt.Sprintf("memverbs: two devices with address %v", cfg.Addr))
	}
	a := cfg.Attr
	orDefault(&a.Name, fmt.Sprintf("mem%d", len(p.devices)))
	orDefault(&a.MaxQPs, 1<<16)
	orDefault(&a.MaxQPWRs, 1<<14)
	orDefault(&a.MaxCQEs, 1<<20)
	orDefault(&a.MaxSRQWRs, 1<<15)
	orDefault(&a.MaxMRs, 1<<20)
	orDefault(&a.MaxMRBytes, 1<<40)
	orDefault(&a.MaxResponderResources, 16)
	orDefault(&a.MaxInitiatorDepth, 16)
	orDefault(&cfg.MaxInlineBytes, 256)
	d := &Device{provider: p, addr: cfg.Addr.Unmap(), attr: a, inline: max(cfg.MaxInlineBytes, 0),
		removed: make(chan struct{})}
	p.devices = append(p.devices, d)
	return d
}

// RemoveDevice removes a device. Its endpoints get the event Removed and their peers lose the connection. The seed
// decides whether outstanding requests are flushed. AddDevice with the same address adds a new device.
func (p *Provider) RemoveDevice(d *Device) {
	n := p.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if d.gone {
		return
	}
	d.gone = true
	close(d.removed)
	p.devices = slices.DeleteFunc(p.devices, func(o *Device) bool { return o == d })
	for _, l := range p.listeners {
		if l.device == d {
			l.end(verbs.ErrDeviceRemoved)
		}
	}
	for _, e := range slices.Clone(n.endpoints) {
		if e.dev == d {
			e.removed()
		}
	}
}

// Devices returns the provider's devices in the order in which they were added.
func (p *Provider) Devices() []*Device {
	p.net.mu.Lock()
	defer p.net.mu.Unlock()
	return slices.Clone(p.devices)
}

// Attr implements verbs.Device.
func (d *Device) Attr() verbs.Attr {
	d.provider.net.mu.Lock()
	defer d.provider.net.mu.Unlock()
	return d.attr
}

// SetAttr changes the limits that apply to objects created from now on.
func (d *Device) SetAttr(change func(*verbs.Attr)) {
	d.provider.net.mu.Lock()
	defer d.provider.net.mu.Unlock()
	change(&d.attr)
}

// Removed implements verbs.Device.
func (d *Device) Removed() <-chan struct{} { return d.removed }

// OpenDomain implements verbs.Device.
func (d *Device) OpenDomain() (verbs.Domain, error) {
	n := d.provider.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if d.gone {
		return nil, verbs.ErrDeviceRemoved
	}
	d.provider.counts.Domains++
	return &domain{dev: d, net: n}, nil
}

// limit returns the error of a request that exceeds a device's limit.
func limit(what string, want, most int) error {
	return fmt.Errorf("%d %s, the device has %d: %w", want, what, most, verbs.ErrResources)
}
