package daemon

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"time"

	"jbofd/internal/kvstore"
	"jbofd/internal/nvmeof/target/connection"
	"jbofd/internal/pipeline"
	"jbofd/internal/ssd"
	"jbofd/internal/telemetry"
)

// NewLog returns the logger that a configuration asks for: format is text or json.
func NewLog(w io.Writer, format string, level slog.Leveler) *slog.Logger {
	o := &slog.HandlerOptions{Level: level}
	if format == "json" {
		return slog.New(slog.NewJSONHandler(w, o))
	}
	return slog.New(slog.NewTextHandler(w, o))
}

// logStart logs which jbofd starts and the drives that it will open, in that order: opening takes time, and a drive
// that does not answer is the first one without a line of its own.
func (n *Node) logStart() {
	names := make([]string, len(n.cfg.SSDs))
	for i, s := range n.cfg.SSDs {
		names[i] = s.Name
	}
	n.log.Info("starting", "version", n.opts.Version, "commit", n.opts.Commit, "config", n.opts.ConfigFile, "ssds",
		strings.Join(names, ", "))
}

// peerLog returns a logger for events that hosts and other nodes can cause: of each kind it passes on as many lines a
// second as the configuration says, and of Connects that are refused for the same cause one in refusedEvery.
func (n *Node) peerLog() *slog.Logger {
	return slog.New(telemetry.LimitHandler(n.log.Handler(),
		telemetry.LimitOptions{Lines: n.cfg.Log.PeerLinesPerSec, Cause: refusal, CauseEvery: refusedEvery,
			Dropped: n.tel.LogDropped}))
}

// refusedEvery is the time in which the same refusal is logged once. A host that is not allowed, or a second node of a
// name, tries again for ever.
const refusedEvery = 5 * time.Minute

// refusal tells refused Connects apart: by the address that they come from, but for its port, by host, subsystem and
// status.
func refusal(r *slog.Record) (cause string) {
	if r.Message != connection.Refused {
		return ""
	}
	r.Attrs(func(a slog.Attr) bool {
		switch v := a.Value.String(); a.Key {
		case "remote":
			if host, _, err := net.SplitHostPort(v); err == nil {
				v = host
			}
			cause += v + " "
		case "host", "subsystem", "status":
			cause += v + " "
		}
		return true
	})
	return cause
}

// slowLogEvery is the time in which slowLog passes on one line of each kind.
const slowLogEvery = time.Minute

// slowLog returns a logger for what the server of etcd says, which repeats as long as something is wrong or slow.
func (n *Node) slowLog() *slog.Logger {
	return slog.New(telemetry.LimitHandler(n.log.Handler(), telemetry.LimitOptions{Lines: 1, Every: slowLogEvery,
		Dropped: n.tel.LogDropped}))
}

// fewLog returns a logger for what may happen to many ranges at once, or have another reason at each look: of each kind
// it passes on ten lines in turnLogEvery.
func (n *Node) fewLog() *slog.Logger {
	return slog.New(telemetry.LimitHandler(n.log.Handler(), telemetry.LimitOptions{Lines: 10, Every: turnLogEvery,
		Dropped: n.tel.LogDropped}))
}

func (n *Node) setLevel(name string) {
	var l slog.Level
	if l.UnmarshalText([]byte(name)) == nil {
		n.level.Set(l)
	}
}

// turnLogEvery is the time in which a turnLog passes on a bounded number of equal lines. A full drive fails every
// write, and a host may read the same damaged record all the time; each would be a line.
const turnLogEvery = 10 * time.Second

// turnLog logs what turns report, at a bounded rate. A turn must not block on standard error, so turnLog has a
// goroutine that writes the lines.
type turnLog struct {
	lines   chan func(*slog.Logger)
	dropped func(int)
	stopped sync.WaitGroup
	// said is the damage that was logged last. It belongs to the goroutine.
	said     [64]saidDamage
	nextSaid int
}

// damageEvery is the time in which the same damage is logged once: an export comes upon it twice, and an import that
// repairs it finds it again.
const damageEvery = time.Minute

// saidDamage is damage that was logged at a time.
type saidDamage struct {
	nqn  string
	nsid uint32
	kvstore.Damage
	at time.Time
}

// isNew reports whether damage was not logged a short while ago, and notes that it is.
func (l *turnLog) isNew(nqn string, nsid uint32, d kvstore.Damage) bool {
	now := time.Now()
	for i := range l.said {
		s := &l.said[i]
		if s.nqn == nqn && s.nsid == nsid && s.Damage == d && now.Sub(s.at) < damageEvery {
			return false
		}
	}
	l.said[l.nextSaid] = saidDamage{nqn, nsid, d, now}
	l.nextSaid = (l.nextSaid + 1) % len(l.said)
	return true
}

// newTurnLog starts a turnLog that passes on so many equal lines in turnLogEvery. The function dropped is told how
// many are left out.
func newTurnLog(log *slog.Logger, lines int, dropped func(int)) *turnLog {
	l := &turnLog{lines: make(chan func(*slog.Logger), 16), dropped: dropped}
	limited := slog.New(telemetry.LimitHandler(log.Handler(), telemetry.LimitOptions{Lines: lines, Every: turnLogEvery,
		Dropped: dropped}))
	l.stopped.Go(func() {
		for write := range l.lines {
			write(limited)
		}
	})
	return l
}

// add has a line written. It does not block; a turn calls it, which only one goroutine has at a time.
func (l *turnLog) add(write func(*slog.Logger)) {
	select {
	case l.lines <- write:
	default:
		l.dropped(1)
	}
}

// close writes the lines that were added and ends the goroutine. Nothing is added any more.
func (l *turnLog) close() {
	close(l.lines)
	l.stopped.Wait()
}

// deviceFailed adds a line about a request that the device of a drive has failed.
func (l *turnLog) deviceFailed(name string, op pipeline.Op, err error) {
	l.add(func(log *slog.Logger) {
		said := "the drive failed a request"
		switch {
		case errors.Is(err, ssd.ErrNoSpace):
			said = "no space left for the file of the drive: writes fail until there is some"
		case errors.Is(err, ssd.ErrGone):
			said = "the drive is gone: requests to it fail"
		}
		log.Error(said, "ssd", name, "op", op.String(), "error", err)
	})
}

// driveEvent adds a line about what has happened to a drive.
func (l *turnLog) driveEvent(name string, kind ssd.HealthEvent, what string) {
	l.add(func(log *slog.Logger) {
		switch kind {
		case ssd.EventTimeout:
			log.Warn("a command of the drive is aborted", "ssd", name, "reason", what)
		case ssd.EventReset:
			log.Error("the controller of the drive is reset", "ssd", name, "reason", what)
		default:
			log.Warn("the drive reports an event", "ssd", name, "type", kind.String(), "event", what)
		}
	})
}

// damaged adds a line about something in a key-value store that is not what was written.
func (l *turnLog) damaged(nqn string, nsid uint32, ssd string, d kvstore.Damage) {
	l.add(func(log *slog.Logger) {
		if !l.isNew(nqn, nsid, d) {
			l.dropped(1)
			return
		}
		log = log.With("subsystem", nqn, "nsid", nsid, "ssd", ssd, "offset", int64(d.Offset))
		switch {
		case d.Unreadable:
			log.Error("the drive does not return a segment: its keys cannot be read", "segment", d.Segment)
		case d.LostBytes > 0:
			log.Error("damaged chunk: keys have values there that are not to be found; the chunk is not used again "+
				"before they are replaced", "lost_bytes", d.LostBytes)
		case d.Hash == 0:
			log.Error("damaged segment: its keys cannot be read", "segment", d.Segment)
		default:
			log.Error("damaged value: it is not what was written", "segment", d.Segment,
				"key_hash", fmt.Sprintf("%016x", d.Hash))
		}
	})
}
