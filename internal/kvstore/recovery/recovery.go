// Package recovery reads a key-value partition and says what is in it. It writes nothing.
//
//	superblocks ──> headers of all chunks ──> checkpoint ──> key log since then ──> whole key log ──> ends of the logs
//
// The key log is played in order, which brings the SegTbl up to date. What lives in the chunks is counted in a second
// pass, over all of the key log, when it is known which segments are the newest: what died since the checkpoint leaves no trace, and
// what is not found dead is space lost, a little more with every crash. After a clean stop the checkpoint has the counts.
//
// A Machine has no I/O: it asks for reads and is told when they are done.
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
	count
	readTails
	done
)

// headerReads is how many chunk headers are read at once.
const headerReads = 32

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
	bufs    [][]byte
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
	// played: something was. gaps are the versions that were not found, as far as they may yet turn out to be damaged.
	played bool
	gaps   []gap
}

type gap struct{ first, last uint64 }

type found struct {
	epoch uint32
	kind  format.Kind
	// damaged is what is wrong with a header that must have been one of the partition's.
	damaged error
}

// New makes a Machine that reads a partition.
func New(cfg Config) *Machine {
	return &Machine{cfg: cfg, image: Image{Table: segtbl.New(cfg.SegTbl), Version: 1}}
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
	switch m.stage {
	case readSupers:
		if m.pending == 0 {
			m.chooseSuper()
		}
	case readHeaders:
		m.headerRead(slot)
	case readPages:
		m.pageRead()
	case replay, count:
		m.play()
	case readTails:
		m.tailRead()
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

func (m *Machine) read(slot int32, offset int64, buf []byte) {
	m.pending++
	m.reads = append(m.reads, Read{Slot: slot, Offset: offset, Buf: buf})
}

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
	for i := range min(headerReads, len(m.found)) {
		m.bufs = append(m.bufs, m.cfg.Alloc(m.cfg.BlockSize))
		m.readHeader(int32(i))
	}
	if len(m.found) == 0 {
		m.err = fmt.Errorf("superblock: %w: a partition of %d bytes has no chunk of %d", format.ErrCorrupt, m.cfg.PartitionBytes, m.image.Super.ChunkBytes())
	}
}

func (m *Machine) readHeader(slot int32) {
	m.of[slot] = m.next
	m.read(slot, m.image.Pool.Start(m.next), m.bufs[slot])
	m.next++
}

// headerRead takes a chunk's header. If nothing in it looks like ours, nothing in the chunk counts. A block is written
// whole or not at all, so what is ours and not sound is damaged.
func (m *Machine) headerRead(slot int32) {
	i, sb := m.of[slot], m.image.Super
	h := format.ChunkHeader(m.bufs[slot][:format.ChunkHeaderBytes])
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
	m.bufs = nil
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
	m.readPage()
}

func (m *Machine) sawEpoch(epoch uint32) {
	m.image.Pool.LastEpoch = max(m.image.Pool.LastEpoch, epoch)
}

func (m *Machine) readPage() {
	chunk, offset := m.image.Super.PagePlace(uint32(m.step))
	m.read(0, m.image.Pool.Start(m.image.Checkpoint[chunk])+offset, m.image.Buf[:format.PageBytes])
}

// pageRead takes a page of the checkpoint.
func (m *Machine) pageRead() {
	sb := m.image.Super
	p := format.Page(m.image.Buf)[:format.PageBytes]
	if m.err = p.Check(sb.Checkpoint(), uint32(m.step)); m.err != nil {
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
	if m.step++; uint32(m.step) < sb.Pages() {
		m.readPage()
		return
	}
	m.judge()
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

// since reports whether what is at that offset of a chunk was written after the checkpoint began.
func (m *Machine) since(i int32, offset int64) bool {
	sum := format.Summary(m.summary[:])
	epoch := m.image.Pool.Chunks[i].Epoch
	for l := range NumLogs {
		if e, end := sum.Open(l); e != 0 && e == epoch {
			return offset >= int64(end)
		}
	}
	return epoch > sum.LastEpoch()
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
		c, f := &pool.Chunks[i], m.found[i]
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

// readKeys reads the next chunk of the key log.
func (m *Machine) readKeys() {
	if m.step == len(m.keys) {
		if m.stage == replay && !(!m.played && format.Summary(m.summary[:]).Clean()) {
			m.beginCount()
			return
		}
		m.findTails()
		return
	}
	m.read(0, m.image.Pool.Start(m.keys[m.step]), m.image.Buf)
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

// play goes through a chunk of the key log. What follows in the blocks of something that is not sound is not played, for compaction
// would not find it either; but what is in the table is counted.
func (m *Machine) play() {
	i, pool, buf := m.keys[m.step], m.image.Pool, m.image.Buf
	for at := m.cfg.BlockSize; at < len(buf); {
		offset := pool.Start(i) + int64(at)
		seg := format.Segment(buf[at:])
		if !seg.Begins() || seg.Check(pool.Seed(offset)) != nil {
			if m.stage == count {
				at += format.KeyUnit
			} else {
				at = format.RoundUp(at+1, m.cfg.BlockSize)
			}
			continue
		}
		if m.stage == count {
			m.count(seg, offset)
		} else if m.since(i, int64(at)) && !m.replay(seg, offset) {
			return
		}
		at += format.RoundUp(seg.LengthBytes(), format.KeyUnit)
	}
	m.step++
	m.readKeys()
}

// replay takes a segment of the key log as the newest. Versions ascend in the log.
func (m *Machine) replay(seg format.Segment, offset int64) bool {
	v := seg.Version()
	if v < m.image.Version {
		return true
	}
	if m.image.Version < v {
		m.gaps = append(m.gaps, gap{m.image.Version, v - 1})
	}
	first, last := seg.Durable()
	for _, g := range m.gaps {
		if first <= g.last && g.first <= last {
			m.err = fmt.Errorf("key log: %w: of versions %d to %d there are no segments, and they were written before that at %d", format.ErrCorrupt, max(first, g.first), min(last, g.last), offset)
			return false
		}
	}
	m.gaps = slices.DeleteFunc(m.gaps, func(g gap) bool { return g.last < first && first <= last })
	m.played, m.image.Version = true, v+1
	if seg.Number() > m.image.Table.Len() {
		// The ones added with it and before it did not come through, so none of their sources has changed.
		return true
	}
	if !m.enlarge(seg.Number() + 1) {
		return false
	}
	e := segtbl.NewEntry(offset, seg.LengthBytes())
	if seg.Items() == 0 {
		e = 0
	}
	m.image.Table.Set(seg.Number(), e)
	return true
}

// count counts a segment, if it is the newest, and its values as live.
func (m *Machine) count(seg format.Segment, offset int64) {
	n, table, pool := seg.Number(), &m.image.Table, m.image.Pool
	if n >= table.Len() || table.Get(n) != segtbl.NewEntry(offset, seg.LengthBytes()) {
		return
	}
	pool.Born(pool.Of(offset), format.RoundUp(seg.LengthBytes(), format.KeyUnit))
	for at := format.SegmentHeaderBytes; at < seg.LengthBytes(); {
		it := seg.Item(at)
		at += it.LengthBytes()
		if table.Segment(format.HashKey(m.image.Super.HashSeed(), it.Key())) != n {
			continue
		}
		m.image.Objects++
		if place := it.ValueOffset(); it.ValueLen() > 0 && pool.Contains(place) {
			i := pool.Of(place)
			if c := &pool.Chunks[i]; c.Kind != format.ValueLog {
				// Its header is gone. The values are lost, but what they were is not given to another.
				*c = chunks.Chunk{Epoch: c.Epoch, Kind: format.ValueLog, State: chunks.Bad}
			}
			pool.Born(i, format.ValueBytes(it.ValueLen()))
		}
	}
}

// findTails begins to look for the ends of the logs in the chunks opened last, so that they are filled
// on: a store that crashes again and again does not use up its reserve.
func (m *Machine) findTails() {
	m.stage, m.step = readTails, 0
	all, tails := m.image.Pool.Chunks, &m.image.Tails
	for l := range tails {
		tails[l].Chunk = none
	}
	newer := func(i, j int32) bool { return j == none || all[i].Epoch > all[j].Epoch }
	for i := range int32(len(all)) {
		switch c := &all[i]; {
		case c.State != chunks.Sealed:
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

func (m *Machine) readTail() {
	for m.step < NumLogs && m.image.Tails[m.step].Chunk == none {
		m.step++
	}
	if m.step == NumLogs {
		m.image.Pool.Settle()
		m.stage = done
		return
	}
	m.read(0, m.image.Pool.Start(m.image.Tails[m.step].Chunk), m.image.Buf)
}

// tailRead opens a chunk again behind its last sound record. No record begins behind it; of a
// group that was torn there may be remains, which are written over.
func (m *Machine) tailRead() {
	t, pool, buf := &m.image.Tails[m.step], m.image.Pool, m.image.Buf
	end := m.cfg.BlockSize
	for at := end; at < len(buf); {
		seed := pool.Seed(pool.Start(t.Chunk) + int64(at))
		if seg := format.Segment(buf[at:]); m.step == KeyLog && seg.Begins() && seg.Check(seed) == nil {
			at += format.RoundUp(seg.LengthBytes(), format.KeyUnit)
			end = at
		} else if v := format.Value(buf[at:]); m.step != KeyLog && v.Begins() && v.Check(seed) == nil {
			at += format.ValueBytes(v.ValueLen())
			end = at
		} else {
			at += format.ValueUnit
		}
	}
	c := &pool.Chunks[t.Chunk]
	// In a chunk of the key log that the checkpoint has done with nobody would look for more.
	t.End = int64(format.RoundUp(end, m.cfg.BlockSize))
	if t.End < pool.Bytes() && m.found[t.Chunk].epoch == c.Epoch && (m.step != KeyLog || m.since(t.Chunk, t.End)) {
		c.State = chunks.Open
	} else {
		t.Chunk = none
	}
	m.step++
	m.readTail()
}
