package kvstore

import (
	"bytes"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"jbofd/internal/kvstore/format"
	"jbofd/internal/pipeline"
	"jbofd/internal/units"
)

// transcript runs a store on a drive whose I/Os complete when the transcript says so.
type transcript struct {
	cfg  Config
	s    *Store
	now  int64
	act  Actions
	disk []byte
	// ios are the I/Os in flight, by the number that the transcript gives them.
	ios  map[int]IO
	next int
	tag  uint64
	// reqs describe requests by tag, bufs are where Gets put their values.
	reqs map[uint64]string
	bufs map[uint64][]byte
	out  strings.Builder
}

var errDevice = errors.New("device error")

// where says which part of the partition an offset is in.
func (x *transcript) where(offset units.ExtentOffset) string {
	switch {
	case offset == 0:
		return "superblock A"
	case offset == format.SuperblockOffset(2, x.cfg.PartitionBytes):
		return "superblock B"
	}
	at := int64(offset) - format.AreaStart
	return fmt.Sprintf("chunk %d +%d", at/x.cfg.ChunkBytes, at%x.cfg.ChunkBytes)
}

// describe describes the content of a write. It leaves out older records that share the first block.
func (x *transcript) describe(q *IO) string {
	switch h := format.ChunkHeader(q.Buf); {
	case q.Offset == 0 || q.Offset == format.SuperblockOffset(2, x.cfg.PartitionBytes):
		sb := format.Superblock(q.Buf)
		if bytes.Equal(sb, make([]byte, len(sb))) {
			return "zeroes"
		}
		return fmt.Sprintf("generation %d, checkpoint %d of %d pages", sb.Generation(), sb.Checkpoint(), sb.Pages())
	case h.Begins():
		return fmt.Sprintf("header of a %s chunk, epoch %d", [...]string{format.KeyLog: "key log",
			format.ValueLog: "value log", format.Checkpoint: "checkpoint"}[h.Kind()], h.Epoch())
	case string(q.Buf[:8]) == "JBOFDKVP":
		c, what := &x.s.ckpt, ""
		if c.increment {
			what = ", of an increment"
		}
		return fmt.Sprintf("page %d of checkpoint %d%s", format.Page(q.Buf).Index(), c.id, what)
	}
	var all []string
	again := 0
	note := func(offset units.ExtentOffset, rec []byte, what string) {
		if bytes.Equal(rec, x.disk[offset:][:len(rec)]) {
			again++
		} else {
			all = append(all, what)
		}
	}
	pool := x.s.pool
	for at := 0; at < len(q.Buf); {
		offset := q.Offset.Add(units.Bytes(at))
		seg, val := format.Segment(q.Buf[at:]), format.Value(q.Buf[at:])
		n := format.ValueUnit
		switch {
		case seg.Begins() && seg.Check(pool.Seed(offset)) == nil:
			n = seg.ExtentBytes()
			note(offset, seg[:n], fmt.Sprintf("segment %d version %d, keys: %d", seg.Number(), seg.Version(),
				seg.Items()))
		case val.Begins() && val.Check(pool.Seed(offset)) == nil:
			n = val.RecordBytes()
			note(offset, val[:n], fmt.Sprintf("value of %d bytes", val.ValueLen()))
		}
		at += n
	}
	if len(all) > 4 {
		all = append(all[:2], fmt.Sprintf("… %d records", len(all)))
	}
	if again > 0 {
		all = append(all, fmt.Sprintf("(%d that were there)", again))
	}
	return strings.Join(all, ", ")
}

// turn lets the store act and records its actions.
func (x *transcript) turn() {
	x.act.WakeNS = 0
	x.s.Turn(x.now, &x.act)
	for _, p := range x.act.Replies {
		status := [...]string{"OK", "NotFound", "Exists", "CapacityExceeded", "DeviceError", "Corrupt", "InvalidKey",
			"InvalidValue"}[p.Status]
		line := fmt.Sprintf("reply to %s: %s", x.reqs[p.Tag], status)
		if buf, ok := x.bufs[p.Tag]; ok && p.Status == OK {
			line += fmt.Sprintf(", %d bytes of %q", p.ValueLen, buf[:min(1, p.ValueLen)])
		}
		x.line(line)
	}
	headers := 0
	for i, q := range x.act.IOs {
		x.ios[x.next] = q
		// Recovery reads the headers of all chunks and a block behind each, which are summarised in one line.
		if q.Op == pipeline.Read && len(q.Buf) == 2*x.cfg.BlockSize && q.Offset >= format.AreaStart &&
			(int64(q.Offset)-format.AreaStart)%x.cfg.ChunkBytes == 0 {
			headers++
			if x.next++; i == len(x.act.IOs)-1 {
				x.line(fmt.Sprintf("#%d to #%d read the headers of %d chunks; background", x.next-headers, x.next-1,
					headers))
			}
			continue
		}
		line := fmt.Sprintf("#%d %s", x.next, [...]string{pipeline.Read: "read", pipeline.Write: "write",
			pipeline.Flush: "flush"}[q.Op])
		if q.Op != pipeline.Flush {
			line += fmt.Sprintf(" %d bytes at %s", len(q.Buf), x.where(q.Offset))
		}
		if q.Op == pipeline.Write {
			line += ": " + x.describe(&q)
		}
		if q.FUA {
			line += "; FUA"
		}
		if q.Background {
			line += "; background"
		}
		x.line(line)
		x.next++
	}
	for _, d := range x.act.Damage {
		x.line(fmt.Sprintf("damage at %s, segment %d", x.where(d.Offset), d.Segment))
	}
	x.act.IOs, x.act.Replies, x.act.Damage = x.act.IOs[:0], x.act.Replies[:0], x.act.Damage[:0]
}

func (x *transcript) line(s string) { x.out.WriteString(s + "\n") }

// end ends an I/O.
func (x *transcript) end(n int, err error) {
	q := x.ios[n]
	delete(x.ios, n)
	if err == nil {
		x.move(&q)
	}
	x.s.Complete(q.Tag, err)
}

// move carries out an I/O on the drive.
func (x *transcript) move(q *IO) {
	switch q.Op {
	case pipeline.Read:
		copy(q.Buf, x.disk[q.Offset:])
	case pipeline.Write:
		copy(x.disk[q.Offset:], q.Buf)
	}
}

// pending returns the numbers of the I/Os in flight, in order.
func (x *transcript) pending() (all []int) {
	for n := range x.ios {
		all = append(all, n)
	}
	slices.Sort(all)
	return all
}

// run completes all I/Os in order until there are none, or until an action of the store matches a regular expression.
// It returns the replies.
func (x *transcript) run(until string) (replies string) {
	for {
		x.out.Reset()
		x.turn()
		asked := ""
		for l := range strings.Lines(x.out.String()) {
			if strings.HasPrefix(l, "reply") {
				replies += l
			} else {
				asked += l
			}
		}
		x.out.Reset()
		if until != "" && regexp.MustCompile(until).MatchString(asked) {
			x.out.WriteString(asked)
			return replies
		}
		all := x.pending()
		if len(all) == 0 {
			return replies
		}
		x.end(all[0], nil)
		x.now += 1000
	}
}

func (x *transcript) open(t *testing.T) {
	s, err := New(x.cfg)
	if err != nil {
		t.Fatal(err)
	}
	x.s, x.ios, x.reqs, x.bufs = s, map[int]IO{}, map[uint64]string{}, map[uint64][]byte{}
	x.cfg.Format = false
}

func (x *transcript) submit(name string, op Op, cond Condition, key string, size int) {
	x.tag++
	r := Request{Op: op, Condition: cond, Tag: x.tag, Key: []byte(key)}
	switch op {
	case Put:
		r.Value = bytes.Repeat([]byte(key[:1]), size)
	case Get:
		r.Value = make([]byte, 64<<10)
		x.bufs[x.tag] = r.Value
	}
	x.reqs[x.tag] = name + " " + key
	if !x.s.Submit(&r) {
		x.line("no room for " + name + " " + key)
	}
}

// arg returns an argument of a command as a number, or a default.
func arg(d *datadriven.TestData, key string, def int) int {
	for _, a := range d.CmdArgs {
		if a.Key == key && len(a.Vals) == 1 {
			n, err := strconv.Atoi(a.Vals[0])
			if err != nil {
				return -1
			}
			return n
		}
	}
	return def
}

func (x *transcript) command(t *testing.T, d *datadriven.TestData) string {
	x.out.Reset()
	ops := map[string]Op{"put": Put, "get": Get, "delete": Delete, "exist": Exist}
	switch d.Cmd {
	case "store": // store [chunks=N] [keys-per-segment=N] [volatile]: a new store, opened
		chunks := int64(arg(d, "chunks", 24))
		x.cfg = Config{
			PartitionBytes: chunks*(128<<10) + 128<<10, BlockSize: 512, ChunkBytes: 128 << 10, GroupBytes: 8 << 10,
			KeysPerSegment: arg(d, "keys-per-segment", 13), FUA: true,
			Format: true, UUID: [16]byte{1}, HashSeed: 42, SegTbl: make([]byte, 5*1000),
		}
		x.disk, x.next = make([]byte, x.cfg.PartitionBytes), 0
		x.open(t)
		x.turn()
	case "put", "get", "delete", "exist": // put KEY… [size=N] [if-absent] [if-present]
		cond := Always
		var keys []string
		for _, a := range d.CmdArgs {
			switch {
			case a.Key == "if-absent":
				cond = IfAbsent
			case a.Key == "if-present":
				cond = IfPresent
			case len(a.Vals) == 0:
				keys = append(keys, a.Key)
			}
		}
		for _, k := range keys {
			x.submit(d.Cmd, ops[d.Cmd], cond, k, arg(d, "size", 100))
		}
		x.turn()
	case "fill": // fill keys=N size=N [rounds=N] [until=REGEXP]: Puts one after the other, run to their ends
		until := ""
		for _, a := range d.CmdArgs {
			if a.Key == "until" {
				until = strings.Join(a.Vals, " ")
			}
		}
		for r := range arg(d, "rounds", 1) {
			for i := range arg(d, "keys", 1) {
				key := i
				if r > 0 { // some keys often and others never, so that no chunk becomes obsolete as a whole
					key = i * i % arg(d, "keys", 1)
				}
				x.submit("put", Put, Always, fmt.Sprintf("k%d", key), arg(d, "size", 100))
				if x.run(until); x.out.Len() > 0 {
					return fmt.Sprintf("(after %d Puts)\n", r*arg(d, "keys", 1)+i+1) + x.out.String()
				}
			}
		}
	case "run": // run: everything to its end, of which the replies are shown
		x.out.WriteString(x.run(""))
	case "done": // done [N…] [error]: those I/Os end, or all
		var err error
		var which []int
		for _, a := range d.CmdArgs {
			if a.Key == "error" {
				err = errDevice
			} else if n, bad := strconv.Atoi(a.Key); bad == nil {
				which = append(which, n)
			}
		}
		if which == nil {
			which = x.pending()
		}
		for _, n := range which {
			if _, ok := x.ios[n]; !ok {
				return fmt.Sprintf("there is no I/O %d", n)
			}
			x.end(n, err)
		}
		x.turn()
	case "turn": // turn [us=N]: time passes
		x.now += int64(arg(d, "us", 0)) * 1000
		x.turn()
	case "checkpoint":
		x.s.Checkpoint()
		x.turn()
	case "crash": // crash [kept=N…]: the program dies; of the writes under way only those were done
		for _, a := range d.CmdArgs {
			for _, v := range a.Vals {
				n, err := strconv.Atoi(v)
				if err != nil {
					return err.Error()
				}
				q := x.ios[n]
				x.move(&q)
			}
		}
		x.open(t)
		x.turn()
	case "state":
		st := x.s.Stats()
		return fmt.Sprintf("%d keys in %d segments, %d of %d chunks free, %d I/Os under way, wake at %d us", st.Objects,
			st.Segments, st.FreeChunks, st.Chunks, len(x.ios), max(0, x.act.WakeNS-x.now)/1000)
	default:
		return "unknown command"
	}
	if x.out.Len() == 0 {
		return "(nothing)"
	}
	return x.out.String()
}

// TestTranscripts records the actions and replies of a store, event by event, in testdata/transcripts, which are meant
// to be read.
func TestTranscripts(t *testing.T) {
	t.Parallel()
	datadriven.Walk(t, "testdata/transcripts", func(t *testing.T, path string) {
		x := &transcript{}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string { return x.command(t, d) })
	})
}
