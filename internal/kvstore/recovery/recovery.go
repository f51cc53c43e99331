// Package recovery reads a key-value partition and says what is in it. It writes nothing.
//
//	superblocks ──> headers of all chunks ──> checkpoint ──> key log since then ──> ends of the logs
//	                                                                          └──> whole key log ──┘
//
// The key log is played in order, which brings the SegTbl up to date, and how many bytes live in each chunk: a segment says
// what it has changed (format.Change). Only where one does not, because the device failed or there was too much to say, is all of the
// key log read to count anew, when it is known which segments are the newest.
//
// A Machine has no I/O: it asks for reads and is told when they are done. It reads a chunk at a time, in pieces of
// which all are asked for at once.
package recovery

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"jbofd/internal/kvstore/chunks"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/segtbl"
)

// Logs in the order of a format.Summary.
const (
	KeyLog = iota
	UserLog
	MovedLog
	NumLogs
)

// Read is what a Machine asks for. Buf belongs to the device until Done of the Slot.
type Read struct {
	Slot   int32
	Offset int64
	Buf    []byte
}

// Config of a Machine.
type Config struct {
	// PartitionBytes is the length of the partition, BlockSize the device's.
	PartitionBytes int64
	BlockSize      int
	// SegTbl is where the table will be.
	SegTbl []byte
	// Alloc returns n bytes for I/O.
	Alloc func(n int) []byte
}

// Image is what a partition holds.
type Image struct {
	// Super is the superblock that counts. OneCopy: the other one does not tell of the same checkpoint.
	Super   format.Superblock
	OneCopy bool
	// Pool is its chunks: Free, Sealed, or Open if a log goes on in it or it is the checkpoint's.
	Pool *chunks.Pool
	// Table is the SegTbl.
	Table segtbl.Table
	// Objects is the number of keys.
	Objects int64
	// Version is what the next record gets.
	Version uint64
	// Checkpoint are the chunks of the checkpoint, in order.
	Checkpoint []int32
	// Tails are where the logs go on.
	Tails [NumLogs]Tail
	// Buf is memory of the size of a chunk that is not needed any more.
	Buf []byte
}

// Tail is the end of a log: a chunk, -1 for none, and the offset in it, in whole blocks.
type Tail struct {
	Chunk int32
	End   int64
}

type stage uint8

const (
	begin stage = iota
	readSupers
	readHeaders
	readPages
	replay
	verify
	count
	readTails
	done
)

const (
	// headerReads is how many chunk headers are read at once.
	headerReads = 128
	// pieceBytes is how much of a chunk is read with one read.
	pieceBytes = 256 << 10
)

const none = -1

// Machine opens a partition.
type Machine struct {
	cfg     Config
	stage   stage
	err     error
	image   Image
	reads   []Read
	pending int
	step    int
	sbs     [2][]byte
	// at is where in its chunk the part in image.Buf begins, have how long that is.
	at, have int64
	// next is the chunk whose header is asked for next, of those that have been.
	next int32
	of   [headerReads]int32
	// found is what the chunks' headers say.
	found   []found
	summary [format.SummaryBytes]byte
	// partial collects a chunk's entry that crosses pages.
	partial []byte
	// keys are the chunks of the key log to be played or counted, in order.
	keys []int32
	// gaps are the versions that were not found, as far as they may yet turn out to be damaged.
	gaps []gap
	// unsaid: a segment did not say what it has changed.
	unsaid  bool
	changes []format.Change
	// cut is the first version that does not count because it, or its value, was lost with the power.
	cut uint64
	// last is the last version that was found.
	last uint64
	// values are the new ones of the chunk that was played, still to be looked at; looked of them are being read.
	values []value
	looked int
}

type gap struct{ first, last uint64 }

// value is where the value of a segment of that version must be.
type value struct {
	version, hash uint64
	place         int64
	length        int
	buf           []byte
}

type found struct {
	epoch uint32
	kind  format.Kind
	// damaged is what is wrong with a header that must have been one of the partition's.
	damaged error
	// reborn: it was opened since the checkpoint, and nothing has been found that was committed since then. What dies in it was there before.
	reborn bool
}

// New makes a Machine that reads a partition.
func New(cfg Config) *Machine {
	return &Machine{cfg: cfg, cut: 1 << 63, image: Image{Table: segtbl.New(cfg.SegTbl), Version: 1}}
}

// Next appends the reads that the Machine wants done.
func (m *Machine) Next(dst []Read) []Read {
	if m.stage == begin {
		m.stage = readSupers
		for i := range m.sbs {
			m.sbs[i] = m.cfg.Alloc(format.SuperblockBytes)
			m.read(int32(i), format.SuperblockOffset(uint64(i+1), m.cfg.PartitionBytes), m.sbs[i])
		}
	}
	dst = append(dst, m.reads...)
	m.reads = m.reads[:0]
	return dst
}

// Done takes the completion of a read.
func (m *Machine) Done(slot int32, err error) {
	m.pending--
	if m.err != nil {
		return
	}
	if err != nil {
		m.err = err
		return
	}
	switch {
	case m.stage == readSupers:
		if m.pending == 0 {
			m.chooseSuper()
		}
	case m.stage == readHeaders:
		m.headerRead(slot)
	case m.pending > 0:
	case m.stage == readPages:
		m.pagesRead()
	case m.stage == readTails:
		m.tailRead()
	case m.stage == verify:
		m.verified()
	default:
		m.play()
	}
}

// Image returns what was read, when all is; before that nil.
func (m *Machine) Image() *Image {
	if m.stage != done || m.err != nil {
		return nil
	}
	return &m.image
}

// Err says why the partition cannot be opened, when nothing is under way any more.
//
// Errors: what the device said; ErrBlank, ErrVersion and ErrCorrupt of format.
func (m *Machine) Err() error {
	if m.pending > 0 {
		return nil
	}
	return m.err
}

// Progress says what is being read, and how far: the Machine has read so many of so many.
func (m *Machine) Progress() (what string, read, of int) {
	switch m.stage {
	case begin, readSupers:
		return "superblocks", 0, 2
	case readHeaders:
		return "chunk headers", int(m.next), len(m.found)
	case readPages:
		return "pages of the checkpoint", m.step, int(m.image.Super.Pages())
	case replay, verify:
		return "chunks of the key log since the checkpoint", m.step, len(m.keys)
	case count:
		return "chunks of the key log to count them", m.step, len(m.keys)
	}
	return "ends of logs", min(m.step, NumLogs), NumLogs
}

func (m *Machine) read(slot int32, offset int64, buf []byte) {
	m.pending++
	m.reads = append(m.reads, Read{Slot: slot, Offset: offset, Buf: buf})
}

// load reads a part of a chunk, whole blocks, into image.Buf.
func (m *Machine) load(i int32, from, to int64) {
	m.at, m.have = from, to-from
	for n := int64(0); n < m.have; n += pieceBytes {
		m.read(0, m.image.Pool.Start(i)+from+n, m.image.Buf[n:min(n+pieceBytes, m.have)])
	}
}

// loaded is what was.
func (m *Machine) loaded() []byte { return m.image.Buf[:m.have] }

// chooseSuper takes the sound superblock of the higher generation.
func (m *Machine) chooseSuper() {
	var errs [2]error
	best := none
	for i := range m.sbs {
		sb := format.Superblock(m.sbs[i])
		if errs[i] = sb.Check(m.cfg.PartitionBytes); errs[i] == nil && (best == none || sb.Generation() > format.Superblock(m.sbs[best]).Generation()) {
			best = i
		}
	}
	// A newer version beside an older one: the newer program was the last.
	for _, err := range errs {
		if errors.Is(err, format.ErrVersion) {
			m.err = err
			return
		}
	}
	if best == none {
		m.err = fmt.Errorf("first copy: %w; second copy: %w", errs[0], errs[1])
		return
	}
	m.image.Super = m.sbs[best]
	m.image.OneCopy = errs[1-best] != nil || format.Superblock(m.sbs[1-best]).Checkpoint() != m.image.Super.Checkpoint()
	if got := m.image.Super.BlockSize(); got < m.cfg.BlockSize {
		m.err = fmt.Errorf("made for blocks of %d bytes, the device's have %d", got, m.cfg.BlockSize)
		return
	}
	m.cfg.BlockSize = m.image.Super.BlockSize()
	m.image.Pool = chunks.New(m.image.Super)
	m.image.Buf = m.cfg.Alloc(int(m.image.Pool.Bytes()))
	m.found = make([]found, len(m.image.Pool.Chunks))
	m.stage = readHeaders
	for i := range min(headerReads, len(m.found), len(m.image.Buf)/m.cfg.BlockSize) {
		m.readHeader(int32(i))
	}
	if len(m.found) == 0 {
		m.err = fmt.Errorf("superblock: %w: a partition of %d bytes has no chunk of %d", format.ErrCorrupt, m.cfg.PartitionBytes, m.image.Super.ChunkBytes())
	}
}

func (m *Machine) readHeader(slot int32) {
	m.of[slot] = m.next
	m.read(slot, m.image.Pool.Start(m.next), m.headerBuf(slot))
	m.next++
}

func (m *Machine) headerBuf(slot int32) []byte {
	return m.image.Buf[int(slot)*m.cfg.BlockSize:][:m.cfg.BlockSize]
}

// headerRead takes a chunk's header. If nothing in it looks like ours, nothing in the chunk counts. A block is written
// whole or not at all, so what is ours and not sound is damaged.
func (m *Machine) headerRead(slot int32) {
	i, sb := m.of[slot], m.image.Super
	h := format.ChunkHeader(m.headerBuf(slot)[:format.ChunkHeaderBytes])
	err := h.Check()
	if errors.Is(err, format.ErrCorrupt) && (h.Begins() || h.UUID() == sb.UUID()) {
		m.found[i] = found{epoch: h.Epoch(), damaged: err}
	}
	if err == nil && h.UUID() == sb.UUID() {
		m.found[i] = found{epoch: h.Epoch(), kind: h.Kind()}
		m.sawEpoch(h.Epoch())
		if n := int(h.Index()); h.Kind() == format.Checkpoint && h.Checkpoint() == sb.Checkpoint() && n < len(m.found) {
			for len(m.image.Checkpoint) <= n {
				m.image.Checkpoint = append(m.image.Checkpoint, none)
			}
			// One that was not finished before a crash may have had the same id.
			if other := m.image.Checkpoint[n]; other == none || m.found[other].epoch < h.Epoch() {
				m.image.Checkpoint[n] = i
			}
		}
	}
	if int(m.next) < len(m.found) {
		m.readHeader(slot)
		return
	}
	if m.pending > 0 {
		return
	}
	if sb.Checkpoint() == 0 {
		m.image.Checkpoint = nil
		m.judge()
		return
	}
	if want := sb.CheckpointChunks(); len(m.image.Checkpoint) != want || slices.Contains(m.image.Checkpoint, none) {
		m.err = fmt.Errorf("checkpoint %d: %w: chunks are %v, want %d", sb.Checkpoint(), format.ErrCorrupt, m.image.Checkpoint, want)
		return
	}
	m.stage = readPages
	m.readPages()
}

func (m *Machine) sawEpoch(epoch uint32) {
	m.image.Pool.LastEpoch = max(m.image.Pool.LastEpoch, epoch)
}

// readPages reads those of the next chunk of the checkpoint.
func (m *Machine) readPages() {
	sb := m.image.Super
	chunk, from := sb.PagePlace(uint32(m.step))
	to := from
	for page := uint32(m.step); page < sb.Pages(); page++ {
		c, offset := sb.PagePlace(page)
		if c != chunk {
			break
		}
		to = offset + format.PageBytes
	}
	m.load(m.image.Checkpoint[chunk], from, to)
}

func (m *Machine) pagesRead() {
	for all := m.loaded(); len(all) > 0; all = all[format.PageBytes:] {
		if m.takePage(format.Page(all[:format.PageBytes])); m.err != nil {
			return
		}
		m.step++
	}
	if uint32(m.step) < m.image.Super.Pages() {
		m.readPages()
		return
	}
	m.judge()
}

// takePage takes a page of the checkpoint.
func (m *Machine) takePage(p format.Page) {
	if m.err = p.Check(m.image.Super.Checkpoint(), uint32(m.step)); m.err != nil {
		return
	}
	data := p.Payload()
	offset := int64(m.step) * format.PagePayloadBytes
	if m.step == 0 {
		copy(m.summary[:], data)
		sum := format.Summary(m.summary[:])
		if sum.Chunks() != len(m.found) {
			m.err = fmt.Errorf("checkpoint: %w: number of chunks is %d, want %d", format.ErrCorrupt, sum.Chunks(), len(m.found))
			return
		}
		if !m.enlarge(sum.Segments()) {
			return
		}
		m.image.Objects, m.image.Version = sum.Objects(), sum.NextVersion()
		m.sawEpoch(sum.LastEpoch())
		data, offset = data[format.SummaryBytes:], format.SummaryBytes
	}
	tableStart := format.SummaryBytes + int64(len(m.found))*format.ChunkEntryBytes
	for ; offset < tableStart && len(data) > 0; offset++ {
		m.partial = append(m.partial, data[0])
		data = data[1:]
		if len(m.partial) == format.ChunkEntryBytes {
			e := format.ChunkEntry(m.partial)
			m.sawEpoch(e.Epoch())
			m.image.Pool.Chunks[(offset-format.SummaryBytes)/format.ChunkEntryBytes] = chunks.Chunk{Epoch: e.Epoch(), Live: e.Live(), Kind: e.Kind()}
			m.partial = m.partial[:0]
		}
	}
	if offset >= tableStart {
		if at, table := offset-tableStart, m.image.Table.Bytes(); at < int64(len(table)) {
			copy(table[at:], data)
		}
	}
}

// enlarge makes the table n segments large, or refuses.
func (m *Machine) enlarge(n uint32) bool {
	t := &m.image.Table
	if int64(n) > int64(t.Max()) {
		m.err = fmt.Errorf("SegTbl has room for %d segments, the partition has %d", t.Max(), n)
		return false
	}
	if n > t.Len() {
		t.Grow(n)
	}
	return true
}

// sinceThen is where in a chunk begins what was written after the checkpoint had begun; its end, if nothing was.
func (m *Machine) sinceThen(i int32) int64 {
	sum, epoch := format.Summary(m.summary[:]), m.image.Pool.Chunks[i].Epoch
	for l := range NumLogs {
		if e, end := sum.Open(l); e != 0 && e == epoch {
			return int64(end)
		}
	}
	if epoch > sum.LastEpoch() {
		return int64(m.cfg.BlockSize)
	}
	return m.image.Pool.Bytes()
}

// judge decides what every chunk is: those opened since the checkpoint are what their headers say, all
// others what the checkpoint says.
func (m *Machine) judge() {
	sum := format.Summary(m.summary[:])
	pool := m.image.Pool
	pool.KeyEpoch = sum.KeyEpoch()
	if m.image.Table.Len() == 0 && !m.enlarge(segtbl.First) {
		return
	}
	for i := range pool.Chunks {
		c, f := &pool.Chunks[i], &m.found[i]
		if f.reborn = max(f.epoch, c.Epoch) > sum.LastEpoch(); f.reborn {
			c.Live = 0
		}
		switch {
		case f.damaged != nil && (c.Kind == 0 || f.epoch != c.Epoch):
			m.err = fmt.Errorf("chunk %d: %w", i, f.damaged)
			return
		case f.damaged != nil:
			// It is as the checkpoint says.
		case f.epoch > sum.LastEpoch():
			*c = chunks.Chunk{Epoch: f.epoch, Kind: f.kind}
		case m.image.Checkpoint == nil:
			*c = chunks.Chunk{}
		}
		c.State = chunks.Sealed
		if c.Kind == format.KeyLog && c.Epoch >= pool.KeyEpoch {
			m.keys = append(m.keys, int32(i))
		}
		if c.Kind == 0 || c.Kind == format.Checkpoint {
			*c = chunks.Chunk{Epoch: c.Epoch, State: chunks.Free}
		}
	}
	for _, i := range m.image.Checkpoint {
		pool.Chunks[i] = chunks.Chunk{Epoch: m.found[i].epoch, Kind: format.Checkpoint, State: chunks.Open}
	}
	slices.SortFunc(m.keys, func(a, b int32) int { return cmp.Compare(pool.Chunks[a].Epoch, pool.Chunks[b].Epoch) })
	m.stage, m.step = replay, 0
	m.readKeys()
}

// readKeys reads the next chunk of the key log, to play what was written since the checkpoint or to count all.
func (m *Machine) readKeys() {
	switch {
	case m.step < len(m.keys):
		i := m.keys[m.step]
		from := int64(m.cfg.BlockSize)
		if m.stage == replay {
			from = m.sinceThen(i)
		}
		if m.load(i, from, m.image.Pool.Bytes()); m.pending == 0 {
			m.play() // It was full.
		}
	case m.stage == replay && m.unsaid:
		m.beginCount()
	default:
		m.findTails()
	}
}

// beginCount begins to count, from nothing.
func (m *Machine) beginCount() {
	m.stage, m.step, m.keys, m.image.Objects = count, 0, m.keys[:0], 0
	for i := range m.image.Pool.Chunks {
		c := &m.image.Pool.Chunks[i]
		c.Live = 0
		if c.Kind == format.KeyLog {
			m.keys = append(m.keys, int32(i))
		}
	}
	m.readKeys()
}

// play goes through a part of the key log, and finds segments wherever they begin, as a walk.Walk does.
func (m *Machine) play() {
	i, pool, buf := m.keys[m.step], m.image.Pool, m.loaded()
	for at := 0; at < len(buf); {
		offset := pool.Start(i) + m.at + int64(at)
		seg := format.Segment(buf[at:])
		if !seg.Begins() || seg.Check(pool.Seed(offset)) != nil {
			at += format.KeyUnit
			continue
		}
		if m.stage == count {
			m.count(seg, offset)
		} else if !m.replay(seg, offset) {
			return
		}
		at += seg.ExtentBytes()
	}
	m.step++
	if m.stage == count {
		m.readKeys()
	} else {
		m.verify()
	}
}

// replay takes a segment of the key log as the newest. Versions ascend in the log.
func (m *Machine) replay(seg format.Segment, offset int64) bool {
	v := seg.Version()
	if m.last = max(m.last, v); v < m.image.Version || v >= m.cut {
		return true
	}
	if m.image.Version < v {
		m.gaps = append(m.gaps, gap{m.image.Version, v - 1})
	}
	first, last := seg.Durable()
	for _, g := range m.gaps {
		if first <= g.last && g.first <= last {
			if from, lost := m.image.Super.VolatileFrom(), max(first, g.first); from > 0 && lost >= from {
				m.cutAt(lost)
				return false
			}
			m.err = fmt.Errorf("key log: %w: of versions %d to %d there are no segments, and they were written before that at %d", format.ErrCorrupt, max(first, g.first), min(last, g.last), offset)
			return false
		}
	}
	m.gaps = slices.DeleteFunc(m.gaps, func(g gap) bool { return g.last < first && first <= last })
	m.image.Version = v + 1
	n := seg.Number()
	if n > m.image.Table.Len() {
		// The ones added with it and before it did not come through, so none of their sources has changed.
		return true
	}
	fresh := n == m.image.Table.Len()
	if !m.enlarge(n + 1) {
		return false
	}
	e := segtbl.NewEntry(offset, seg.ExtentBytes())
	if seg.Items() == 0 {
		e = 0
	}
	m.image.Table.Set(n, e)
	m.tell(seg, offset, fresh)
	return true
}

// tell counts what a segment says of its changes. A fresh one may have been written before, by a split that had not ended when the
// checkpoint began: that was not counted.
func (m *Machine) tell(seg format.Segment, offset int64, fresh bool) {
	changes, known := seg.Changes(m.changes[:0])
	m.changes = changes
	m.expect(seg, known)
	if m.unsaid = m.unsaid || !known; m.unsaid {
		return
	}
	if seg.Items() > 0 {
		m.born(m.image.Pool.Of(offset), seg.ExtentBytes())
	}
	for i, c := range changes {
		m.image.Objects += int64(c.Keys)
		if c.Died > 0 && !(fresh && i == 0) {
			m.died(c.Chunk, c.Died)
		}
		if c.Item >= 0 {
			m.bornValue(seg.NumberedItem(c.Item))
		}
	}
}

// died takes n bytes of a chunk off the live ones.
func (m *Machine) died(i int32, n int) {
	switch all := m.image.Pool.Chunks; {
	case int(i) >= len(all) || i < 0:
		m.unsaid = true
	case m.found[i].reborn:
	case int64(all[i].Live) < int64(n):
		m.unsaid = true
	default:
		all[i].Live -= uint32(n)
	}
}

// born counts n bytes in a chunk as live.
func (m *Machine) born(i int32, n int) {
	m.found[i].reborn = false
	m.image.Pool.Chunks[i].Live += uint32(n)
}

// bornValue counts the value of an item as live.
func (m *Machine) bornValue(it format.Item) {
	place := it.ValueOffset()
	if it.ValueLen() == 0 || !m.image.Pool.Contains(place) {
		return
	}
	m.born(m.image.Pool.Of(place), format.ValueBytes(it.ValueLen()))
}

// headless looks for chunks whose header is gone, though values in them are live. They are lost, but what they were is
// not given to another.
func (m *Machine) headless() {
	for i := range m.image.Pool.Chunks {
		if c := &m.image.Pool.Chunks[i]; c.State == chunks.Free && c.Live > 0 {
			*c = chunks.Chunk{Epoch: c.Epoch, Live: c.Live, Kind: format.ValueLog, State: chunks.Bad}
		}
	}
}

// expect notes the values that have come with a segment, if they may have been lost.
func (m *Machine) expect(seg format.Segment, known bool) {
	from := m.image.Super.VolatileFrom()
	if from == 0 || seg.Version() < from {
		return
	}
	note := func(it format.Item) {
		if it.ValueLen() > 0 && m.image.Pool.Contains(it.ValueOffset()) {
			m.values = append(m.values, value{version: seg.Version(), hash: format.HashKey(m.image.Super.HashSeed(), it.Key()), place: it.ValueOffset(), length: it.ValueLen()})
		}
	}
	for _, c := range m.changes {
		if known && c.Item >= 0 {
			note(seg.NumberedItem(c.Item))
		}
	}
	for at, n := format.SegmentHeaderBytes, seg.Items(); n > 0 && !known; n-- {
		it := seg.Item(at)
		at += it.LengthBytes()
		if i := m.image.Pool.Of(it.ValueOffset()); int(i) < len(m.found) && it.ValueOffset()-m.image.Pool.Start(i) >= m.sinceThen(i) {
			note(it)
		}
	}
}

// verify reads the values that have come with the segments of a chunk, as many at once as there is room for.
func (m *Machine) verify() {
	m.looked = 0
	for used := 0; m.looked < len(m.values) && m.looked < headerReads; m.looked++ {
		v := &m.values[m.looked]
		start, n := m.image.Pool.Around(v.place, format.ValueBytes(v.length), m.cfg.BlockSize)
		if used+n > len(m.image.Buf) {
			break
		}
		m.read(0, start, m.image.Buf[used:used+n])
		v.buf = m.image.Buf[used+int(v.place-start) : used+n]
		used += n
	}
	if m.stage = verify; m.looked == 0 {
		m.values, m.stage = m.values[:0], replay
		m.readKeys()
	}
}

// verified looks at the values that were read. The first segment whose value is not there does not count, nor do those after it.
func (m *Machine) verified() {
	for _, v := range m.values[:m.looked] {
		if rec := format.Value(v.buf); rec.Check(m.image.Pool.Seed(v.place)) != nil || rec.Hash() != v.hash || rec.ValueLen() != v.length {
			m.cutAt(v.version)
			return
		}
	}
	m.values = m.values[m.looked:]
	m.verify()
}

// cutAt begins again from the checkpoint, to play the key log up to that version only.
func (m *Machine) cutAt(version uint64) {
	m.cut = version
	m.keys, m.gaps, m.values, m.unsaid, m.partial, m.changes = nil, nil, nil, false, nil, nil
	m.image.Table = segtbl.New(m.cfg.SegTbl)
	m.stage, m.step = readPages, 0
	m.readPages()
}

// count counts a segment, if it is the newest, and its values as live.
func (m *Machine) count(seg format.Segment, offset int64) {
	n, table := seg.Number(), &m.image.Table
	if n >= table.Len() || table.Get(n) != segtbl.NewEntry(offset, seg.ExtentBytes()) {
		return
	}
	m.born(m.image.Pool.Of(offset), seg.ExtentBytes())
	for at := format.SegmentHeaderBytes; at < seg.LengthBytes(); {
		it := seg.Item(at)
		at += it.LengthBytes()
		if table.Segment(format.HashKey(m.image.Super.HashSeed(), it.Key())) == n {
			m.image.Objects++
			m.bornValue(it)
		}
	}
}

// findTails begins to look for the ends of the logs in the chunks opened last, so that they are filled
// on: a store that crashes again and again does not use up its reserve. In one that was full when the checkpoint began
// there is none.
func (m *Machine) findTails() {
	m.headless()
	if m.image.Super.VolatileFrom() > 0 {
		m.startAfresh()
		return
	}
	m.stage, m.step = readTails, 0
	all, tails := m.image.Pool.Chunks, &m.image.Tails
	for l := range tails {
		tails[l].Chunk = none
	}
	newer := func(i, j int32) bool { return j == none || all[i].Epoch > all[j].Epoch }
	for i := range int32(len(all)) {
		switch c := &all[i]; {
		case c.State != chunks.Sealed || m.found[i].epoch != c.Epoch || m.sinceThen(i) >= m.image.Pool.Bytes():
		case c.Kind == format.KeyLog && newer(i, tails[KeyLog].Chunk):
			tails[KeyLog].Chunk = i
		case c.Kind == format.ValueLog && newer(i, tails[UserLog].Chunk):
			tails[UserLog].Chunk, tails[MovedLog].Chunk = i, tails[UserLog].Chunk
		case c.Kind == format.ValueLog && newer(i, tails[MovedLog].Chunk):
			tails[MovedLog].Chunk = i
		}
	}
	m.readTail()
}

// startAfresh leaves the ends of the logs alone: there may be more there than was found. What is written from now on has versions and epochs that
// none of it can have.
func (m *Machine) startAfresh() {
	for l := range m.image.Tails {
		m.image.Tails[l].Chunk = none
	}
	pool := m.image.Pool
	pool.LastEpoch += uint32(len(pool.Chunks))
	m.image.Version = max(m.image.Version, m.last+1)
	pool.Hold = true // Another opening might play it all again.
	pool.Settle()
	m.stage = done
}

func (m *Machine) readTail() {
	for m.step < NumLogs && m.image.Tails[m.step].Chunk == none {
		m.step++
	}
	if m.step == NumLogs {
		m.image.Pool.Settle()
		m.stage = done
		return
	}
	i := m.image.Tails[m.step].Chunk
	m.load(i, m.sinceThen(i), m.image.Pool.Bytes())
}

// tailRead opens a chunk again behind its last sound record. No record begins behind it; of a
// group that was torn there may be remains, which are written over.
func (m *Machine) tailRead() {
	t, pool, buf := &m.image.Tails[m.step], m.image.Pool, m.loaded()
	end := 0
	for at := 0; at < len(buf); {
		seed := pool.Seed(pool.Start(t.Chunk) + m.at + int64(at))
		if seg := format.Segment(buf[at:]); m.step == KeyLog && seg.Begins() && seg.Check(seed) == nil {
			at += seg.ExtentBytes()
			end = at
		} else if v := format.Value(buf[at:]); m.step != KeyLog && v.Begins() && v.Check(seed) == nil {
			at += format.ValueBytes(v.ValueLen())
			end = at
		} else {
			at += format.ValueUnit
		}
	}
	if t.End = m.at + int64(format.RoundUp(end, m.cfg.BlockSize)); t.End < pool.Bytes() {
		pool.Chunks[t.Chunk].State = chunks.Open
	} else {
		t.Chunk = none
	}
	m.step++
	m.readTail()
}
