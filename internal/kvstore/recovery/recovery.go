// Package recovery finds out what a key-value partition contains. It also has what describes the state of a partition
// for the next recovery (CheckpointStream) and what goes through the records of a chunk (Walk).
//
//	superblocks ──> headers of all chunks ──> checkpoint ──> key log since then ──> ends of the logs
//	                                                                          └──> whole key log ──┘
//
// A Machine replays the key log in order. This brings the SegTbl and the live bytes of each chunk up to date, because a
// segment records what it has changed (format.Change). Only if one does not, because the device had failed or too much
// had changed at once, all of the key log is read to count the live bytes anew, after it is known which segments are
// the newest.
//
// A Machine does no I/O: it asks for reads and is told when they have ended. It reads one chunk at a time, all pieces
// of it at once. It writes nothing; what has to be written before a partition is open is a Finish.
package recovery

import (
	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/lookup"
	"jbofd/internal/kvstore/space"
	"jbofd/internal/units"
)

// Logs in the order of a format.Summary.
const (
	KeyLog = iota
	UserLog
	MovedLog
	NumLogs
)

// Read is a read that a Machine asks for. Buf belongs to the device until Done is called with Slot.
type Read struct {
	Slot   int32
	Offset units.ExtentOffset
	Buf    []byte
}

// Config describes a Machine.
type Config struct {
	// PartitionBytes is the length of the partition, or more: that of its extent. BlockSize is the device's.
	PartitionBytes int64
	BlockSize      int
	// SegTbl is the memory for the table.
	SegTbl []byte
	// Alloc returns memory for I/O.
	Alloc space.Alloc
	// AcceptLoss is the Token of the Loss with which the partition may be opened; "": with none.
	AcceptLoss string
}

// Image is what a partition contains.
type Image struct {
	// Super is the superblock that counts. OneCopy: the other copy does not name the same checkpoint.
	Super   format.Superblock
	OneCopy bool
	// NoteAt is where a note is missing that says where the partition ends, at the end of its extent; 0: none is.
	NoteAt units.ExtentOffset
	// Pool has all chunks: Free, Sealed, or Open if a log continues in it or it belongs to the checkpoint.
	Pool *space.Pool
	// Table is the SegTbl.
	Table lookup.SegTbl
	// Objects is the number of keys.
	Objects int64
	// Version is the version of the next segment.
	Version uint64
	// Clock is the greatest object version that was given, or more. FirstExpiry is a time before which nothing expires,
	// in unix seconds; 0: nothing expires.
	Clock       uint64
	FirstExpiry uint32
	// Checkpoint are the chunks of the checkpoint, in order.
	Checkpoint []format.ChunkNumber
	// Tails say where the logs continue.
	Tails [NumLogs]Tail
	// Buf is memory of the size of a chunk that the caller may use.
	Buf []byte
	// NextOpenings is the sequence number of the next block that lists chunks.
	NextOpenings uint64
	// LostHeaders is the number of chunks whose headers could not be read, or were damaged.
	LostHeaders int
	// Loss is what was missing, and accepted; nil: nothing.
	Loss *Loss
	// Merges: what is written from now on may say that the table has become shorter.
	Merges bool
}

// Tail is the end of a log: a chunk, -1 if a new one is needed, and where in the chunk it is, in whole blocks.
type Tail struct {
	Chunk format.ChunkNumber
	End   format.ChunkOffset
}

type stage uint8

const (
	begin stage = iota
	readSupers
	readOpenings
	readHeaders
	findPages
	readPages
	probe
	replay
	verify
	count
	readTails
	done
)

const (
	// headerReads is how many chunk headers are read at once.
	headerReads = 128
	// pieceBytes is the length of one read of a chunk.
	pieceBytes = 256 << 10
)

const none = -1

// Machine reads a partition, in the stages of the package comment. Its caller does the reads and tells it when they
// have ended, until Image or Err has an outcome.
type Machine struct {
	cfg     Config
	stage   stage
	err     error
	image   Image
	reads   []Read
	pending int // reads under way
	// step is how far the stage is: the next page of the checkpoint, chunk of the key log, or log whose end is read.
	step int
	// sbs are the superblocks at the beginning, at the end of the extent, and at another end of the partition of which
	// one of those knows, if there is one: follows. sbErrs are the errors of reading them.
	sbs     [3][]byte
	sbErrs  [3]error
	follows bool
	// at is where in its chunk the bytes in image.Buf begin, have their number.
	at   format.ChunkOffset
	have int
	// pieces are the reads of image.Buf, by slot. unread are the offsets in image.Buf of the blocks that cannot be
	// read, in order. failures counts all such blocks.
	pieces   []piece
	unread   []int
	failures int
	// listed: only the headers of the chunks in toRead are read. badOpenings are the blocks of the lists that cannot be
	// read.
	listed      bool
	toRead      []format.ChunkNumber
	badOpenings []bool
	// next is which header is read next; of are the chunks whose headers are being read, by slot.
	next int
	of   [headerReads]format.ChunkNumber
	// found is what the headers say, by chunk.
	found []found
	// lost are the chunks whose headers are lost, or may be. searched: it is known what these chunks are, except for
	// the doubtful ones. Those are among the unsafe ones, which cannot be read where they might have records that were
	// written since the checkpoint.
	lost             []lostHeader
	searched         bool
	doubtful, unsafe []format.ChunkNumber
	summary          [format.SummaryBytes]byte
	// stream is the stream of the checkpoint that is being read. partial collects what lies in two of its pages: a
	// chunk's entry, or a unit of the SegTbl.
	stream  streamState
	partial []byte
	// segments is the length of the table that the last stream gives; 0: that is not known. nextVersion and merges are
	// those of its summary.
	segments    uint32
	nextVersion uint64
	merges      bool
	// keys are the chunks of the key log that are replayed or counted, in order.
	keys []format.ChunkNumber
	// gaps are the ranges of versions that were not found. A later segment may say that they were durable, and so are
	// damaged.
	gaps []gap
	// skipped is how many bytes could not be read behind the last segment that was found.
	skipped int64
	// badPages is the number of pages of the checkpoint that cannot be used. rebuild: the checkpoint is not used
	// therefore, and all of the key log is replayed. Then hasLength says that the length of the table is known.
	badPages           int
	rebuild, hasLength bool
	// keyEnd is where the last segment ends in the last chunk of the key log.
	keyEnd format.ChunkOffset
	// loss is what is missing. lossy: it was accepted.
	loss  Loss
	lossy bool
	// uncounted: a segment did not record what it has changed.
	uncounted bool
	changes   []format.Change
	// cut is the first version that does not count, because a loss of power has taken it or its value.
	cut uint64
	// last is the highest version that was found.
	last uint64
	// values are the new values of the segments of the last chunk, which may have been lost with the power; looked of
	// them are being read.
	values []value
	looked int
}

// streamState is how far a stream has been read.
type streamState struct {
	id     uint64
	offset int64
	// increment: it is not a full checkpoint. ended: its last byte was read.
	increment, ended bool
}

type gap struct{ first, last uint64 }

// value is where the value of a segment of that version must be.
type value struct {
	version, hash uint64
	place         units.ExtentOffset
	length        int
	bytes         int // of the record
	buf           []byte
	// from and to are where buf is in image.Buf, in whole blocks.
	from, to int
}

type found struct {
	epoch uint64
	kind  format.Kind
	// lost: the header is lost, and nothing was found in the chunk that was written since the checkpoint.
	lost bool
	// used: a segment written since the checkpoint refers to a value in the chunk. It is kept for doubtful chunks.
	used bool
	// named: a segment in the part of the key log that is replayed refers to a value in the chunk, whether it counts or
	// not. It is kept after the use of a volatile device.
	named bool
	// vacant: the chunk belongs to the key log, was opened since the checkpoint, and has no segment.
	vacant bool
	// read: the header was read, and may have been lost.
	read bool
	// reopened: the chunk was opened since the checkpoint, and nothing was found that was committed to it since then.
	// Bytes that die in it belong to its earlier use.
	reopened bool
}

// New returns a Machine that reads a partition.
func New(cfg Config) *Machine {
	return &Machine{cfg: cfg, cut: 1 << 63, image: Image{Table: lookup.NewSegTbl(cfg.SegTbl), Version: 1,
		Clock: 1}}
}

// Next appends the reads that the Machine asks for to dst.
func (m *Machine) Next(dst []Read) []Read {
	if m.stage == begin {
		m.stage = readSupers
		mem := space.Buffers{Alloc: m.cfg.Alloc}
		for i := range m.sbs {
			m.sbs[i] = mem.Take("the superblocks", format.SuperblockBytes)
		}
		if mem.Err != nil {
			m.err = mem.Err
			return dst
		}
		for i := range 2 {
			m.read(int32(i), format.SuperblockOffset(uint64(i+1), m.cfg.PartitionBytes), m.sbs[i])
		}
	}
	dst = append(dst, m.reads...)
	m.reads = m.reads[:0]
	return dst
}

// Done ends a read.
func (m *Machine) Done(slot int32, err error) {
	m.pending--
	if m.err != nil {
		return
	}
	if err != nil && !m.failed(slot, err) {
		return
	}
	switch {
	case m.stage == readSupers:
		if m.pending == 0 && !m.followEnd() {
			m.chooseSuper()
		}
	case m.stage == readOpenings:
		if m.pending == 0 {
			m.openingsRead()
		}
	case m.stage == readHeaders:
		m.headerRead(slot, err == nil)
	case m.pending > 0:
	case m.stage == findPages:
		m.pageFound()
	case m.stage == readPages:
		m.pagesRead()
	case m.stage == probe:
		m.probed()
	case m.stage == readTails:
		m.tailRead()
	case m.stage == verify:
		m.verified()
	default:
		m.scanSegments()
	}
}

// Image returns what the partition contains, or nil as long as it is not known.
func (m *Machine) Image() *Image {
	if m.stage != done || m.err != nil {
		return nil
	}
	return &m.image
}

// Err says why the partition cannot be opened, once no read is under way any more.
//
// Errors: those of the device; ErrBlank, ErrVersion and ErrCorrupt of package format; a LossError, which wraps
// ErrCorrupt; space.ErrNoMemory.
func (m *Machine) Err() error {
	if m.pending > 0 {
		return nil
	}
	return m.err
}

// Progress says what is being read, and how many of how many have been.
func (m *Machine) Progress() (what string, read, of int) {
	switch m.stage {
	case begin, readSupers, readOpenings:
		return "superblocks", 0, 2
	case readHeaders:
		return "chunk headers", m.next, m.headers()
	case findPages, probe:
		return "chunks without a header", m.step, len(m.lost)
	case readPages:
		return "pages of the checkpoint", m.step, int(m.image.Super.Pages())
	case replay, verify:
		return "chunks of the key log since the checkpoint", m.step, len(m.keys)
	case count:
		return "chunks of the key log to count them", m.step, len(m.keys)
	}
	return "ends of logs", min(m.step, NumLogs), NumLogs
}

func (m *Machine) read(slot int32, offset units.ExtentOffset, buf []byte) {
	m.pending++
	m.reads = append(m.reads, Read{Slot: slot, Offset: offset, Buf: buf})
}

// load reads a part of chunk i, in whole blocks, into image.Buf. Blocks that cannot be read are zeroed.
func (m *Machine) load(i format.ChunkNumber, from, to format.ChunkOffset) {
	m.at, m.have = from, int(to-from)
	m.beginPieces()
	for n := 0; n < m.have; n += pieceBytes {
		m.readPiece(piece{offset: m.image.Pool.At(i, from.Add(n)), from: n, to: min(n+pieceBytes, m.have)})
	}
}

// loaded returns the bytes that were read by load.
func (m *Machine) loaded() []byte { return m.image.Buf[:m.have] }
