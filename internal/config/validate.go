package config

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"reflect"
	"regexp"
	"strconv"
	"strings"

	"jbofd/internal/nvme"
	"jbofd/internal/ssd/label"
)

// sizeAlign is what a drive's declared size is a multiple of.
const sizeAlign Bytes = 4096

// The sizes that an emulated drive can have; package flash refuses others too.
const (
	minModelBytes Bytes = 16 << 20
	maxModelBytes Bytes = 4 << 40
)

// validator finds what the schema cannot say: contradictions between fields.
// It looks at no field that the decoder already complained about.
type validator struct {
	*decoder
	c *Config
}

// ok reports that nothing was wrong with a field so far.
func (v *validator) ok(path string) bool { return !v.bad[path] }

// defaultKV is what a configuration that is written out has of a namespace of blocks.
func defaultKV() (k KV) {
	fill(reflect.ValueOf(&k).Elem())
	return k
}

// complain reports a problem where the field stands.
func (v *validator) complain(path, format string, args ...any) {
	v.problem(v.pos.of(v.file, path), path, format, args...)
}

// line says where a field stands, for problems that name two places.
func (v *validator) line(path string) string {
	at := v.pos.of(v.file, path)
	if at.line == 0 {
		return at.file
	}
	return "line " + strconv.Itoa(at.line)
}

// unique complains about every path after the first that has the same value.
type unique struct {
	v    *validator
	what string
	seen map[string]string
}

func (v *validator) unique(what string) *unique {
	return &unique{v: v, what: what, seen: map[string]string{}}
}

func (u *unique) add(path, value string) {
	if !u.v.ok(path) || value == "" {
		return
	}
	if first, dup := u.seen[value]; dup {
		u.v.complain(path, "%q is given twice, first as %s at %s; allowed: each %s once", value, first, u.v.line(first),
			u.what)
		return
	}
	u.seen[value] = path
}

var nameForm = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$`)

const nameAllowed = "1 to 63 letters, digits, '.', '_' and '-', the first a letter or digit"

func (v *validator) name(path, name string) {
	if v.ok(path) && !nameForm.MatchString(name) {
		v.complain(path, "%q is not a name; allowed: %s", name, nameAllowed)
	}
}

func (v *validator) all() {
	c := v.c
	v.name("node.name", c.Node.Name)
	if v.ok("node.data_dir") && c.Node.DataDir == "" {
		v.complain("node.data_dir", `"" is empty; allowed: the path of a directory`)
	}
	v.addresses()
	for i, r := range c.Discovery.Referrals {
		p := index("discovery.referrals", i)
		if !v.ok(p) {
			continue
		}
		v.nqn(join(p, "nqn"), r.NQN)
		if a := v.address(join(p, "address"), r.Address); a.IsValid() && (a.Port() == 0 || a.Addr().IsUnspecified()) {
			v.complain(join(p, "address"), "%q cannot be connected to; allowed: the address and port of another "+
				"discovery service", r.Address)
		}
	}
	v.ssds()
	v.subsystems()
	v.extents()
	v.tenants()
	v.limits()
	v.cluster()
}

// address checks an IP address and port; the result is invalid if it is not one.
func (v *validator) address(path, s string) netip.AddrPort {
	if !v.ok(path) {
		return netip.AddrPort{}
	}
	a, err := netip.ParseAddrPort(s)
	if err != nil {
		v.complain(path, "%q is not an address; allowed: IP:port, as in 0.0.0.0:4420 or [::1]:4420", s)
	}
	return a
}

// addresses checks everything that listens, and that no two want the same port.
func (v *validator) addresses() {
	type listen struct {
		path string
		rdma bool // RDMA has port numbers of its own
		addr netip.AddrPort
	}
	var all []listen
	add := func(path, s string, rdma bool) {
		a := v.address(path, s)
		if !a.IsValid() {
			return
		}
		for _, o := range all {
			same := o.addr.Addr().Unmap() == a.Addr().Unmap() || o.addr.Addr().IsUnspecified() ||
				a.Addr().IsUnspecified()
			if same && rdma == o.rdma && a.Port() != 0 && a.Port() == o.addr.Port() {
				v.complain(path, "%q collides with %s %q at %s; allowed: an address and port of its own", s, o.path,
					o.addr, v.line(o.path))
				return
			}
		}
		all = append(all, listen{path, rdma, a})
	}
	if v.c.Metrics.Address != "" {
		add("metrics.address", v.c.Metrics.Address, false)
	}
	if v.c.Discovery.Address != "" {
		add("discovery.address", v.c.Discovery.Address, false)
	}
	for i, l := range v.c.Listeners {
		if p := index("listeners", i); v.ok(p) {
			add(join(p, "address"), l.Address, l.Transport == "rdma")
		}
	}
	v.clusterListens(func(path, address string) { add(path, address, false) })
	if v.c.Metrics.Address == "" && v.c.Metrics.Pprof {
		v.complain("metrics.pprof", "true, but metrics.address is empty; allowed: false, or give metrics.address")
	}
}

func (v *validator) ssds() {
	if len(v.c.SSDs) == 0 && v.ok("ssds") {
		v.complain("ssds", "no drive; allowed: one or more")
	}
	if len(v.c.Listeners) == 0 && v.ok("listeners") {
		v.complain("listeners", "none, so that no host could connect; allowed: one or more")
	}
	names, paths, addresses := v.unique("ssd name"), v.unique("ssd path"), v.unique("address of a controller")
	areas := 0
	for i, s := range v.c.SSDs {
		p := index("ssds", i)
		if !v.ok(p) {
			continue
		}
		v.name(join(p, "name"), s.Name)
		names.add(join(p, "name"), s.Name)
		if s.KVSwap > 0 {
			areas++
			v.swap(join(p, "kv_swap"), s, areas)
		}
		if !v.ok(join(p, "backend")) {
			continue
		}
		given := func(key string) bool { _, ok := v.pos[join(p, key)]; return ok }
		sizeOK := v.ok(join(p, "size"))
		switch s.Backend {
		case "mem", "model", "nvme", "spdk":
			if s.Path != "" {
				v.complain(join(p, "path"), "%q, but backend %s has none; allowed: leave it out", s.Path, s.Backend)
			}
			if s.Create {
				v.complain(join(p, "create"), "true, but backend %s makes no file; allowed: leave it out", s.Backend)
			}
			if given("engine") && s.Engine != "auto" {
				v.complain(join(p, "engine"), "%q, but backend %s has none; allowed: leave it out", s.Engine, s.Backend)
			}
			least := Bytes(label.MinDeviceBytes)
			if s.Backend == "model" {
				least = minModelBytes
			}
			if sizeOK && s.Size == 0 && s.Backend != "nvme" && s.Backend != "spdk" {
				v.complain(join(p, "size"), "missing; backend %s needs it: a size of %s or more", s.Backend, least)
				sizeOK = false
			}
			if sizeOK && s.Backend == "model" && (s.Size < minModelBytes || s.Size > maxModelBytes) {
				v.complain(join(p, "size"), "%s is not the size of a drive that can be emulated; allowed: %s to %s",
					s.Size, minModelBytes, maxModelBytes)
				sizeOK = false
			}
		case "file":
			if v.ok(join(p, "path")) && s.Path == "" {
				v.complain(join(p, "path"), "missing; backend file needs it: the path of a file or block device")
			} else if s.Path != "" {
				u := filepath.Clean(s.Path)
				paths.add(join(p, "path"), u)
				if s.Create && strings.HasPrefix(u, "/dev/") {
					v.complain(join(p, "create"), "true, but %q is a device; allowed: false", s.Path)
				}
			}
			if sizeOK && s.Create && s.Size == 0 {
				v.complain(join(p, "size"), "missing; create needs it: a size of %s or more",
					Bytes(label.MinDeviceBytes))
				sizeOK = false
			}
		}
		v.controller(p, s, addresses, given)
		v.transport(p, s, addresses, given)
		if s.Backend != "model" {
			if given("preset") && s.Preset != "dct983" {
				v.complain(join(p, "preset"), "%q, but backend %s has none; allowed: leave it out", s.Preset, s.Backend)
			}
			if given("condition") && s.Condition != "clean" {
				v.complain(join(p, "condition"), "%q, but backend %s has none; allowed: leave it out", s.Condition,
					s.Backend)
			}
			if given("slowdown") && s.Slowdown != 1 {
				v.complain(join(p, "slowdown"), "%d, but backend %s has none; allowed: leave it out", s.Slowdown,
					s.Backend)
			}
		}
		if sizeOK && s.Size != 0 && (s.Size < label.MinDeviceBytes || s.Size%sizeAlign != 0) {
			v.complain(join(p, "size"), "%s is not a drive's size; allowed: a multiple of %s, %s or more", s.Size,
				sizeAlign, Bytes(label.MinDeviceBytes))
		}
	}
}

// The least that a swap area needs to be of use, and how many there can be: a namespace keeps a list.
const (
	minSwap       = Bytes(16 << 20)
	maxSwapDrives = 32
)

// swap checks the swap area of a drive, the n-th.
func (v *validator) swap(path string, s SSD, n int) {
	switch {
	case !v.ok(path):
	case s.KVSwap < minSwap || s.KVSwap%label.AlignBytes != 0:
		v.complain(path, "%s is not the size of a swap area; allowed: 0, or a multiple of %s, %s or more", s.KVSwap,
			Bytes(label.AlignBytes), minSwap)
	case len(v.c.SSDs) == 1:
		v.complain(path, "%s, but there is no other drive whose namespaces could use it; allowed: 0, or configure "+
			"another drive", s.KVSwap)
	case n > maxSwapDrives:
		v.complain(path, "%s, but %d drives before have a swap area; allowed: at most %d", s.KVSwap, maxSwapDrives,
			maxSwapDrives)
	}
}

// printable reports ASCII without control characters.
func printable(s string) bool {
	for _, r := range s {
		if r < 0x20 || r > 0x7e {
			return false
		}
	}
	return true
}

var uuidForm = regexp.MustCompile(`^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$`)

func (v *validator) subsystems() {
	nqns, uuids := v.unique("subsystem NQN"), v.unique("UUID")
	ssds := map[string]bool{}
	var ssdNames []string
	for _, s := range v.c.SSDs {
		ssds[s.Name] = true
		ssdNames = append(ssdNames, s.Name)
	}
	for i, s := range v.c.Subsystems {
		p := index("subsystems", i)
		if !v.ok(p) {
			continue
		}
		if path := join(p, "nqn"); s.NQN == nvme.DiscoveryNQN {
			v.complain(path, "%q is the discovery service's own name; allowed: any other NQN", s.NQN)
		} else {
			v.ownNQN(path, s.NQN)
			nqns.add(path, s.NQN)
		}
		if path := join(p, "serial"); v.ok(path) && (len(s.Serial) > 20 || !printable(s.Serial)) {
			v.complain(path, "%q is not a serial number; allowed: 1 to 20 ASCII characters, or leave it out", s.Serial)
		}
		if path := join(p, "model"); v.ok(path) && (s.Model == "" || len(s.Model) > 40 || !printable(s.Model)) {
			v.complain(path, "%q is not a model number; allowed: 1 to 40 ASCII characters", s.Model)
		}
		v.hosts(join(p, "hosts"), s.Hosts)
		if s.AllowAnyHost && len(s.Hosts) > 0 {
			v.complain(join(p, "allow_any_host"), "true, but hosts names %d; allowed: one of the two", len(s.Hosts))
		}
		if !s.AllowAnyHost && len(s.Hosts) == 0 && v.ok(join(p, "hosts")) && v.ok(join(p, "allow_any_host")) {
			v.complain(p, "no host may connect: neither hosts nor allow_any_host is given; allowed: one of the two, "+
				"or leave the subsystem out")
		}
		nsids := v.unique("NSID of a subsystem")
		for j, n := range s.Namespaces {
			np := index(join(p, "namespaces"), j)
			if !v.ok(np) {
				continue
			}
			if v.ok(join(np, "nsid")) {
				nsids.add(join(np, "nsid"), strconv.FormatUint(uint64(n.NSID), 10))
			}
			if path := join(np, "ssd"); v.ok(path) && !ssds[n.SSD] {
				v.complain(path, "%q is no ssd; allowed: %s", n.SSD,
					anyOf(ssdNames, "a name under ssds, which has none"))
			}
			if path := join(np, "size"); v.ok(path) && n.Size%label.AlignBytes != 0 {
				v.complain(path, "%s does not fit the drive's table of extents; allowed: a multiple of %s", n.Size,
					Bytes(label.AlignBytes))
			}
			if path := join(np, "size"); v.ok(path) && n.Type == "kv" && n.Size < minKV {
				v.complain(path, "%s is too small for type kv; allowed: %s or more", n.Size, minKV)
			}
			if path := join(np, "kv"); n.Type != "kv" && v.ok(join(np, "type")) && n.KV != defaultKV() {
				v.complain(path, "has settings, but type %s has no keys; allowed: leave it out, or type kv", n.Type)
			}
			v.hosts(join(np, "hosts"), n.Hosts)
			v.visible(join(np, "hosts"), s, n)
			if path := join(np, "uuid"); v.ok(path) && n.UUID != "" {
				if !uuidForm.MatchString(n.UUID) || strings.Trim(n.UUID, "0-") == "" {
					v.complain(path, "%q is not a UUID; allowed: as in 6f8b1c1e-6c29-4b5a-9a55-0d7f3f4f2c11, not "+
						"all zero", n.UUID)
				} else {
					uuids.add(path, strings.ToLower(n.UUID))
				}
			}
		}
	}
}

// anyOf lists what is allowed, or says none if nothing is.
func anyOf(names []string, none string) string {
	if len(names) == 0 {
		return none
	}
	return strings.Join(names, ", ")
}

// Background is the name of the tenant that compaction, checkpoints and recovery of key-value stores belong to.
const Background = "kv-background"

// Anonymous is the name of the tenant that hosts belong to which connect with an empty host NQN.
const Anonymous = "anonymous"

// minKV is the least that a key-value namespace needs: room for its logs and what it keeps back.
const minKV = Bytes(64 << 20)

// nqn checks a name that others chose: whatever Linux accepts.
func (v *validator) nqn(path, s string) {
	if !v.ok(path) {
		return
	}
	if err := nvme.CheckNQN(s); err != nil {
		v.complain(path, "%v", err)
	}
}

// newNQNForm is the form of an NQN (NVMe Base 2.0, section 4.5). It is demanded of the
// names that we give, because other tools demand it.
var newNQNForm = regexp.MustCompile(`^nqn\.[0-9]{4}-(0[1-9]|1[0-2])\.[^\s:]+:[^\s]+$`)

func (v *validator) ownNQN(path, s string) {
	if v.ok(path) && (nvme.CheckNQN(s) != nil || !newNQNForm.MatchString(s)) {
		v.complain(path, "%q is not a subsystem's NQN; allowed: nqn.YYYY-MM.reverse.domain:text, at most %d bytes "+
			"of UTF-8", s, nvme.MaxNQNLen)
	}
}

func (v *validator) hosts(path string, hosts []string) {
	if !v.ok(path) {
		return
	}
	u := v.unique("host")
	for i, h := range hosts {
		v.nqn(index(path, i), h)
		u.add(index(path, i), h)
	}
}

// visible checks that who may see a namespace may connect at all.
func (v *validator) visible(path string, s Subsystem, n Namespace) {
	if s.AllowAnyHost || len(s.Hosts) == 0 {
		return
	}
	may := map[string]bool{}
	for _, h := range s.Hosts {
		may[h] = true
	}
	for i, h := range n.Hosts {
		if p := index(path, i); v.ok(p) && !may[h] {
			v.complain(p, "%q may not connect to the subsystem; allowed: one of its hosts", h)
		}
	}
}

// extents checks that the namespaces of each drive lie on it side by side.
func (v *validator) extents() {
	type need struct {
		sum   Bytes
		names []string
		last  string // path of the last one's size
		over  bool
	}
	on := map[string]*need{}
	for i, s := range v.c.SSDs {
		if p := index("ssds", i); s.KVSwap > 0 && v.ok(p) && v.ok(join(p, "kv_swap")) && on[s.Name] == nil {
			on[s.Name] = &need{sum: s.KVSwap,
				names: []string{fmt.Sprintf("its swap area (%s, %s)", s.KVSwap, v.line(join(p, "kv_swap")))},
				last:  join(p, "kv_swap")}
		}
	}
	for i, s := range v.c.Subsystems {
		for j, n := range s.Namespaces {
			p := index(join(index("subsystems", i), "namespaces"), j)
			if !v.ok(p) || !v.ok(join(p, "size")) || !v.ok(join(p, "ssd")) {
				continue
			}
			d := on[n.SSD]
			if d == nil {
				d = &need{}
				on[n.SSD] = d
			}
			// Each size fits 63 bits, so a sum that left them is below what it was.
			d.over = d.over || d.sum+n.Size < d.sum
			d.sum += n.Size
			d.names = append(d.names, fmt.Sprintf("%s nsid %d (%s, %s)", s.NQN, n.NSID, n.Size, v.line(p)))
			d.last = join(p, "size")
		}
	}
	for i, s := range v.c.SSDs {
		d := on[s.Name]
		if d == nil {
			continue
		}
		room := Bytes(label.DataEnd(int64(s.Size))-label.AlignBytes) / label.AlignBytes * label.AlignBytes
		if s.Size > 0 && v.ok(join(index("ssds", i), "size")) && (d.over || d.sum > room) {
			what := "the namespaces"
			if s.KVSwap > 0 {
				what = "namespaces and swap area"
			}
			if len(d.names) == 1 {
				v.complain(d.last, "%s does not fit on ssd %s; allowed: up to %s, which is its size without the labels",
					d.names[0], s.Name, room)
			} else {
				v.complain(d.last, "%s on ssd %s would overlap, they do not fit side by side: %s; allowed: %s "+
					"together, which is its size without the labels", what, s.Name, strings.Join(d.names, ", "), room)
			}
		}
		if len(d.names) > label.MaxExtents {
			v.complain(d.last, "%d namespaces and swap areas on ssd %s; allowed: at most %d on one drive", len(d.names),
				s.Name, label.MaxExtents)
		}
	}
}

// tenants checks that each tenant is told from others and each host belongs to one.
func (v *validator) tenants() {
	names, hosts := v.unique("tenant name"), v.unique("host in one tenant")
	for i, t := range v.c.Tenants {
		p := index("tenants", i)
		if !v.ok(p) {
			continue
		}
		path := join(p, "name")
		v.name(path, t.Name)
		if v.ok(path) && t.Name == Background {
			v.complain(path, "%q is the name of the work of key-value stores in metrics; allowed: another name", t.Name)
		}
		if v.ok(path) && t.Name == Anonymous {
			v.complain(path, "%q is the name of hosts without an NQN in metrics; allowed: another name", t.Name)
		}
		if v.ok(path) && (t.Name == "other" || strings.HasPrefix(t.Name, "nqn.")) {
			v.complain(path, "%q is the name of hosts without a tenant in metrics; allowed: another name", t.Name)
		}
		names.add(path, t.Name)
		path = join(p, "hosts")
		if v.ok(path) && len(t.Hosts) == 0 {
			v.complain(path, "no host; allowed: one or more host NQNs")
		}
		if v.ok(path) {
			for k, h := range t.Hosts {
				v.nqn(index(path, k), h)
				hosts.add(index(path, k), h)
			}
		}
	}
}

func (v *validator) limits() {
	l := v.c.Limits
	if l.MDTS&(l.MDTS-1) != 0 && v.ok("limits.mdts") {
		v.complain("limits.mdts", "%s is not a power of two; allowed: 8KiB, 16KiB, ... 16MiB", l.MDTS)
	}
	if l.InCapsuleBytes%16 != 0 && v.ok("limits.in_capsule_bytes") {
		v.complain("limits.in_capsule_bytes", "%s is not a multiple of 16; allowed: a multiple of 16", l.InCapsuleBytes)
	}
	atMost := func(a string, x int64, b string, y int64, show func(int64) string) {
		if a, b = join("limits", a), join("limits", b); v.ok(a) && v.ok(b) && x > y {
			v.complain(a, "%s is more than %s; allowed: at most %s", show(x), b, show(y))
		}
	}
	size := func(n int64) string { return Bytes(n).String() }
	count := func(n int64) string { return strconv.FormatInt(n, 10) }
	if v.ok("limits.mdts") && v.ok("limits.buffers") && l.Buffers < 4*l.MDTS {
		v.complain("limits.buffers", "%s holds less than four transfers of limits.mdts %s; allowed: %s or more",
			l.Buffers, l.MDTS, 4*l.MDTS)
	}
	atMost("in_capsule_bytes", int64(l.InCapsuleBytes), "receive_buffer", int64(l.ReceiveBuffer-256), size)
	atMost("connections_per_host", int64(l.ConnectionsPerHost), "connections", int64(l.Connections), count)
	atMost("pending_per_address", int64(l.PendingPerAddress), "pending_connections", int64(l.PendingConnections), count)
	atMost("discovery_per_address", int64(l.DiscoveryPerAddress), "discovery_controllers",
		int64(l.DiscoveryControllers), count)
}
