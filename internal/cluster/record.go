package cluster

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"strings"

	"jbofd/internal/cluster/view"
	"jbofd/internal/uuid"
)

// The keys below /jbofd/v1/<cluster>/. The driver adds the prefix.
const (
	keyConfig  = "config"
	keyManager = "manager"
	keyStamp   = "stamp"
	keyView    = "view"
	keyNodes   = "nodes/"
)

// All records begin with the same header; integers are little endian, strings have a uvarint of their length in front.
//
//	0  magic   4 B        "JBCC" config    u16 protocol, 16 B UUID, u8 replicas, uvarint n, n names of nodes,
//	                      uvarint n, n times: u32 range, u32 epoch of its chain, u32 commands,
//	                      uvarint n, n u64 incarnations, uvarint n, n times: name, u64 epoch,
//	                      u32 length of the longest value
//	4  CRC32C  u32        "JBCM" manager   u64 term, u64 incarnation, name, address
//	8  version u16, 1     "JBCS" stamp     u64 term, u64 count
//	                      "JBCN" node      u16 protocol, u64 incarnation, domain, address,
//	                                       uvarint n, n times: 16 B UUID, u32 weight
//	                      "JBCV" view      uvarint n, n u64 admitted incarnations, the record of package view
//
// The CRC is that of everything else. The version is that of the layout.
const (
	magicConfig  = "JBCC"
	magicManager = "JBCM"
	magicStamp   = "JBCS"
	magicNode    = "JBCN"
	magicView    = "JBCV"

	recordVersion = 1
	headerBytes   = 10
	crcAt         = 4
	versionAt     = 8

	partitionBytes = 20
)

var (
	le         = binary.LittleEndian
	castagnoli = crc32.MakeTable(crc32.Castagnoli)
)

// Settings is the record of the cluster as a whole. An operator's commands change it.
type Settings struct {
	Cluster  uuid.UUID
	Protocol uint16
	Replicas int
	// Out has the names of nodes that are to have no ranges.
	Out []string
	// Losses are halted ranges whose data an operator has given up. An entry is ignored once its chain has another
	// epoch. It counts for 300 s (acceptedNS) after the last command that names it, and only for processes that were
	// running then. See AcceptLoss.
	Losses []Loss
	// Lost are processes of which an operator says that they have ended and do not come back: another node may become
	// manager without waiting for them.
	Lost []Incarnation
	// Forgotten are nodes that are to be removed from the members, or were removed.
	Forgotten []Forgotten
	// ValueBytes is the length of the longest value in bytes, the same for all nodes from the beginning: a node with a
	// smaller limit could not hold copies of longer values. 0: each node has its own limit.
	ValueBytes uint32
}

// Loss is a range with the epoch of its chain (View.ChainEpochs).
type Loss struct {
	Range, ChainEpoch uint32
	// Commands is how many commands have named it. With each, the time for which it counts begins anew.
	Commands uint32
}

// AcceptLoss gives up the data of a range whose chain has an epoch. If they were given up before, the time of that loss
// begins anew, and that of other losses does not.
func (s *Settings) AcceptLoss(r, epoch uint32) {
	for i := range s.Losses {
		if l := &s.Losses[i]; l.Range == r && l.ChainEpoch == epoch {
			l.Commands++
			return
		}
	}
	s.Losses = append(s.Losses, Loss{Range: r, ChainEpoch: epoch, Commands: 1})
}

// Map is a view and the processes that it admits. It is never changed.
type Map struct {
	*view.View
	// Admitted has the process of each node that may have authority under this view, or become manager; 0: none.
	Admitted []Incarnation
}

// admits reports whether a process is admitted.
func (m *Map) admits(i Incarnation) bool {
	for _, a := range m.Admitted {
		if a == i && i != 0 {
			return true
		}
	}
	return false
}

// admitsEarlier reports whether an earlier process of the same node is admitted.
func (m *Map) admitsEarlier(i Incarnation) bool {
	for _, a := range m.Admitted {
		if i.follows(a) {
			return true
		}
	}
	return false
}

// nodeRecord is the registration of a node.
type nodeRecord struct {
	protocol        uint16
	incarnation     Incarnation
	domain, address string
	partitions      []Partition
}

// managerRecord says who is the manager.
type managerRecord struct {
	term uint64
	id   Identity
}

func begin(magic string) []byte {
	b := make([]byte, headerBytes, 64)
	copy(b, magic)
	le.PutUint16(b[versionAt:], recordVersion)
	return b
}

func seal(b []byte) []byte {
	le.PutUint32(b[crcAt:], checksum(b))
	return b
}

func checksum(b []byte) uint32 {
	return crc32.Update(crc32.Checksum(b[:crcAt], castagnoli), castagnoli, b[crcAt+4:])
}

func appendString(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

// open checks the header of a record.
//
// Errors: ErrForeign naming what is wrong.
func open(magic string, b []byte) (*decoder, error) {
	if len(b) < headerBytes || string(b[:4]) != magic {
		return nil, fmt.Errorf("%w: a record of %d bytes does not begin with %q", ErrForeign, len(b), magic)
	}
	if got := le.Uint16(b[versionAt:]); got != recordVersion {
		return nil, fmt.Errorf("%w: version of record %s is %d, this program knows %d", ErrProtocol, magic, got,
			recordVersion)
	}
	if got, want := le.Uint32(b[crcAt:]), checksum(b); got != want {
		return nil, fmt.Errorf("%w: CRC32C of record %s is %#08x, want %#08x", ErrForeign, magic, got, want)
	}
	return &decoder{magic: magic, b: b[headerBytes:]}, nil
}

// decoder takes fields from the front of b. At its end it returns zeroes and is bad.
type decoder struct {
	magic string
	b     []byte
	bad   bool
}

func (d *decoder) take(n uint64) []byte {
	if n > uint64(len(d.b)) {
		d.bad, d.b = true, nil
		return make([]byte, min(n, 16))
	}
	out := d.b[:n]
	d.b = d.b[n:]
	return out
}

func (d *decoder) u16() uint16 { return le.Uint16(d.take(2)) }
func (d *decoder) u32() uint32 { return le.Uint32(d.take(4)) }
func (d *decoder) u64() uint64 { return le.Uint64(d.take(8)) }

func (d *decoder) uuid() (u uuid.UUID) {
	copy(u[:], d.take(16))
	return u
}

// count returns a number of things that take at least size bytes each.
func (d *decoder) count(size int) int {
	x, n := binary.Uvarint(d.b)
	if n <= 0 || x > uint64(len(d.b)/size) {
		d.bad, d.b = true, nil
		return 0
	}
	d.b = d.b[n:]
	return int(x)
}

// name returns a string of at most view.MaxName bytes.
func (d *decoder) name() string {
	n := d.count(1)
	d.bad = d.bad || n > view.MaxName
	return string(d.take(uint64(n)))
}

func (d *decoder) end() error {
	if d.bad || len(d.b) > 0 {
		return fmt.Errorf("%w: a length or a value in record %s is not valid", ErrForeign, d.magic)
	}
	return nil
}

// Encode returns the record of the settings.
func (s *Settings) Encode() []byte {
	b := le.AppendUint16(begin(magicConfig), s.Protocol)
	b = append(append(b, s.Cluster[:]...), byte(s.Replicas))
	b = binary.AppendUvarint(b, uint64(len(s.Out)))
	for _, name := range s.Out {
		b = appendString(b, name)
	}
	b = binary.AppendUvarint(b, uint64(len(s.Losses)))
	for _, l := range s.Losses {
		b = le.AppendUint32(le.AppendUint32(le.AppendUint32(b, l.Range), l.ChainEpoch), l.Commands)
	}
	b = binary.AppendUvarint(b, uint64(len(s.Lost)))
	for _, i := range s.Lost {
		b = le.AppendUint64(b, uint64(i))
	}
	b = binary.AppendUvarint(b, uint64(len(s.Forgotten)))
	for _, f := range s.Forgotten {
		b = le.AppendUint64(appendString(b, f.Name), uint64(f.Epoch))
	}
	return seal(le.AppendUint32(b, s.ValueBytes))
}

// DecodeSettings returns the settings of a record.
//
// Errors: ErrForeign, ErrProtocol.
func DecodeSettings(b []byte) (*Settings, error) {
	d, err := open(magicConfig, b)
	if err != nil {
		return nil, err
	}
	s := &Settings{Protocol: d.u16()}
	if s.Protocol != Protocol {
		return nil, fmt.Errorf("%w: the cluster has version %d, this program has %d", ErrProtocol, s.Protocol, Protocol)
	}
	s.Cluster, s.Replicas = d.uuid(), int(d.take(1)[0])
	for range d.count(1) {
		s.Out = append(s.Out, d.name())
	}
	for range d.count(12) {
		s.Losses = append(s.Losses, Loss{Range: d.u32(), ChainEpoch: d.u32(), Commands: d.u32()})
	}
	for range d.count(8) {
		s.Lost = append(s.Lost, Incarnation(d.u64()))
	}
	for range d.count(9) {
		s.Forgotten = append(s.Forgotten, Forgotten{Name: d.name(), Epoch: view.Epoch(d.u64())})
	}
	s.ValueBytes = d.u32()
	if s.Replicas < 1 || s.Replicas > view.MaxReplicas || s.Cluster.IsZero() {
		return nil, fmt.Errorf("%w: cluster %s with %d replicas, want a UUID and 1 to 5", ErrForeign, s.Cluster,
			s.Replicas)
	}
	return s, d.end()
}

// Encode returns the record of the map.
func (m *Map) Encode() []byte {
	b := binary.AppendUvarint(begin(magicView), uint64(len(m.Admitted)))
	for _, i := range m.Admitted {
		b = le.AppendUint64(b, uint64(i))
	}
	return seal(append(b, m.View.Encode()...))
}

// DecodeMap returns the map of a record.
//
// Errors: ErrForeign, ErrProtocol, those of view.Decode.
func DecodeMap(b []byte) (*Map, error) {
	d, err := open(magicView, b)
	if err != nil {
		return nil, err
	}
	m := &Map{Admitted: make([]Incarnation, d.count(8))}
	for i := range m.Admitted {
		m.Admitted[i] = Incarnation(d.u64())
	}
	if m.View, err = view.Decode(d.b); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrForeign, err)
	}
	if len(m.Admitted) != len(m.Nodes) {
		return nil, fmt.Errorf("%w: %d admitted processes for %d nodes", ErrForeign, len(m.Admitted), len(m.Nodes))
	}
	return m, nil
}

func (n *nodeRecord) encode() []byte {
	b := le.AppendUint16(begin(magicNode), n.protocol)
	b = le.AppendUint64(b, uint64(n.incarnation))
	b = appendString(appendString(b, n.domain), n.address)
	b = binary.AppendUvarint(b, uint64(len(n.partitions)))
	for _, p := range n.partitions {
		b = le.AppendUint32(append(b, p.ID[:]...), p.Weight)
	}
	return seal(b)
}

func decodeNode(b []byte) (*nodeRecord, error) {
	d, err := open(magicNode, b)
	if err != nil {
		return nil, err
	}
	n := &nodeRecord{protocol: d.u16(), incarnation: Incarnation(d.u64()), domain: d.name(), address: d.name()}
	for range d.count(partitionBytes) {
		n.partitions = append(n.partitions, Partition{ID: d.uuid(), Weight: d.u32()})
	}
	return n, d.end()
}

func (m *managerRecord) encode() []byte {
	b := le.AppendUint64(le.AppendUint64(begin(magicManager), m.term), uint64(m.id.Incarnation))
	return seal(appendString(appendString(b, m.id.Name), m.id.Address))
}

func decodeManager(b []byte) (*managerRecord, error) {
	d, err := open(magicManager, b)
	if err != nil {
		return nil, err
	}
	m := &managerRecord{term: d.u64(), id: Identity{Incarnation: Incarnation(d.u64())}}
	m.id.Name, m.id.Address = d.name(), d.name()
	return m, d.end()
}

// encodeStamp returns the record that a manager renews.
func encodeStamp(term, count uint64) []byte {
	return seal(le.AppendUint64(le.AppendUint64(begin(magicStamp), term), count))
}

// Init returns the transaction that makes a cluster: it fails if there is one. ranges is the number of ranges, a power
// of two.
//
// Errors: view.ErrInvalid.
func Init(s Settings, hashSeed uint64, ranges int) (compare []Compare, put []Put, err error) {
	s.Protocol = Protocol
	if ranges < view.MinRanges || ranges > view.MaxRanges { // before memory is taken for so many
		return nil, nil, fmt.Errorf("%w: ranges are %d, must be a power of two from %d to %d", view.ErrInvalid, ranges,
			view.MinRanges, view.MaxRanges)
	}
	v := &view.View{Cluster: s.Cluster, Epoch: 1, Replicas: s.Replicas, HashSeed: hashSeed,
		Chains: make([]view.Chain, ranges), ChainEpochs: make([]uint32, ranges)}
	if err := v.Check(); err != nil {
		return nil, nil, err
	}
	return []Compare{{Key: keyConfig}, {Key: keyView}},
		[]Put{{Key: keyConfig, Value: s.Encode()}, {Key: keyView, Value: (&Map{View: v}).Encode()}}, nil
}

// Records are those of a cluster as a whole.
type Records struct {
	Settings *Settings
	Map      *Map
	// Registered are the names of the nodes that run, or have ended less than five leases ago.
	Registered []string
	// revision is that of the settings.
	revision int64
}

// ReadRecords returns the records among the keys of a cluster.
//
// Errors: ErrNoCluster, ErrForeign, ErrProtocol.
func ReadRecords(keys []KeyValue) (*Records, error) {
	r := &Records{}
	for _, kv := range keys {
		var err error
		switch kv.Key {
		case keyConfig:
			r.Settings, err = DecodeSettings(kv.Value)
			r.revision = kv.Revision
		case keyView:
			r.Map, err = DecodeMap(kv.Value)
		default:
			if name, ok := strings.CutPrefix(kv.Key, keyNodes); ok {
				r.Registered = append(r.Registered, name)
			}
		}
		if err != nil {
			return nil, err
		}
	}
	switch {
	case r.Settings == nil || r.Map == nil:
		return nil, errNoRecords
	case r.Settings.Cluster != r.Map.Cluster:
		return nil, fmt.Errorf("%w: the view is of cluster %s, the settings are of %s", ErrForeign, r.Map.Cluster,
			r.Settings.Cluster)
	}
	return r, nil
}

// Put returns the transaction that writes the settings, unless others have changed them since they were read.
func (r *Records) Put() ([]Compare, []Put) {
	return []Compare{{keyConfig, r.revision}}, []Put{{Key: keyConfig, Value: r.Settings.Encode()}}
}

var errNoRecords = fmt.Errorf("%w: it has no record %q or %q", ErrNoCluster, keyConfig, keyView)
