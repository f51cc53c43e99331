package memverbs

import (
	"cmp"
	"fmt"
	"slices"

	"jbofd/internal/nvmeof/rdma/verbs"
)

// region implements verbs.MR.
type region struct {
	domain     *domain
	b          []byte
	addr       uint64
	access     verbs.Access
	lkey, rkey uint32
	closed     bool
}

func (d *domain) Register(b []byte, a verbs.Access) (verbs.MR, error) {
	n := d.net
	n.mu.Lock()
	defer n.mu.Unlock()
	attr := &d.dev.attr
	switch err := d.usable(); {
	case err != nil:
		return nil, err
	case len(b) == 0:
		return nil, fmt.Errorf("memverbs: a memory region of no bytes")
	case a&verbs.RemoteWrite != 0 && a&verbs.LocalWrite == 0:
		return nil, fmt.Errorf("memverbs: RemoteWrite needs LocalWrite")
	case d.dev.mrs >= attr.MaxMRs:
		return nil, limit("memory regions", d.dev.mrs+1, attr.MaxMRs)
	case uint64(len(b)) > attr.MaxMRBytes:
		return nil, fmt.Errorf("%d bytes in a memory region, the device allows %d: %w", len(b), attr.MaxMRBytes,
			verbs.ErrResources)
	}
	r := &region{domain: d, b: b, access: a, addr: n.lastAddr, lkey: n.newKey(), rkey: n.newKey()}
	// A gap follows each region, so that an access beyond its end hits no other region.
	n.lastAddr += (uint64(len(b))+4095)&^4095 + 1<<16
	n.lkeys[r.lkey], n.rkeys[r.rkey] = r, r
	d.regions = append(d.regions, r)
	d.users++
	d.dev.mrs++
	c := &d.dev.provider.counts
	c.MRs++
	c.RegisteredBytes += int64(len(b))
	return r, nil
}

// newKey returns a key that no region has. A key is reused only after all others were used.
func (n *Network) newKey() uint32 {
	for {
		n.lastKey += 0x9e3779b1 // an odd increment visits every value
		if k := n.lastKey; k != 0 && n.lkeys[k] == nil && n.rkeys[k] == nil {
			return k
		}
	}
}

func (r *region) Addr() uint64 { return r.addr }
func (r *region) LKey() uint32 { return r.lkey }
func (r *region) RKey() uint32 { return r.rkey }

func (r *region) Close() error {
	d := r.domain
	d.net.mu.Lock()
	defer d.net.mu.Unlock()
	if r.closed {
		return nil
	}
	r.closed = true
	delete(d.net.lkeys, r.lkey)
	if d.net.rkeys[r.rkey] == r {
		delete(d.net.rkeys, r.rkey)
	}
	d.regions = slices.DeleteFunc(d.regions, func(o *region) bool { return o == r })
	d.users--
	d.dev.mrs--
	c := &d.dev.provider.counts
	c.MRs--
	c.RegisteredBytes -= int64(len(r.b))
	return nil
}

// bytes returns the n bytes of the region at addr.
func (r *region) bytes(addr uint64, n uint32) ([]byte, bool) {
	if addr < r.addr || addr-r.addr > uint64(len(r.b)) || uint64(n) > uint64(len(r.b))-(addr-r.addr) {
		return nil, false
	}
	return r.b[addr-r.addr:][:n], true
}

// local returns the memory that a work request of this domain describes by its LKey. The argument access is what the
// device does with the memory beyond reading.
func (d *domain) local(lkey uint32, addr uint64, n uint32, access verbs.Access) ([]byte, bool) {
	if n == 0 {
		return nil, true
	}
	r := d.net.lkeys[lkey]
	if r == nil || r.domain != d || r.access&access != access {
		return nil, false
	}
	return r.bytes(addr, n)
}

// remote returns the memory of this domain that a peer describes by its RKey.
func (d *domain) remote(rkey uint32, addr uint64, n uint32, access verbs.Access) ([]byte, bool) {
	if n == 0 {
		return nil, true
	}
	r := d.net.rkeys[rkey]
	if r == nil || r.domain != d || r.access&access != access {
		return nil, false
	}
	return r.bytes(addr, n)
}

// at returns memory of any region without a key, as the processor reads inline data.
func (d *domain) at(addr uint64, n uint32) ([]byte, bool) {
	if n == 0 {
		return nil, true
	}
	i, found := slices.BinarySearchFunc(d.regions, addr,
		func(r *region, a uint64) int { return cmp.Compare(r.addr, a) })
	if !found {
		i--
	}
	if i < 0 {
		return nil, false
	}
	return d.regions[i].bytes(addr, n)
}
