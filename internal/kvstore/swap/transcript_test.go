package swap

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"jbofd/internal/kvstore"
	"jbofd/internal/kvstore/format"
	"jbofd/internal/pipeline"
	"jbofd/internal/units"
	"jbofd/internal/uuid"
)

// transcript runs a source partition and a swap area on another drive. I/Os complete, and the source's own store
// replies, when the transcript says so. Messages between the two machines arrive at once.
type transcript struct {
	src *Source
	a   *Area
	now int64
	// part is the source's partition, which has only a manifest; log is the area.
	part, log []byte
	cfg       AreaConfig
	act       Actions
	areaAct   AreaActions
	ios       []transcriptIO
	// stored are the requests that the source's store has.
	stored []kvstore.Request
	reqs   map[uint64]string
	bufs   map[uint64][]byte
	tag    uint64
	out    strings.Builder
}

// transcriptIO is an I/O in flight. ofArea: it is an I/O of the area, not of the source.
type transcriptIO struct {
	IO
	ofArea bool
}

var errTranscript = errors.New("device error")

func (x *transcript) line(format string, args ...any) { fmt.Fprintf(&x.out, format+"\n", args...) }

// disk is where an I/O goes.
func (x *transcript) disk(q *transcriptIO) []byte {
	if q.ofArea || q.Area >= 0 {
		return x.log
	}
	return x.part
}

func (x *transcript) describe(q *transcriptIO) string {
	what, kind := [...]string{pipeline.Read: "read", pipeline.Write: "write"}[q.Op], ""
	switch {
	case !q.ofArea && q.Area < 0:
		m := format.SwapManifest(q.Buf)
		kind = fmt.Sprintf("source: %s copy of the manifest at %d: generation %d", what, q.Offset, m.Generation())
		for i := range m.Areas() {
			_, floor := m.Area(i)
			kind += fmt.Sprintf(", the area from place %d on", floor)
		}
	case !q.ofArea:
		kind = fmt.Sprintf("source: %s %d bytes of the swap log at %d", what, len(q.Buf), q.Offset)
	case q.Tag == superTag:
		kind = fmt.Sprintf("area: %s superblock: generation %d, LogHead %d", what,
			format.AreaSuperblock(q.Buf).Generation(), format.AreaSuperblock(q.Buf).LogHead())
	default:
		g := format.SwapGroup(q.Buf)
		kind = fmt.Sprintf("area: %s group of %d records at place %d", what, g.Records(), g.Place())
	}
	if q.FUA {
		kind += "; FUA"
	}
	return kind
}

var statusNames = [...]string{"OK", "NotFound", "Exists", "CapacityExceeded", "DeviceError", "Corrupt"}

// turn lets both machines act until neither has anything left to do.
func (x *transcript) turn() {
	for again := true; again; {
		again = false
		x.src.Turn(x.now, &x.act)
		for _, p := range x.act.Replies {
			line := fmt.Sprintf("reply to %s: %s", x.reqs[p.Tag], statusNames[p.Status])
			if buf := x.bufs[p.Tag]; buf != nil && p.Status == kvstore.OK {
				line += fmt.Sprintf(", %d bytes of %q", p.ValueLen, buf[:1])
			}
			x.line("%s", line)
		}
		for _, q := range x.act.Appends {
			again = true
			x.line("source: append %s %s, %d bytes",
				[...]string{format.SwapPut: "put", format.SwapDelete: "delete"}[q.Kind], q.Key, len(q.Value))
			if !x.a.Submit(&q.Append) {
				x.line("area: not now")
			}
		}
		for _, q := range x.act.Releases {
			again = true
			x.line("source: release what is before place %d", q.Place)
			x.a.Release(q.Source, q.Place)
		}
		for _, q := range x.act.IOs {
			x.begin(transcriptIO{IO: q})
		}
		var r kvstore.Request
		for x.src.NextForStore(&r) {
			x.line("source: to its own store: %s %s",
				[...]string{kvstore.Get: "get", kvstore.Put: "put", kvstore.Delete: "delete"}[r.Op], r.Key)
			r.Key = bytes.Clone(r.Key)
			x.stored = append(x.stored, r)
			x.src.TakenByStore()
		}
		x.a.Turn(x.now, &x.areaAct)
		for i := range x.areaAct.Outcomes {
			again = true
			o := x.areaAct.Outcomes[i]
			x.line("area: outcome: %s", [...]string{Stored: "stored", Refused: "refused",
				Indeterminate: "indeterminate"}[o.Result])
			x.src.Outcome(&o)
		}
		for _, q := range x.areaAct.IOs {
			x.begin(transcriptIO{IO: q, ofArea: true})
		}
		x.act.Replies, x.act.Appends, x.act.Releases, x.act.IOs = x.act.Replies[:0], x.act.Appends[:0],
			x.act.Releases[:0], x.act.IOs[:0]
		x.areaAct.Outcomes, x.areaAct.IOs = x.areaAct.Outcomes[:0], x.areaAct.IOs[:0]
	}
}

func (x *transcript) begin(q transcriptIO) {
	x.line("%s", x.describe(&q))
	x.ios = append(x.ios, q)
}

// done completes all I/Os in flight.
func (x *transcript) done(err error) {
	all := x.ios
	x.ios = nil
	for _, q := range all {
		if err == nil {
			x.move(&q)
		}
		if q.ofArea {
			x.a.Complete(q.Tag, err)
		} else {
			x.src.Complete(q.Tag, err)
		}
	}
}

func (x *transcript) move(q *transcriptIO) {
	if q.Op == pipeline.Read {
		copy(q.Buf, x.disk(q)[q.Offset:])
	} else {
		copy(x.disk(q)[q.Offset:], q.Buf)
	}
}

// open opens both machines from what is on the drives.
func (x *transcript) open() error {
	read := func(disk []byte) Read {
		return func(offset units.ExtentOffset, b []byte) error { copy(b, disk[offset:]); return nil }
	}
	var err error
	if x.a, err = OpenArea(x.cfg, read(x.log)); err != nil {
		return err
	}
	manifest, err := LoadManifest(read(x.part), heap)
	if err != nil {
		return err
	}
	at, err := x.a.Attach(uuid.UUID{7})
	if err != nil {
		return err
	}
	x.line("manifest: %d areas; area: %d keys found", len(manifest.Areas), len(at.Records))
	x.ios, x.stored, x.reqs, x.bufs = nil, nil, map[uint64]string{}, map[uint64][]byte{}
	x.src, err = NewSource(SourceConfig{
		Manifest: manifest, UUID: uuid.UUID{7}, BlockSize: 512, FUA: true, MaxValueBytes: 4096,
		Areas: []AreaRef{{UUID: x.a.UUID(), Log: x.a.Log(), BlockSize: 512, Attachment: at}},
	})
	return err
}

func (x *transcript) command(d *datadriven.TestData) string {
	x.out.Reset()
	number := func(key string) (n int64) {
		for _, a := range d.CmdArgs {
			if a.Key == key {
				v, err := strconv.Atoi(a.Vals[0])
				if err != nil {
					panic(err)
				}
				n = int64(v)
			}
		}
		return n
	}
	var err error
	failed := false
	for _, a := range d.CmdArgs {
		failed = failed || a.Key == "error"
	}
	if failed {
		err = errTranscript
	}
	switch d.Cmd {
	case "box": // box: a source partition and an area, new
		x.cfg = AreaConfig{AreaBytes: 1 << 20, BlockSize: 512, GroupBytes: 8 << 10, MaxValueBytes: 4096, FUA: true}
		x.part, x.log = make([]byte, 64<<10), make([]byte, x.cfg.AreaBytes)
		write := func(disk []byte) Write {
			return func(offset units.ExtentOffset, b []byte) error { copy(disk[offset:], b); return nil }
		}
		if err := errors.Join(FormatArea(x.cfg, uuid.UUID{5}, 99, write(x.log)),
			FormatManifest(uuid.UUID{7}, write(x.part), heap), x.open()); err != nil {
			return err.Error()
		}
		x.turn()
	case "load": // load source=N area=N: requests that wait at the two drives
		x.src.Observe(x.now, int(number("source")), 1<<30, []Load{{Waiting: int(number("area")), Used: x.a.Used()}})
		x.turn()
	case "put", "get", "delete": // put KEY [size=N]
		x.tag++
		r := kvstore.Request{Op: map[string]kvstore.Op{"put": kvstore.Put, "get": kvstore.Get,
			"delete": kvstore.Delete}[d.Cmd], Tag: x.tag, Key: []byte(d.CmdArgs[0].Key)}
		switch d.Cmd {
		case "put":
			r.Value = bytes.Repeat(r.Key[:1], max(100, int(number("size"))))
		case "get":
			r.Value = make([]byte, 4096)
			x.bufs[x.tag] = r.Value
		}
		x.reqs[x.tag] = d.Cmd + " " + string(r.Key)
		if v := x.src.Submit(&r); v != Taken {
			x.line("%s", [...]string{ToStore: "to the source's own store, as without swapping", Full: "later"}[v])
		}
		x.turn()
	case "done": // done [error]: all I/Os under way end
		x.done(err)
		x.turn()
	case "stored": // stored [error]: the source's store answers what it has
		st := kvstore.OK
		if failed {
			st = kvstore.DeviceError
		}
		all := x.stored
		x.stored = nil
		for _, r := range all {
			x.src.Stored(r.Tag, kvstore.Reply{Status: st, ValueLen: len(r.Value)})
		}
		x.turn()
	case "turn": // turn us=N: time passes
		x.now += number("us") * 1000
		x.turn()
	case "crash": // crash [done]: power is lost, and the writes under way were done or not
		for _, q := range x.ios {
			if len(d.CmdArgs) > 0 {
				x.move(&q)
			}
		}
		if err := x.open(); err != nil {
			return err.Error()
		}
		x.turn()
	case "state":
		return fmt.Sprintf("%d keys out, the log from %d to %d, %d I/Os under way", x.src.Stats().Keys, x.a.head,
			x.a.tail, len(x.ios))
	default:
		return "unknown command"
	}
	if x.out.Len() == 0 {
		return "(nothing)"
	}
	return x.out.String()
}

// TestTranscripts records the actions and replies of a source and an area, event by event, in testdata/transcripts,
// which are meant to be read.
func TestTranscripts(t *testing.T) {
	datadriven.Walk(t, "testdata/transcripts", func(t *testing.T, path string) {
		x := &transcript{}
		datadriven.RunTest(t, path, func(_ *testing.T, d *datadriven.TestData) string { return x.command(d) })
	})
}
