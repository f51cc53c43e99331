package recovery

import (
	"jbofd/internal/kvstore/format"
	"jbofd/internal/kvstore/space"
)

// findTails looks for the ends of the logs in the chunks that were opened last, so that these are filled up and a store
// that crashes again and again does not use up its reserve. A chunk that was full when the checkpoint began has no end
// to continue at.
func (m *Machine) findTails() {
	m.image.Merges = m.merges && !m.rebuild
	m.markHeadlessDamaged()
	m.markBad()
	m.freeVacant()
	if m.image.Super.VolatileFrom() > 0 || m.lossy {
		m.skipTails()
		return
	}
	m.stage, m.step = readTails, 0
	all, tails := m.image.Pool.Chunks, &m.image.Tails
	for l := range tails {
		tails[l].Chunk = none
	}
	newer := func(i, j format.ChunkNumber) bool { return j == none || all[i].Epoch.N() > all[j].Epoch.N() }
	for i := range format.ChunkNumber(len(all)) {
		switch c := &all[i]; {
		case c.State != space.Sealed || m.found[i].epoch != c.Epoch.N() || m.afterCheckpoint(i) >= m.image.Pool.End():
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

// lostVersions is more than the number of object versions that may have been given since a checkpoint.
const lostVersions = 1 << 32

// skipTails starts new chunks for all logs. After a loss of power, or where something could not be read, there may be
// more behind the ends than was found. What is written from now on has versions and epochs that none of it can have.
func (m *Machine) skipTails() {
	for l := range m.image.Tails {
		m.image.Tails[l].Chunk = none
	}
	pool := m.image.Pool
	most := len(pool.Chunks)
	if m.listed {
		most = len(m.badOpenings)*format.Openings(m.image.Buf[:m.cfg.BlockSize]).Room() + numUnlisted
	}
	pool.LastEpoch += uint64(most) + spareEpochs
	m.image.Version = max(m.image.Version, m.last+1)
	m.image.Clock += lostVersions
	if m.lossy {
		m.image.Version += 1 << 24 // there may be others in what cannot be read
	}
	pool.Hold = true // another opening might replay all of it
	pool.Recovered()
	m.stage = done
}

// readTail reads the chunk that may hold the end of the next log, or ends recovery if there is no other log. Only the
// part of the chunk is read that was not full when the checkpoint began. tailRead is called when it is read.
func (m *Machine) readTail() {
	for m.step < NumLogs && m.image.Tails[m.step].Chunk == none {
		m.step++
	}
	if m.step == NumLogs {
		m.image.Pool.Recovered()
		m.stage = done
		return
	}
	i := m.image.Tails[m.step].Chunk
	m.load(i, m.afterCheckpoint(i), m.image.Pool.End())
}

// tailRead finds the last valid record in the chunk that readTail has read, and opens the chunk again, so that its log
// continues at the first block behind that record. No valid record begins there, but a torn group may have left a part
// of one, which is overwritten. If no block is left, or one cannot be read, the log begins with a new chunk.
func (m *Machine) tailRead() {
	t, pool, buf := &m.image.Tails[m.step], m.image.Pool, m.loaded()
	end := 0
	for at := 0; at < len(buf); {
		seed := pool.Seed(pool.At(t.Chunk, m.at.Add(at)))
		if seg := format.Segment(buf[at:]); m.step == KeyLog && seg.Begins() && seg.Check(seed) == nil {
			at += seg.ExtentBytes()
			end = at
		} else if v := format.Value(buf[at:]); m.step != KeyLog && v.Begins() && v.Check(seed) == nil {
			at += v.RecordBytes()
			end = at
		} else {
			at += format.ValueUnit
		}
	}
	if t.End = m.at.Add(format.RoundUp(end, m.cfg.BlockSize)); t.End < pool.End() && len(m.unread) == 0 {
		pool.Chunks[t.Chunk].State = space.Open
	} else {
		t.Chunk = none
	}
	m.step++
	m.readTail()
}
